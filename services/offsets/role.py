"""A node of an offsets replica set: follows the leader, and is one itself when it is elected.

Only one of both writes to the disk at a time. What a leader has in memory is made from the disk at
its election and dropped at its end, so nothing of an earlier epoch is ever answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from batonmq.errors import DiskFull, NotServing
from batonmq_server.offsets.config import OffsetsSettings
from batonmq_server.offsets.epoch import OffsetsEpoch
from batonmq_server.offsets.follower import Follower
from batonmq_server.offsets.leadership import Leadership
from batonmq_server.offsets.metrics import OffsetsMetrics
from batonmq_server.runtime import role
from batonmq_server.runtime.keeper import Keeper
from batonmq_server.runtime.member import Member
from batonmq_server.runtime.process import Runtime

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5

Serve = Callable[[Leadership], Awaitable[OffsetsEpoch]]


class Role(role.Role[Leadership]):
    """This node's part in its replica set.

    Args:
        following: This node as a follower.
        serve: The service on the copy that is on the disk, for one leadership.
    """

    def __init__(
        self,
        settings: OffsetsSettings,
        runtime: Runtime,
        following: Follower,
        serve: Serve,
        metrics: OffsetsMetrics,
    ) -> None:
        self._settings, self._runtime = settings, runtime
        self._following, self._serve, self._metrics = following, serve, metrics
        super().__init__(
            Member(
                runtime,
                name=settings.replica_set,
                members=settings.members,
                lease_ms=settings.leader_lease_ms,
                position=lambda: following.changes.position,
            )
        )
        # Without room a leader could begin nothing, and would keep from it those that can.
        self.member.standing_back = lambda: not following.has_room()
        self._offsets: OffsetsEpoch | None = None

    @property
    def replica_set(self) -> str:
        """Name of the set."""
        return self._settings.replica_set

    @property
    def offsets(self) -> OffsetsEpoch:
        """What clients ask.

        Raises:
            NotLeader: this node is not the leader.
            NotServing: it has just been elected.
        """
        self.check()
        if self._offsets is None:
            raise NotServing("the new leader waits for its followers", retry_after_ms=100)
        return self._offsets

    async def run(self) -> None:
        """Stand for election and lead for ever; to be run as one task."""
        await self.member.election.run(self._lead)

    async def _lead(self, revision: int) -> None:
        async with self._following.writing:
            await self._following.disk.wait_idle()
            changes = self._following.changes
            keeper = self.member.keeper(
                revision, changes.position.version, self._settings.replica_policy
            )
            if self.member.lacks(keeper):
                return
            leadership = self._leadership = Leadership(
                keeper, changes, self._following.disk, self._runtime.clock
            )
            self.member.registration.leads(keeper.epoch)
            self._metrics.lead(keeper)
            log.info("leader epoch=%d in_sync=%s", keeper.epoch, sorted(keeper.books.in_sync))
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(keeper.tend())
                    await leadership.begin()
                    self._following.stuck.passed()
                    self._offsets = await self._serve(leadership)
                    tasks.create_task(self._offsets.importer.run())
                    tasks.create_task(self._watch(self._offsets, keeper))
                    await self._offsets.commits.run()
            except* DiskFull as errors:
                self.member.step_back(f"an epoch can't be begun: {errors.exceptions[0]}")
            finally:
                self._leadership = self._offsets = None
                self.member.registration.leads(0)
                self._metrics.follow()
                await self._following.reload()

    async def _watch(self, offsets: OffsetsEpoch, keeper: Keeper) -> None:
        """Step back once the disk has been full for a while and another member could go on.

        If none could, this one stays: what it has is read meanwhile.
        """
        clock = self._runtime.clock
        room_ms = clock.monotonic_ms()
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            now_ms, full = clock.monotonic_ms(), offsets.commits.full
            if full is None:
                room_ms = now_ms
            elif now_ms - room_ms > keeper.policy.lag_ms_max and keeper.successors():
                self.member.step_back(f"others have room: {full}")
                return
