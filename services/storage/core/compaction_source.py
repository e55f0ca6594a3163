"""What a compaction reads: the messages of a queue, in chunks of whole batches.

The chunks are planned by the owner of the store; another thread reads and examines them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batonmq._columns.batch_columns import columns_of, record_lengths, tag_hashes
from batonmq._core.records import Header, record_section
from batonmq_server.storage.core.compacted import Section
from batonmq_server.storage.core.consumequeue import Entries, Int64Array
from batonmq_server.storage.core.files import Disk
from batonmq_server.storage.core.key_digests import BoolArray, Digests, KeyDigester, key_bounds
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.queue_reader import GAP_BYTES_MAX, verified_header
from batonmq_server.storage.core.scrub import SegmentPart
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.core.tag_filter import batch_starts

CHUNK_BYTES = 1024 * 1024
ENTRIES_AT_ONCE = 65_536


@dataclass(frozen=True, slots=True)
class SourceChunk:
    """Whole batches of a queue, in one segment, ascending.

    Attributes:
        first_offset: First offset of the first batch.
        next_offset: Offset after the last batch, if it was known when the chunk was planned;
            otherwise an offset within that batch.
    """

    path: str
    segment_position: int
    segment_end: int
    positions: list[int]
    sizes: list[int]
    first_offset: int
    next_offset: int

    @property
    def bytes_count(self) -> int:
        """Bytes of the batches."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class ExaminedChunk:
    """The messages of a chunk, as columns of shape (count,).

    Attributes:
        batches: Headers and batches.
        begins: Index of the first message of each batch, and the number of messages.
        tombstones: Whether a message has a key and no body.
    """

    batches: list[tuple[Header, bytes]]
    begins: list[int]
    offsets: Int64Array
    tags: Int64Array
    keys: Digests
    keyed: BoolArray
    tombstones: BoolArray

    @property
    def next_offset(self) -> int:
        """Offset after the last message."""
        return self.batches[-1][0].next_offset


def section_chunks(
    store: MessageStore, section: Section, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[SourceChunk]:
    """Yield the messages of a section.

    Raises:
        DataLoss, NotLeader: see `CompactedQueues.rows`.
    """
    rows = store.compacted.rows(section)
    begin = 0
    while begin < len(rows):
        entries = Entries(rows.positions[begin:], rows.sizes[begin:], rows.tags[begin:])
        count = _count_in_chunk(store, entries, chunk_bytes)
        yield _chunk(store, entries, count, rows.offsets[begin:])
        begin += count


def queue_chunk(
    store: MessageStore, key: QueueKey, offset: int, end: int, chunk_bytes: int = CHUNK_BYTES
) -> SourceChunk:
    """Return the messages of the consume queue from `offset`, the first one of a batch, on.

    Args:
        end: First offset of a batch, or the end of the visible messages; greater than `offset`.

    Raises:
        DataLoss: the index is damaged.
    """
    entries = store.queues[key].read(offset, min(end, offset + ENTRIES_AT_ONCE))
    count = _count_in_chunk(store, entries, chunk_bytes)
    return _chunk(store, entries, count, np.arange(offset, offset + len(entries)))


def examine(disk: Disk, key: QueueKey, digester: KeyDigester, chunk: SourceChunk) -> ExaminedChunk:
    """Read a chunk and examine its messages. Blocks, and may run in another thread.

    Raises:
        DataLoss: a batch is damaged.
        FileNotFoundError: the segment is no longer there.
        OSError: the segment can't be opened.
    """
    batches = list(_read(disk, key, chunk))
    lengths = [record_lengths(raw, header) for header, raw in batches]
    sections = [record_section(raw, header) for header, raw in batches]
    bounds = key_bounds(columns_of(b"".join(sections), np.concatenate(lengths)))
    counts = np.array([header.count for header, _ in batches])
    begins = np.concatenate(([0], counts.cumsum()))
    firsts = np.array([header.first_offset for header, _ in batches])
    return ExaminedChunk(
        batches,
        begins.tolist(),
        np.arange(int(begins[-1])) + np.repeat(firsts - begins[:-1], counts),
        np.concatenate([tag_hashes(raw, header) for header, raw in batches]).astype(np.int64),
        digester.digests(bounds),
        bounds.keyed,
        bounds.keyed & bounds.empty_bodies,
    )


def _count_in_chunk(store: MessageStore, entries: Entries, chunk_bytes: int) -> int:
    """Return how many entries belong to the first chunk: whole batches, as far as is known."""
    starts = batch_starts(entries.positions)
    sums = entries.sizes[starts].cumsum()
    batches = max(1, int(np.searchsorted(sums, chunk_bytes, "right")))
    batches = min(batches, max(1, int(np.searchsorted(starts, ENTRIES_AT_ONCE))))
    end = store.log.segment_end(int(entries.positions[0]))
    batches = min(batches, int(np.searchsorted(entries.positions[starts], end)))
    return int(starts[batches]) if batches < len(starts) else len(entries)


def _chunk(store: MessageStore, entries: Entries, count: int, offsets: Int64Array) -> SourceChunk:
    starts = batch_starts(entries.positions[:count])
    positions = entries.positions[starts].tolist()
    path, segment_position, segment_end = store.log.segment_of(positions[0])
    return SourceChunk(
        path,
        segment_position,
        segment_end,
        positions,
        entries.sizes[starts].tolist(),
        int(offsets[0]),
        int(offsets[count - 1]) + 1,
    )


def _read(disk: Disk, key: QueueKey, chunk: SourceChunk) -> Iterator[tuple[Header, bytes]]:
    """Yield the verified batches of a chunk and their headers, with few reads."""
    file = disk.open(chunk.path)
    try:
        part = SegmentPart(file, chunk.segment_position, chunk.segment_end, chunk.segment_end)
        places = list(zip(chunk.positions, chunk.sizes, strict=True))
        begin = 0
        while begin < len(places):
            first, size = places[begin]
            last, end = begin + 1, first + size
            while last < len(places) and places[last][0] - end <= GAP_BYTES_MAX:
                end = places[last][0] + places[last][1]
                last += 1
            raw = part.read(first, end - first)
            for position, length in places[begin:last]:
                at = position - first
                yield verified_header(batch := raw[at : at + length], position, key), batch
            begin = last
    finally:
        file.close()
