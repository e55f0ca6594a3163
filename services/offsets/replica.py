"""A node of an offsets replica set: follows the leader, and is one itself when it is elected.

Only one of both writes to the disk at a time. What a leader has in memory is made from the disk at
its election and dropped at its end, so nothing of an earlier epoch is ever answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from batonmq.errors import DiskFull, NotServing
from batonmq_server.offsets.config import OffsetsSettings
from batonmq_server.offsets.epoch import OffsetsEpoch
from batonmq_server.offsets.follower import Follower
from batonmq_server.offsets.leadership import OffsetsLeadership
from batonmq_server.offsets.metrics import OffsetsMetrics
from batonmq_server.runtime.replication.in_sync_set import InSyncSet
from batonmq_server.runtime.replication.replica_node import ReplicaNode
from batonmq_server.runtime.service_runtime import Runtime

WATCH_INTERVAL_S = 0.5

Serve = Callable[[OffsetsLeadership], Awaitable[OffsetsEpoch]]


class OffsetsReplica(ReplicaNode[OffsetsLeadership]):
    """This node's part in its replica set.

    Args:
        follower: This node as a follower.
        serve: Builds the service of one leadership on the copy that is on the disk.
    """

    def __init__(
        self,
        settings: OffsetsSettings,
        runtime: Runtime,
        follower: Follower,
        serve: Serve,
        metrics: OffsetsMetrics,
    ) -> None:
        self._settings, self._follower = settings, follower
        self._serve, self._metrics = serve, metrics
        super().__init__(
            runtime,
            name=settings.replica_set,
            node_ids=settings.members,
            lease_ms=settings.leader_lease_ms,
            position=lambda: follower.changes.position,
        )
        self._offsets: OffsetsEpoch | None = None

    @property
    def offsets(self) -> OffsetsEpoch:
        """The service of the current epoch.

        Raises:
            NotLeader: this node is not the leader.
            NotServing: this node was elected and does not serve yet.
        """
        self.check()
        if self._offsets is None:
            raise NotServing("the new leader waits for its followers", retry_after_ms=100)
        return self._offsets

    def _can_lead(self) -> bool:
        # With a full disk this node could not begin an epoch, and would block those that can.
        return self._follower.has_room()

    async def _lead(self, term: int) -> None:
        follower = self._follower
        async with follower.writing:
            await follower.disk.wait_idle()
            changes = follower.changes
            in_sync_set = self._in_sync_set(
                term, changes.position.version, self._settings.replica_policy
            )
            if self._lost_data(in_sync_set):
                return
            leadership = OffsetsLeadership(in_sync_set, changes, follower.disk, self._runtime.clock)
            self._metrics.show_leadership(in_sync_set)
            try:
                async with self._leading(leadership) as tasks:
                    await leadership.begin()
                    follower.follow_problem.clear()
                    self._offsets = await self._serve(leadership)
                    for loop in self._offsets.loops:
                        tasks.create_task(loop())
                    tasks.create_task(self._watch(self._offsets, in_sync_set))
                    await self._offsets.commits.run()
            except* DiskFull as errors:
                self.step_back(f"an epoch can't be begun: {errors.exceptions[0]}")
            finally:
                self._offsets = None
                self._metrics.show_follower()
                await follower.reload()

    async def _watch(self, offsets: OffsetsEpoch, in_sync_set: InSyncSet) -> None:
        """Resign once the disk has been full for `lag_ms_max` and another replica could lead.

        If none could, this node stays the leader, so that its data can be read.
        """
        clock = self._runtime.clock
        room_ms = clock.monotonic_ms()
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            now_ms, full = clock.monotonic_ms(), offsets.commits.disk_full
            if full is None:
                room_ms = now_ms
            elif now_ms - room_ms > in_sync_set.policy.lag_ms_max and in_sync_set.successors():
                self.step_back(f"its disk is full, and another replica could lead: {full}")
                return
