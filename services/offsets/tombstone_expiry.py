"""Forgets queues whose progress was deleted 7 days ago (protocol section 3)."""

from __future__ import annotations

import asyncio
import logging

from batonmq._common.clock import Clock
from batonmq.errors import BatonError
from batonmq_server.offsets.epoch_state import EpochState
from batonmq_server.offsets.persistence import FloorKey

log = logging.getLogger(__name__)

KEPT_MS = 7 * 24 * 3_600_000
INTERVAL_S = 3_600.0
_QUEUES_MAX = 1_000
"""Queues per write."""


class TombstoneExpiry:
    """Removes old tombstones, and what is recorded about groups that have nothing else."""

    def __init__(self, state: EpochState, clock: Clock) -> None:
        self._table, self._history, self._commits = state.table, state.history, state.commits
        self._clock = clock

    async def run(self) -> None:
        """Remove old tombstones once an hour, until cancelled; the first time after an hour.

        A jump of the wall clock may remove them early: the floor keeps tokens from repeating.
        """
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.expire()
            except BatonError as error:
                log.info("tombstones are not removed yet error=%s", error)

    async def expire(self) -> None:
        """Remove old tombstones, and return once this is durable.

        Raises:
            DiskFull: the disk has no room.
            BatonError: no change can be made at the moment.
        """
        old = self._table.tombstones_before(self._clock.unix_ms() - KEPT_MS)
        for first in range(0, len(old), _QUEUES_MAX):
            self._commits.check_room()
            # No await up to the last `mark_changed`, so one write.
            forgotten = self._table.forget(old[first : first + _QUEUES_MAX])
            self._commits.mark_changed(FloorKey())
            for key in forgotten:
                self._commits.mark_changed(key)
            for group in {key.group for key in forgotten}:
                self._forget_resets(group)
            await self._commits.wait_durable([FloorKey()])
        if old:
            log.info("tombstones removed queues=%d floor=%s", len(old), self._table.floor)

    def _forget_resets(self, group: str) -> None:
        if self._table.knows(group):
            return
        slots = self._history.slots(group)
        self._history.drop(group)
        for slot in slots:
            self._commits.mark_changed(slot)
