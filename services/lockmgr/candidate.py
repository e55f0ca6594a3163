"""Leadership: campaign, take over what the leader before left, serve, step down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from batonmq.errors import BatonError, NotLeader, NotServing
from batonmq_server.lockmgr.config import LockmgrSettings
from batonmq_server.lockmgr.core.lock_table import LockTable
from batonmq_server.lockmgr.handover import Term
from batonmq_server.lockmgr.leader import Leader
from batonmq_server.lockmgr.lock_store import BACKOFF, LockStore
from batonmq_server.lockmgr.membership import Membership
from batonmq_server.lockmgr.metrics import LockmgrMetrics
from batonmq_server.lockmgr.offsets_client import OffsetsClient, OffsetsPeers
from batonmq_server.lockmgr.takeover import Takeover
from batonmq_server.runtime.election import Election
from batonmq_server.runtime.group_placements import GroupPlacements
from batonmq_server.runtime.leader_registration import LeaderRegistration
from batonmq_server.runtime.service_runtime import Runtime

log = logging.getLogger(__name__)

T = TypeVar("T")


class Candidate:
    """This node's part in the election; while it leads there is a desk.

    Args:
        members: Of the groups, by live copies.
        peers: Where offsets is, and `places` which of its sets keeps which group.
    """

    def __init__(
        self,
        settings: LockmgrSettings,
        runtime: Runtime,
        members: Membership,
        peers: OffsetsPeers,
        places: GroupPlacements,
    ) -> None:
        self._settings, self._runtime = settings, runtime
        self._members, self._peers, self._places = members, peers, places
        self._recorder = LockmgrMetrics(runtime.registry, runtime.hub)
        self._election = Election(
            runtime.etcd, "lockmgr", settings.node_id, ttl_ms=settings.leader_lease_ms
        )
        self._desk: Leader | None = None
        self.registration = LeaderRegistration(runtime)

    def desk(self) -> Leader:
        """Who answers.

        Raises:
            NotLeader: another node, or nobody, leads.
            NotServing: this node leads and has not taken over yet.
        """
        if not self._election.valid():
            leader = self._other_leader()
            raise NotLeader(
                f"{self._settings.node_id} does not lead",
                retry_after_ms=200,
                facts={"leader": leader} if leader else {},
            )
        if self._desk is None:
            raise NotServing("the new leader is reading the locks", retry_after_ms=200)
        return self._desk

    async def run(self) -> None:
        """Campaign and lead for ever; to be run as one task."""
        await self._election.run(self._lead)

    async def settle(self) -> None:
        """Wait, but not for long, until no change is under way; for a drain."""
        if self._desk is not None:
            await self._desk.settle()

    async def _lead(self, number: int) -> None:
        """Load, announce, confirm, and only then serve (protocol section 12)."""
        term = self._term(number)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(term.store.run())
                tasks.create_task(term.offsets.run())
                taking_over = await self._take_over(term)
                limit = self._settings.watchers_max
                self._desk = Leader(term, self._members, self._election.valid, tasks, limit)
                tasks.create_task(taking_over.run(self._desk.confirmed))
                self.registration.set_epoch(number)
        finally:
            if self._desk is not None:
                self._desk.close()
            self._desk = None
            self.registration.set_epoch(0)
            self._recorder.standing(0, LockTable(term.policy).counts(), watchers=0)

    def _term(self, number: int) -> Term:
        runtime, policy = self._runtime, self._settings.policy()
        return Term(
            number=number,
            policy=policy,
            table=LockTable(policy),
            offsets=OffsetsClient(self._peers, self._places, number),
            store=LockStore(runtime.etcd, self._election.compare(), runtime.random),
            clock=runtime.clock,
            random=runtime.random,
            recorder=self._recorder,
        )

    async def _take_over(self, term: Term) -> Takeover:
        await self._members.ready()
        await self._places.ready()
        entries = await self._until_answered("load", term.store.load)
        taking_over = Takeover(term, entries)
        await taking_over.begin()
        log.info("leading term=%d locks=%d", term.number, len(entries))
        return taking_over

    async def _until_answered(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        tries = 0
        while True:
            try:
                return await ask()
            except BatonError as error:
                log.warning("taking over waits what=%s error=%s", what, error)
            await asyncio.sleep(BACKOFF.delay_ms(tries, self._runtime.random) / 1000)
            tries += 1

    def _other_leader(self) -> str:
        """Address of a registered leader other than this node; empty if there is none."""
        for key, stored in self._runtime.nodes.values.items():
            if key.startswith("lockmgr/") and key != f"lockmgr/{self._settings.node_id}":
                node = nameserver_pb.Node.FromString(stored.value)
                if node.leader:
                    return node.address
        return ""
