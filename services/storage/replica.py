"""A node of a storage replica set: follows the leader, and leads once it is elected.

A follower derives the same in-memory state from the log as the leader: queues, keys, scheduled
batches and producer sequences. So it has all of it when it is elected.
"""

from __future__ import annotations

import asyncio
import logging

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common import timeouts
from batonmq.errors import (
    BatonError,
    DataLoss,
    NoQuorum,
    NotEnoughReplicas,
    NotLeader,
    NotServing,
)
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.replication.replica_node import ReplicaNode
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.storage.components import StorageComponents
from batonmq_server.storage.config import StorageSettings
from batonmq_server.storage.core.retention import DiskState
from batonmq_server.storage.flusher import InThread
from batonmq_server.storage.leadership import StorageLeadership
from batonmq_server.storage.log_copy import LogCopy
from batonmq_server.storage.log_follower import LogFollower
from batonmq_server.storage.metric_stream import StorageMetricStream
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.node_role import NodeRole

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
_LOOK_UP_MS = 200
"""A reader waits so long before it looks the leader up."""
_TOPICS_RETRY_S = 0.2
_TOPICS_WAIT_S = 10.0
_JUST_ELECTED = "this node has just been elected and waits for its followers"


class StorageReplica(ReplicaNode[StorageLeadership], NodeRole):
    """The role of this node in its replica set; call `begin` first.

    Args:
        topics: The copy of the topics by which this node accepts messages.

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
        topics: EtcdMirror,
    ) -> None:
        self._settings, self._runtime, self._in_thread = settings, runtime, in_thread
        self._topics = topics
        self._metrics, self._stream = metrics, stream
        self.broker = settings.broker_name
        super().__init__(
            runtime,
            name=self.broker,
            node_ids=settings.members,
            lease_ms=settings.leader_lease_ms,
            position=lambda: self.copy.position,
            room=settings.room,
        )
        self._follower: LogFollower | None = None
        self._serving = False

    def begin(self, copy: LogCopy, follower: LogFollower) -> None:
        """Set the copy of the log and its follower, before anything else is called."""
        self.copy, self._follower = copy, follower
        copy.on_failure.append(lambda: self.step_back("its disk has failed"))

    @property
    def leading_components(self) -> StorageComponents:
        """The components that serve clients.

        Raises:
            NotLeader: this node is not the leader.
            NotServing: this node has just been elected and does not serve yet.
        """
        components = self.leadership.components
        if not self._serving:
            raise NotServing(_JUST_ELECTED, retry_after_ms=100)
        return components

    @property
    def is_follower(self) -> bool:
        """See NodeRole."""
        return not (self._serving and self.election.valid())

    def next_read_node(self, behind_bytes: int) -> str:
        """See NodeRole."""
        lags_far = behind_bytes > self._settings.memory_window
        if self.is_follower or self._leadership is None:
            if self._follows():
                return self._settings.node_id if lags_far else ""
            return "" if self.outdated() else self._settings.node_id
        followers = self._leadership.in_sync_set.current - {self._settings.node_id}
        return min(followers, default="") if lags_far else ""

    @property
    def has_confirmed(self) -> bool:
        """See NodeRole."""
        follower = self._follower
        return not self.is_follower or (
            follower is not None and follower.is_connected() and follower.has_confirmed()
        )

    def leader_age_ms(self) -> int:
        """See NodeRole."""
        self.check()
        return self.election.confirmed_age_ms()

    def outdated(self) -> NotLeader | None:
        """See NodeRole.

        A follower is current while the leader answers it, or while etcd answers it and no leader
        is registered.
        """
        if not self.is_follower or self._follows():
            return None
        node_id = self._settings.node_id
        if not self.election.in_touch():
            return NotLeader(
                f"{node_id} is not the leader of {self.broker}, and etcd does not answer it: "
                "another node may lead",
                retry_after_ms=_LOOK_UP_MS,
                facts={"node": node_id},
            )
        if leaders := self._registered_leaders():
            return NotLeader(
                f"{node_id} is not the leader of {self.broker}, and does not reach the leader "
                f"{leaders[0]}",
                retry_after_ms=_LOOK_UP_MS,
                facts={"node": node_id, "leader": leaders[0]},
            )
        return None

    def _follows(self) -> bool:
        return self._follower is not None and self._follower.is_connected()

    def rejection(self, members_min: int = 1) -> BatonError | None:
        """See NodeRole."""
        leadership = self.leadership
        if not self._serving:
            raise NotServing(_JUST_ELECTED, retry_after_ms=100)
        in_sync_set = leadership.in_sync_set
        try:
            in_sync_set.check_size()
        except NotEnoughReplicas as error:
            return error
        count = len(in_sync_set.current)
        if count < members_min:
            return NotEnoughReplicas(
                f"{count} replicas are in sync; this durability needs {members_min}",
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
            and leadership.in_sync_set.tracker.count_with(next_position + 1) > 1
        )
        return pb.DURABILITY_REPLICATED if replicated else pb.DURABILITY_FSYNCED

    def leaves_to_others(self, lost: DataLoss) -> bool:
        """See NodeRole."""
        leadership, position = self.leadership, lost.detail.position
        if position is None or not self._others_have_all(leadership):
            return False
        leadership.components.damage.report_batch(position, lost.message)  # see `_watch`
        return True

    def leader_first_position(self) -> int | None:
        """Return the first position of the leader's log; None if this node is the leader."""
        if self._serving or self._follower is None:
            return None
        return self._follower.first_position

    def _can_lead(self) -> bool:
        return not self.copy.failed

    async def _lead(self, term: int) -> None:
        async with self.copy.writing:
            try:
                leadership = await self._begin_epoch(term)
            except (OSError, BatonError) as error:
                self.step_back(f"its new epoch can't be recorded: {error}")
                return
            if leadership is None:
                return
            components = leadership.components
            try:
                async with self._leading(leadership) as tasks:
                    await leadership.wait_settled()
                    await components.checkpointer.carry_out()
                    await self._know_topics()
                    self._serving = True
                    self._metrics.leader.set(1)
                    tasks.create_task(self._watch(leadership))
                    tasks.create_task(self._watch_room(leadership))
                    tasks.create_task(components.checker.run())
                    tasks.create_task(components.trimmer.run())
                    tasks.create_task(components.compactor.run())
                    await components.due.run()
            except* OSError as errors:
                self.copy.fail(errors.exceptions[0])
            finally:
                leadership.end()
                self._serving = False
                components.fail_waiting_calls("this node is no longer the leader")
                self._metrics.leader.set(0)
                self._metrics.in_sync_replicas.set(0)
                self._metrics.replica_lag_bytes.clear()
                self._metrics.replica_lag_seconds.clear()

    async def _know_topics(self) -> None:
        """Wait until this node knows the topics as they were when it was elected, or later.

        The former leader may have said that a queue takes no more messages. With an older copy of
        the topics this one would take some, and they would be lost when the queue is removed.
        """
        while True:
            try:
                async with timeouts.timeout(_TOPICS_WAIT_S):
                    return await self._topics.caught_up()
            except NoQuorum:
                await asyncio.sleep(_TOPICS_RETRY_S)
            except TimeoutError:
                log.warning("does not serve yet: changes of topics do not arrive from etcd")

    async def _begin_epoch(self, term: int) -> StorageLeadership | None:
        """Return a leadership with a durable epoch; None if this node must not lead.

        Raises:
            OSError, BatonError: the disk has failed or is full.
        """
        components = self.copy.components
        await components.flusher.sync()
        position = components.node.store.log.next_position + 1
        in_sync_set = self._in_sync_set(term, position, self._settings.replica_policy)
        if self._lost_data(in_sync_set):
            return None
        leadership = StorageLeadership(
            in_sync_set, components, self._runtime.clock, self._stream, self._in_thread
        )
        await leadership.begin()
        return leadership

    async def _watch(self, leadership: StorageLeadership) -> None:
        """Update the gauges; resign if the log is damaged and another replica has all of it."""
        components, tracker = leadership.components, leadership.in_sync_set.tracker
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            self._metrics.leader.set(not self.is_follower)
            self._metrics.in_sync_replicas.set(len(leadership.in_sync_set.current))
            now_ms = self._runtime.clock.monotonic_ms()
            for name in tracker.followers:
                self._metrics.replica_lag_bytes.labels(name).set(tracker.lag(name))
                lag_ms = tracker.lag_ms(name, now_ms)
                self._metrics.replica_lag_seconds.labels(name).set(lag_ms / 1000)
            first_position = components.node.store.log.first_position
            damaged_from = components.damage.first_damaged_from(first_position)
            if damaged_from is not None and self._others_have_all(leadership):
                self.step_back(f"its log is damaged at position {damaged_from}")
                return

    async def _watch_room(self, leadership: StorageLeadership) -> None:
        """Resign once the disk has been full for `lag_ms_max` and another replica has room.

        If none has, this node stays the leader: stored messages are read, and retention goes on.
        """
        clock, in_sync_set = self._runtime.clock, leadership.in_sync_set
        retention = leadership.components.retention
        room_ms = clock.monotonic_ms()
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            now_ms = clock.monotonic_ms()
            if retention.state is not DiskState.FULL:
                room_ms = now_ms
            elif now_ms - room_ms > in_sync_set.policy.lag_ms_max and self._may_give_way():
                able = in_sync_set.successors() & leadership.with_room - self.election.drained
                if able:
                    names = ", ".join(sorted(able))
                    self._give_way(in_sync_set, f"its disk is full, and others have room: {names}")
                    return

    @staticmethod
    def _others_have_all(leadership: StorageLeadership) -> bool:
        """Return whether another member of the in-sync set has everything that is safe."""
        position = leadership.components.node.store.readable_position
        return leadership.in_sync_set.tracker.count_with(position + 1) > 1
