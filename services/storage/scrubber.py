"""The background scrub: re-reads the log slowly, round by round.

It reports damaged batches, and rebuilds entries of consume queues that differ from the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from batonmq_server.storage.core.queue_repair import QueueRepair
from batonmq_server.storage.core.queue_scrub import QueueScrub
from batonmq_server.storage.core.scrub import LogScrub, ScrubRange
from batonmq_server.storage.core.tier_file import StoreUnreadable
from batonmq_server.storage.damage_tracker import DamageTracker
from batonmq_server.storage.flusher import InThread, in_thread
from batonmq_server.storage.node import StorageNode

log = logging.getLogger(__name__)

ROUND_INTERVAL_S = 600
"""Pause between the end of a round and the start of the next one."""


class Scrubber:
    """Checks everything that is synced to the disk, round by round.

    Args:
        rebuild: Writes the entries of a repair to the consume queue.
        bytes_per_s: Maximum read rate; 0 turns the scrub off.
        in_thread: Runs the blocking reads outside the event loop.
    """

    def __init__(
        self,
        node: StorageNode,
        damage: DamageTracker,
        rebuild: Callable[[QueueRepair], Awaitable[None]],
        *,
        bytes_per_s: int,
        in_thread: InThread = in_thread,
    ) -> None:
        self._scrub = LogScrub(node.disk, node.store.log)
        self._node, self._damage, self._rebuild = node, damage, rebuild
        self._bytes_per_s, self._in_thread = bytes_per_s, in_thread

    @property
    def position(self) -> int:
        """Position that the current round has reached."""
        return self._scrub.position

    async def run(self) -> None:
        """Scrub until cancelled; run it as one task.

        Raises:
            OSError: the disk can't be read.
        """
        while self._bytes_per_s:
            while (range_ := self._scrub.next_range()) is not None:
                begin = range_.position
                await self.check(range_)
                self._scrub.checked(range_)
                await asyncio.sleep((range_.position - begin) / self._bytes_per_s)
            await asyncio.sleep(ROUND_INTERVAL_S)

    async def check(self, range_: ScrubRange) -> None:
        """Check one range of the log and its entries in the consume queues."""
        try:
            await self._in_thread(self._scrub.check, range_)
        except (FileNotFoundError, StoreUnreadable):  # removed, or moved to the store, meanwhile
            range_.position = range_.segment_end_position
        for position, detail in range_.damaged.items():
            self._damage.report_batch(position, detail)
        queues = QueueScrub(self._node.disk, self._node.store, range_)
        await self._in_thread(_compare, queues)
        for repair in queues.repairs:
            await self._rebuild(repair)

    async def examine(self, position: int, last_position: int) -> None:
        """Check the batches from `position` to `last_position`, out of turn.

        Args:
            position: Begin of a batch.
            last_position: A position in the last batch to check.
        """
        while position <= last_position and (range_ := self._scrub.range_from(position)):
            await self.check(range_)
            position = range_.position


def _compare(queues: QueueScrub) -> None:
    queues.compare()
