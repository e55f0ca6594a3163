"""How many bytes of a queue of a compacted topic are not compacted yet."""

from __future__ import annotations

from typing import NamedTuple

from batonmq_server.storage.core.compacted import CompactedPart
from batonmq_server.storage.core.consumequeue import ConsumeQueue
from batonmq_server.storage.core.tag_filter import batch_starts

ENTRIES_AT_ONCE = 65_536


class DirtyBytes(NamedTuple):
    """The bytes of a queue.

    Attributes:
        dirty: Bytes of batches that were stored since the last compaction.
        clean: Bytes of the others.
    """

    dirty: int
    clean: int

    @property
    def ratio(self) -> float:
        """Share of the dirty bytes, 0 to 1."""
        total = self.dirty + self.clean
        return self.dirty / total if total else 0.0


class QueueBytes:
    """Counts the bytes of the consume queue of one queue: each batch once, when it is new."""

    def __init__(self) -> None:
        self._first_offset = self._next_offset = self._last_position = -1
        self._bytes_count = 0

    def count(self, queue: ConsumeQueue, part: CompactedPart | None, end: int) -> DirtyBytes:
        """Return the bytes of the queue below `end`, the first offset of a batch, or its end.

        Raises:
            DataLoss: the index is damaged.
        """
        if queue.first_offset != self._first_offset or end < self._next_offset:
            self._first_offset = self._next_offset = queue.first_offset
            self._bytes_count, self._last_position = 0, -1
        while self._next_offset < end:
            stop = min(self._next_offset + ENTRIES_AT_ONCE, end)
            entries = queue.read(self._next_offset, stop)
            starts = batch_starts(entries.positions)
            if entries.positions[0] == self._last_position:
                starts = starts[1:]
            self._bytes_count += int(entries.sizes[starts].sum())
            self._next_offset += len(entries)
            self._last_position = int(entries.positions[-1])
        dirty, clean = self._bytes_count, 0
        for section in part.sections if part is not None else ():
            if section.compacted_to < section.next_offset:
                dirty += section.bytes_count
            else:
                clean += section.bytes_count
        return DirtyBytes(dirty, clean)


def compacted_from(queue: ConsumeQueue, part: CompactedPart | None) -> int:
    """Return the offset from which no run has seen all messages, up to the end of the queue."""
    if part is None:
        return queue.first_offset
    return min(part.compacted_to, queue.first_offset)
