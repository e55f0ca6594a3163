"""The leader's side of replication: number the changes, send them, wait for the followers.

A change is confirmed once every member of the in-sync set has it durably. A follower reports its
position by requesting the changes after it (protocol section 12).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from batonmq._common.aio import wait_until
from batonmq._common.clock import Clock
from batonmq_server.offsets.core.change_log import ChangeLog, Entry, StoreChange
from batonmq_server.offsets.persistence import ProgressStore, first_change, next_change
from batonmq_server.runtime.keeper import Keeper
from batonmq_server.runtime.position import Position

FETCH_BYTES_MAX = 4 * 1024 * 1024
"""One answer holds no more changes than this, but one in any case."""


class Leadership:
    """One node's time as leader.

    Args:
        changes: Of this node; nobody else writes to `disk` meanwhile.
    """

    def __init__(
        self, keeper: Keeper, changes: ChangeLog, disk: ProgressStore, clock: Clock
    ) -> None:
        self.keeper, self._changes, self._disk, self._clock = keeper, changes, disk, clock
        self._grown = asyncio.Event()

    @property
    def epoch(self) -> int:
        """Of this leadership."""
        return self.keeper.epoch

    @property
    def position(self) -> Position:
        """Of this node."""
        return self._changes.position

    async def begin(self) -> None:
        """Write the first change of the epoch; with it the in-sync set has all that was before.

        Raises:
            As `ProgressStore.write`.
        """
        version = await self._write(first_change(self._changes, self.epoch))
        await self.keeper.begun(version)
        await self.keeper.serve()

    async def write(self, entries: Sequence[Entry]) -> None:
        """Make a change, and return when the in-sync set has it durably.

        Raises:
            As `ProgressStore.write`; then nothing was written.
        """
        version = await self._write(next_change(self._changes, self.epoch, entries))
        await self.keeper.confirmed(version)

    async def _write(self, change: StoreChange) -> int:
        await self._disk.write(change.entries)
        self._changes.append(change)
        version = change.position.version
        self.keeper.books.wrote(version)
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()
        return version

    async def fetch(self, name: str, position: Position, hold_ms: int) -> list[StoreChange] | None:
        """What follows `position`, which follower `name` has; None if it has to begin anew."""
        if not self._changes.contains(position):
            self.keeper.books.forget(name)
            return None
        self.keeper.books.heard(name, position.version, self._clock.monotonic_ms())
        self.keeper.looked_at()
        grown = self._grown
        found = self._changes.since(position, FETCH_BYTES_MAX)
        if found == [] and await wait_until(grown, hold_ms):
            found = self._changes.since(position, FETCH_BYTES_MAX)
        return found
