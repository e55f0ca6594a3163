"""Observing queues at offsets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from batonmq._common.clock import Clock
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError, OffsetsUnreachable
from batonmq_server.lockmgr.core.lock_entry import Observation
from batonmq_server.lockmgr.core.lock_table import LockTable
from batonmq_server.lockmgr.offsets_client import OffsetsClient


class QueueObserver:
    """Asks offsets about queues and notes the answers in the table."""

    def __init__(self, table: LockTable, offsets: OffsetsClient, clock: Clock) -> None:
        self._table, self._offsets, self._clock = table, offsets, clock

    async def look(self, key: GroupQueue) -> Observation:
        """The queue as it is now.

        Raises:
            OffsetsUnreachable: it can't be seen.
        """
        stamp = self._table.look(key)
        try:
            seen = await self._offsets.observe(key)
        except OffsetsUnreachable:
            self._table.unseen(key, self._clock.monotonic_ms())
            raise
        self._table.observe(key, seen, stamp, self._clock.monotonic_ms())
        return seen

    async def all_of(self, keys: Sequence[GroupQueue]) -> list[Observation | BatonError]:
        """Each of the queues, or why it can't be seen."""

        async def look(key: GroupQueue) -> Observation | BatonError:
            try:
                return await self.look(key)
            except BatonError as error:
                return error

        async with asyncio.TaskGroup() as tasks:
            looks = [tasks.create_task(look(key)) for key in keys]
        return [look.result() for look in looks]
