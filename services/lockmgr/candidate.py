"""The part of this node in the election: campaign, take over, serve, step down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from baton.nameserver.v1.stored_node_pb2 import StoredNode
from batonmq.errors import BatonError, NotLeader, NotServing
from batonmq_server.lockmgr.config import LockmgrSettings
from batonmq_server.lockmgr.core.lock_table import LockTable
from batonmq_server.lockmgr.group_membership import GroupMembership
from batonmq_server.lockmgr.leader import Leader
from batonmq_server.lockmgr.lock_store import BACKOFF, LockStore
from batonmq_server.lockmgr.metrics import LockmgrMetrics
from batonmq_server.lockmgr.offsets_client import OffsetsChannels, OffsetsClient
from batonmq_server.lockmgr.takeover import Takeover
from batonmq_server.lockmgr.term import Term
from batonmq_server.runtime.election import Election
from batonmq_server.runtime.group_placements import GroupPlacements
from batonmq_server.runtime.leader_registration import LeaderRegistration
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.runtime.sibling_watch import SiblingWatch

log = logging.getLogger(__name__)

T = TypeVar("T")


class Candidate:
    """Takes part in the election; while this node leads, it has a `Leader`.

    Args:
        members: Of the groups, from live copies.
        channels: To the leaders of the offsets replica sets.
        placements: Which replica set keeps which group.
    """

    def __init__(
        self,
        settings: LockmgrSettings,
        runtime: Runtime,
        members: GroupMembership,
        channels: OffsetsChannels,
        placements: GroupPlacements,
    ) -> None:
        self._settings, self._runtime = settings, runtime
        self._members, self._channels, self._placements = members, channels, placements
        self._metrics = LockmgrMetrics(runtime.registry, runtime.hub)
        self._election = Election(
            runtime.etcd, "lockmgr", settings.node_id, ttl_ms=settings.leader_lease_ms
        )
        self._leader: Leader | None = None
        self.registration = LeaderRegistration(runtime)
        self.siblings = SiblingWatch(runtime, self._election.key)

    def leader(self) -> Leader:
        """Return the leader that answers calls at this node.

        Raises:
            NotLeader: another node leads, or none does.
            NotServing: this node leads and has not taken over yet.
        """
        if not self._election.valid():
            address = self._other_leader()
            raise NotLeader(
                f"{self._settings.node_id} does not lead",
                retry_after_ms=200,
                facts={"leader": address} if address else {},
            )
        if self._leader is None:
            raise NotServing("the new leader is reading the locks", retry_after_ms=200)
        return self._leader

    async def run(self) -> None:
        """Campaign and lead until cancelled."""
        await self._election.run(self._lead)

    async def wait_for_changes(self) -> None:
        """Return once no change is in progress, or after some seconds."""
        if self._leader is not None:
            await self._leader.wait_for_changes()

    async def _lead(self, number: int) -> None:
        """Load, announce, confirm, and only then serve (protocol section 12)."""
        term = self._term(number)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(term.store.run())
                tasks.create_task(term.offsets.run())
                takeover = await self._take_over(term)
                limit = self._settings.watchers_max
                self._leader = Leader(term, self._members, self._election.valid, tasks, limit)
                tasks.create_task(takeover.run(self._leader.lock_confirmed))
                self.registration.set_epoch(number)
        finally:
            if self._leader is not None:
                self._leader.close()
            self._leader = None
            self.registration.set_epoch(0)
            self._metrics.set_gauges(0, LockTable(term.policy).counts(), watchers=0)

    def _term(self, number: int) -> Term:
        runtime, policy = self._runtime, self._settings.policy()
        return Term(
            number=number,
            policy=policy,
            table=LockTable(policy),
            offsets=OffsetsClient(self._channels, self._placements, number),
            store=LockStore(runtime.etcd, self._election.compare(), runtime.random),
            clock=runtime.clock,
            random=runtime.random,
            metrics=self._metrics,
        )

    async def _take_over(self, term: Term) -> Takeover:
        await self._members.ready()
        await self._placements.ready()
        loaded = await self._until_answered("load", term.store.load)
        takeover = Takeover(term, loaded)
        await takeover.begin()
        log.info("leading term=%d locks=%d", term.number, len(loaded))
        return takeover

    async def _until_answered(self, step: str, call: Callable[[], Awaitable[T]]) -> T:
        tries = 0
        while True:
            try:
                return await call()
            except BatonError as error:
                log.warning("takeover delayed step=%s error=%s", step, error)
            await asyncio.sleep(BACKOFF.delay_ms(tries, self._runtime.random) / 1000)
            tries += 1

    def _other_leader(self) -> str:
        """Return the registered address of the leader if it is another node; else empty."""
        for key, stored in self._runtime.nodes.values.items():
            if key.startswith("lockmgr/") and key != f"lockmgr/{self._settings.node_id}":
                node = StoredNode.FromString(stored.value)
                if node.leader:
                    return node.address
        return ""
