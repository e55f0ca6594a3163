"""A node of a storage replica set: follows the leader, and leads once it is elected.

A follower derives the same in-memory state from the log as the leader: queues, keys, scheduled
batches and producer sequences. So it has all of it when it is elected.
"""

from __future__ import annotations

import asyncio
import logging

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq.errors import BatonError, NotEnoughReplicas, NotServing
from batonmq_server.runtime import role
from batonmq_server.runtime.member import Member
from batonmq_server.runtime.process import Runtime
from batonmq_server.storage.components import StorageComponents
from batonmq_server.storage.config import StorageSettings
from batonmq_server.storage.flusher import InThread
from batonmq_server.storage.leadership import Leadership
from batonmq_server.storage.log_copy import LogCopy
from batonmq_server.storage.log_follower import LogFollower
from batonmq_server.storage.metric_stream import StorageMetricStream
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.node_role import NodeRole

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
_BEGINS = "the new leader waits for its followers"


class Role(role.Role[Leadership], NodeRole):
    """This node's part in its replica set; call `begin` first.

    Attributes:
        copy: This node's copy of the log.
    """

    replicated = True
    copy: LogCopy

    def __init__(
        self,
        settings: StorageSettings,
        runtime: Runtime,
        metrics: StorageMetrics,
        stream: StorageMetricStream,
        in_thread: InThread,
    ) -> None:
        self._settings, self._runtime, self._in_thread = settings, runtime, in_thread
        self._metrics, self._stream = metrics, stream
        self.broker = settings.broker_name
        super().__init__(
            Member(
                runtime,
                name=self.broker,
                members=settings.members,
                lease_ms=settings.leader_lease_ms,
                position=lambda: self.copy.position,
                room=settings.room,
            )
        )
        self.member.standing_back = lambda: self.copy.failed
        self._following: LogFollower | None = None
        self._acting = False

    def begin(self, copy: LogCopy, following: LogFollower) -> None:
        """The copy, and what keeps it like the leader's while that is another node."""
        self.copy, self._following = copy, following
        copy.on_failure.append(lambda: self.member.step_back("its disk has failed"))

    @property
    def acting(self) -> StorageComponents:
        """What clients ask.

        Raises:
            NotLeader: this node is not the leader.
            NotServing: it has just been elected.
        """
        components = self.leadership.components
        if not self._acting:
            raise NotServing(_BEGINS, retry_after_ms=100)
        return components

    @property
    def is_follower(self) -> bool:
        """See NodeRole."""
        return not (self._acting and self.member.election.valid())

    def next_read_node(self, behind_bytes: int) -> str:
        """See NodeRole."""
        far = behind_bytes > self._settings.memory_window
        if self.is_follower or self._leadership is None:
            leader_is_there = self._following is not None and self._following.is_connected()
            return self._settings.node_id if far or not leader_is_there else ""
        followers = self._leadership.keeper.books.in_sync - {self._settings.node_id}
        return min(followers, default="") if far else ""

    def refusal(self, members_min: int = 1) -> BatonError | None:
        """See NodeRole."""
        leadership = self.leadership
        if not self._acting:
            raise NotServing(_BEGINS, retry_after_ms=100)
        keeper = leadership.keeper
        try:
            keeper.check_room()
        except NotEnoughReplicas as error:
            return error
        count = len(keeper.books.in_sync)
        if count < members_min:
            return NotEnoughReplicas(
                f"{count} replicas are in sync, {members_min} have to be for this durability",
                retry_after_ms=1_000,
                facts={"in_sync": count, "limit": members_min},
            )
        return None

    def durability_of(self, next_position: int) -> pb.Durability.ValueType:
        """See NodeRole."""
        leadership = self.leadership
        store = leadership.components.node.store
        if next_position > store.log.synced_position:
            return pb.DURABILITY_MEMORY
        replicated = (
            next_position <= store.readable_position
            and leadership.keeper.books.holders(next_position + 1) > 1
        )
        return pb.DURABILITY_REPLICATED if replicated else pb.DURABILITY_FSYNCED

    def leader_first_position(self) -> int | None:
        """First position of the leader's log; None if this node is the leader."""
        if self._acting or self._following is None:
            return None
        return self._following.first_position

    async def run(self) -> None:
        """Stand for election and lead for ever; to be run as one task."""
        await self.member.election.run(self._lead)

    async def _lead(self, revision: int) -> None:
        async with self.copy.writing:
            try:
                leadership = await self._begun(revision)
            except (OSError, BatonError) as error:
                self.member.step_back(f"an epoch can't be begun: {error}")
                return
            if leadership is None:
                return
            keeper, components = leadership.keeper, leadership.components
            self._leadership = leadership
            self.member.registration.leads(keeper.epoch)
            log.info("leader epoch=%d in_sync=%s", keeper.epoch, sorted(keeper.books.in_sync))
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(keeper.tend())
                    await leadership.settled()
                    self._acting = True
                    self._metrics.leader.set(1)
                    tasks.create_task(self._watch(leadership))
                    await components.due.run()
            except* OSError as errors:
                self.copy.fail(errors.exceptions[0])
            finally:
                leadership.end()
                self._leadership, self._acting = None, False
                components.fail_waiting_calls("this node is not the leader any more")
                self._metrics.leader.set(0)
                self._metrics.in_sync_replicas.set(0)
                self._metrics.replica_lag_bytes.clear()
                self._metrics.replica_lag_seconds.clear()
                self.member.registration.leads(0)

    async def _begun(self, revision: int) -> Leadership | None:
        """A leadership whose epoch stands on the disk; None if this node must not begin one.

        Raises:
            OSError, BatonError: the disk has failed, or has no room.
        """
        components = self.copy.components
        await components.flusher.sync()
        position = components.node.store.log.next_position + 1
        keeper = self.member.keeper(revision, position, self._settings.replica_policy)
        if self.member.lacks(keeper):
            return None
        leadership = Leadership(keeper, components, self._runtime.clock, self._stream)
        await leadership.begin(self._in_thread)
        return leadership

    async def _watch(self, leadership: Leadership) -> None:
        """Update the gauges; resign if the log is damaged and another member has all of it."""
        components, books = leadership.components, leadership.keeper.books
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            self._metrics.leader.set(not self.is_follower)
            self._metrics.in_sync_replicas.set(len(books.in_sync))
            now_ms = self._runtime.clock.monotonic_ms()
            for name in books.followers:
                self._metrics.replica_lag_bytes.labels(name).set(books.lag(name))
                lag_ms = books.lag_ms(name, now_ms)
                self._metrics.replica_lag_seconds.labels(name).set(lag_ms / 1000)
            others = books.holders(components.node.store.readable_position + 1) > 1
            damaged_from = components.damage.first_damaged_position
            if (
                damaged_from is not None
                and damaged_from >= components.node.store.log.first_position
                and others
            ):
                self.member.step_back(f"its log is damaged at position {damaged_from}")
                return
