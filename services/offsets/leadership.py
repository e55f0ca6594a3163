"""The leader's side of replication: number the changes, send them, wait for the followers.

A change is confirmed once every replica of the in-sync set has it durably. A follower reports its
position by requesting the changes after it (protocol section 12).
"""

from __future__ import annotations

from collections.abc import Sequence

from batonmq._common.aio import wait_until
from batonmq._common.clock import Clock
from batonmq_server.offsets.core.change_log import ChangeLog, Entry, StoreChange
from batonmq_server.offsets.persistence import ProgressStore, first_change, next_change
from batonmq_server.runtime.replication.in_sync_set import InSyncSet
from batonmq_server.runtime.replication.leadership import Leadership
from batonmq_server.runtime.replication.position import ReplicaPosition

FETCH_BYTES_MAX = 4 * 1024 * 1024
"""Maximum size of the changes in one answer, which has at least one change."""
CHANGE_BYTES_MAX = 32 * 1024 * 1024
"""Largest change that an answer has: the size of messages is limited. The deletion of a topic or a
group with many queues may be larger; a follower that lacks it copies everything, in parts."""


class OffsetsLeadership(Leadership):
    """One node's time as leader.

    Args:
        changes: Changes of this node; only this leadership writes to `disk` meanwhile.
    """

    def __init__(
        self, in_sync_set: InSyncSet, changes: ChangeLog, disk: ProgressStore, clock: Clock
    ) -> None:
        super().__init__(in_sync_set, clock)
        self._changes, self._disk = changes, disk

    @property
    def position(self) -> ReplicaPosition:
        """Position of this node's copy."""
        return self._changes.position

    async def begin(self) -> None:
        """Write the first change of the epoch, and wait until the in-sync set has everything.

        Raises:
            As `ProgressStore.write`.
        """
        version = await self._write(first_change(self._changes, self.epoch))
        await self.in_sync_set.begun(version)
        await self.in_sync_set.record_serving()

    async def write(self, entries: Sequence[Entry]) -> None:
        """Write a change, and return once the in-sync set has it durably.

        Raises:
            As `ProgressStore.write`; then nothing was written.
        """
        version = await self._write(next_change(self._changes, self.epoch, entries))
        await self.in_sync_set.confirmed(version)

    async def _write(self, change: StoreChange) -> int:
        await self._disk.write(change.entries)
        self._changes.append(change)
        version = change.position.version
        self._leader_has(version)
        return version

    async def fetch(
        self, name: str, position: ReplicaPosition, hold_ms: int
    ) -> list[StoreChange] | None:
        """Return the changes after `position`, which follower `name` has.

        Returns:
            None if the follower has to start anew from a full copy: its history is another one, the
            changes are not kept, or the next one is too large for an answer.
        """
        if not self._changes.contains(position):
            self._follower_resets(name)
            return None
        self._follower_has(name, position.version)
        new_data = self._new_data
        changes = self._changes.since(position, FETCH_BYTES_MAX)
        if changes == [] and await wait_until(new_data, hold_ms):
            changes = self._changes.since(position, FETCH_BYTES_MAX)
        if changes and changes[0].bytes_count > CHANGE_BYTES_MAX:
            return None
        return changes
