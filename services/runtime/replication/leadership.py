"""The time of one node as leader of a replica set; services add what their followers fetch."""

from __future__ import annotations

import asyncio

from batonmq._common.clock import Clock
from batonmq_server.runtime.replication.in_sync_set import InSyncSet


class Leadership:
    """One epoch of a replica set, at the node that leads it.

    A follower acknowledges everything before the position from which it fetches.

    Attributes:
        in_sync_set: The in-sync set of this epoch.
    """

    def __init__(self, in_sync_set: InSyncSet, clock: Clock) -> None:
        self.in_sync_set, self._clock = in_sync_set, clock
        self._new_data = asyncio.Event()

    @property
    def epoch(self) -> int:
        """Epoch of this leadership."""
        return self.in_sync_set.epoch

    def _leader_has(self, position: int) -> None:
        """Record the leader's durable position, and answer the fetches that wait for data."""
        self.in_sync_set.tracker.advance_leader(position)
        new_data, self._new_data = self._new_data, asyncio.Event()
        new_data.set()

    def _follower_has(self, name: str, position: int) -> None:
        """Record the durable position that a follower has reported."""
        self.in_sync_set.tracker.acknowledge(name, position, self._clock.monotonic_ms())
        self.in_sync_set.tracker_changed()

    def _follower_resets(self, name: str) -> None:
        """Record that a follower has to start anew: its earlier position is void."""
        self.in_sync_set.tracker.reset_follower(name)

    def reach_follower(self, name: str) -> None:
        """Record that a follower receives answers; called during long ones."""
        self.in_sync_set.tracker.reach(name, self._clock.monotonic_ms())
