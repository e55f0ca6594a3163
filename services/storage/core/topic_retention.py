"""Finds the offset from which a queue is kept by the retention of its topic.

This module only decides. Offsets are those of whole batches: a batch is removed as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from batonmq_server.storage.core.consumequeue import ConsumeQueue
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.query import MessageQueries
from batonmq_server.storage.core.tag_filter import batch_starts

ENTRIES_AT_ONCE = 65_536
"""1.3 MB of a consume queue; more than the messages of a batch."""


class KeptAge:
    """Finds the first offset of a queue that is young enough.

    The store time of the first batch is remembered, so a queue of which nothing expires costs no
    read.
    """

    def __init__(self) -> None:
        self._known: tuple[int, int] = (-1, 0)

    def keep_from(
        self, queries: MessageQueries, key: QueueKey, queue: ConsumeQueue, oldest_unix_ms: int
    ) -> int:
        """Return the first offset that was stored at or after `oldest_unix_ms`.

        It is the end of the visible messages if there is none.

        Raises:
            DataLoss: a batch that had to be read is damaged.
        """
        first_offset = queue.first_offset
        if first_offset >= queue.visible_offset:
            return first_offset
        if self._known[0] != first_offset:
            self._known = first_offset, queries.store_unix_ms(queue, first_offset)
        if self._known[1] >= oldest_unix_ms:
            return first_offset
        return queries.search_offset(key, oldest_unix_ms)


class KeptBytes:
    """Finds the first offset from which the batches of a queue fit a limit.

    Batches are counted when they are new, and subtracted when they are removed: a round costs as
    much as the messages that were stored and removed since the last one.

    Attributes:
        first_offset: Offset from which the queue is kept, once `steps` has ended.
    """

    def __init__(self) -> None:
        self.first_offset = self._next_offset = self._last_position = -1
        self._bytes_count = 0

    def steps(
        self,
        queue: ConsumeQueue,
        keep_from: int,
        bytes_max: int,
        entries_at_once: int = ENTRIES_AT_ONCE,
    ) -> Iterator[None]:
        """Find the offset, in steps of bounded length.

        The newest visible batch is kept unless it is before `keep_from`. Between two steps the
        queue may grow: growth is left out.

        Args:
            keep_from: First offset of a batch, or the end of the visible messages: what is before
                it is removed anyway.
            entries_at_once: Maximum number of entries of one step; more than one batch has.

        Raises:
            DataLoss: the index is damaged.
        """
        if queue.first_offset != self.first_offset:  # retention of the broker, or the first call
            self._restart(queue.first_offset)
        end = queue.visible_offset
        if keep_from >= end:
            self._restart(end)
        while self._next_offset < end:
            if queue.first_offset > self.first_offset:
                return  # the next call counts again
            self._count(queue, min(self._next_offset + entries_at_once, end))
            yield
        while self._bytes_count > bytes_max or self.first_offset < keep_from:
            if queue.first_offset > self.first_offset:
                return
            last = min(self.first_offset + entries_at_once, end)
            if not self._drop(queue, keep_from, bytes_max, last):
                return
            yield

    def _restart(self, offset: int) -> None:
        self.first_offset = self._next_offset = offset
        self._bytes_count, self._last_position = 0, -1

    def _count(self, queue: ConsumeQueue, end: int) -> None:
        entries = queue.read(self._next_offset, end)
        starts = batch_starts(entries.positions)
        if entries.positions[0] == self._last_position:  # the step before has counted this batch
            starts = starts[1:]
        self._bytes_count += int(entries.sizes[starts].sum())
        self._next_offset += len(entries)
        self._last_position = int(entries.positions[-1])

    def _drop(self, queue: ConsumeQueue, keep_from: int, bytes_max: int, end: int) -> bool:
        """Drop the oldest batches that begin and end before `end`; return whether there was one."""
        entries = queue.read(self.first_offset, end)
        starts = batch_starts(entries.positions)
        sums = np.concatenate(([0], np.cumsum(entries.sizes[starts[:-1]])))
        count = max(
            int(np.searchsorted(sums, self._bytes_count - bytes_max)),
            int(np.searchsorted(starts + self.first_offset, keep_from)),
        )
        count = min(count, len(starts) - 1)
        self.first_offset += int(starts[count])
        self._bytes_count -= int(sums[count])
        return count > 0
