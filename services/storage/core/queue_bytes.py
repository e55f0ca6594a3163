"""Counts the bytes that the batches of one queue take in the log, in steps of bounded length."""

from __future__ import annotations

from collections.abc import Iterator

from batonmq_server.storage.core.consumequeue import ConsumeQueue
from batonmq_server.storage.core.tag_filter import batch_starts

ENTRIES_AT_ONCE = 65_536
"""1.3 MB of a consume queue."""


def batch_bytes_by_step(
    queue: ConsumeQueue, entries_at_once: int = ENTRIES_AT_ONCE
) -> Iterator[int]:
    """Yield the bytes of the visible batches of `queue`, step by step; their sum is the total.

    Between two steps the queue may grow, or drop its oldest messages: growth is left out, and
    messages that are dropped before their step are not counted.

    Raises:
        DataLoss: the index is damaged.
    """
    offset, end, last_position = queue.first_offset, queue.visible_offset, -1
    while (offset := max(offset, queue.first_offset)) < end:
        entries = queue.read(offset, min(offset + entries_at_once, end))
        starts = batch_starts(entries.positions)
        if entries.positions[0] == last_position:  # the step before has counted this batch
            starts = starts[1:]
        yield int(entries.sizes[starts].sum())
        offset, last_position = offset + len(entries), int(entries.positions[-1])
