"""Purge orders in the log: which messages and segments every copy of the log removes.

The leader stores an order as a batch of the system topic, so every copy of the log has it. Each
node carries an order out with the first checkpoint after it, so no checkpoint is later than an
order that is not carried out. docs/reference/format.md describes the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from batonmq._core.records import Header, decode_records
from batonmq_server.storage.core.commitlog import CommitLog, PositionRange
from batonmq_server.storage.core.consumequeue import Entries, Int64Array
from batonmq_server.storage.core.files import Disk
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.scan import LogScan
from batonmq_server.storage.core.schedule import TOPIC_ID, encode_system
from batonmq_server.storage.core.scrub import SegmentPart
from batonmq_server.storage.core.tag_filter import batch_starts

PURGED, TRIMMED = 2, 5
"""Queues of the system topic: orders without and with trims."""
ORDER_QUEUES: frozenset[QueueKey] = frozenset({(TOPIC_ID, PURGED), (TOPIC_ID, TRIMMED)})
SEGMENTS_MAX = 10_000
"""Maximum number of segments of one order."""
TRIMS_MAX = 10_000
"""Maximum number of queues that one order trims."""
_ID, _SEGMENT, _TRIM = struct.Struct(">q"), struct.Struct(">qq"), struct.Struct(">qIqq")
_NAME = struct.Struct(">qB")


class QueueTrim(NamedTuple):
    """The messages of a queue before `first_offset` are removed.

    Attributes:
        first_offset: First offset of a batch, or the next offset of the queue.
        position: Position of that batch, or one between it and the batch before.
    """

    topic_id: int
    queue_id: int
    first_offset: int
    position: int


@dataclass(frozen=True, slots=True)
class PurgeOrder:
    """An order to purge segments, or to trim queues.

    Attributes:
        topic_ids: Deleted topics; their consume queues are removed.
        segments: Segments that contain only messages of deleted topics, or trimmed ones.
        next_position: Position after the order in the log; -1 before it is stored.
        trims: Queues that lose their oldest messages; an order with trims has no topic ids. It has
            a trim for each queue with messages in `segments`: so no copy that gets the purged
            segments gives their offsets to new messages.
        names: Topic names of `trims` by topic id.
    """

    topic_ids: tuple[int, ...]
    segments: tuple[PositionRange, ...]
    next_position: int = -1
    trims: tuple[QueueTrim, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)


def encode_order(order: PurgeOrder) -> bytes:
    """Return the unstamped batch of the system topic that contains an order."""
    segments = b"".join(_SEGMENT.pack(*segment) for segment in order.segments)
    if order.trims:
        assert not order.topic_ids
        trims = b"".join(_TRIM.pack(*one) for one in order.trims)
        names = b"".join(
            _NAME.pack(topic_id, len(name)) + name.encode("ascii")
            for topic_id, name in order.names.items()
        )
        return encode_system([trims, segments, names], TRIMMED)
    ids = b"".join(map(_ID.pack, order.topic_ids))
    return encode_system([ids, segments], PURGED)


def decode_order(header: Header, batch: bytes, next_position: int) -> PurgeOrder:
    """Inverse of `encode_order`.

    Raises:
        BadBatch: it is not such a batch.
    """
    first, second, *more = (
        record.body for record in decode_records(batch, header, range(header.count))
    )
    segments = tuple((begin, end) for begin, end in _SEGMENT.iter_unpack(second))
    if header.queue_id == TRIMMED:
        trims = tuple(map(QueueTrim._make, _TRIM.iter_unpack(first)))
        return PurgeOrder((), segments, next_position, trims, _decode_names(*more))
    topic_ids = tuple(topic_id for (topic_id,) in _ID.iter_unpack(first))
    return PurgeOrder(topic_ids, segments, next_position)


def _decode_names(raw: bytes) -> dict[int, str]:
    names, at = {}, 0
    while at < len(raw):
        topic_id, length = _NAME.unpack_from(raw, at)
        at += _NAME.size + length
        names[topic_id] = raw[at - length : at].decode("ascii")
    return names


def due_segments(log: CommitLog, orders: Collection[PurgeOrder]) -> list[PositionRange]:
    """Return the segments of `orders` that this log has and that are not purged yet."""
    wanted = {segment for order in orders for segment in order.segments}
    sealed = (segment for segment in log.sealed() if segment in wanted)
    return [segment for segment in sealed if not log.is_purged(segment[0])]


def batch_bytes(entries: Entries, ends: Int64Array, *, counted: int = -1) -> Int64Array:
    """Return the bytes of the batches of `entries`, by the segments that end at `ends`.

    A batch before the first or after the last of these segments is left out.

    Args:
        counted: Position of a batch that is counted already, and left out.
    """
    starts = batch_starts(entries.positions)
    starts = starts[entries.positions[starts] != counted]
    segments = np.searchsorted(ends, entries.positions[starts], "right")
    sizes = entries.sizes[starts]
    inside = segments < len(ends)
    sums = np.bincount(segments[inside], weights=sizes[inside], minlength=len(ends))
    return sums.astype(np.int64)


def contains_only(
    disk: Disk, path: str, segment: PositionRange, is_unwanted: Callable[[Header, memoryview], bool]
) -> bool:
    """Return whether all batches of a segment are good and not wanted.

    Blocks, and may run in another thread. The log is read, not an index: an index may be damaged.

    Args:
        is_unwanted: Whether a batch may be removed.

    Raises:
        OSError: the segment can't be read.
    """
    begin, end = segment
    file = disk.open(path)
    try:
        scan = LogScan(SegmentPart(file, begin, end, end), begin)
        return all(is_unwanted(*one) for one in scan) and scan.position == end
    finally:
        file.close()
