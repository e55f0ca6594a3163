"""Compaction in the log: messages that are written again, and the orders that refer to them.

A compaction run writes the kept messages of a range of a queue again, at the end of the log, in
batches of the same queue with their old offsets: relocated batches. The order after them, a batch
of the system topic, says that the range consists of these messages only. Without its order a
relocated batch means nothing. docs/reference/format.md describes the bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batonmq._columns.batch_columns import record_lengths
from batonmq._core.checksum import crc32c
from batonmq._core.compression import RecordCompressor
from batonmq._core.records import (
    BODY_BYTES_MAX,
    BODY_FROM,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Header,
    column_starts,
    decode_records,
    read_header,
    record_section,
)
from batonmq.errors import BadBatch
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.schedule import TOPIC_ID, encode_system

COMPACTED = 7
"""Queue of the system topic with the orders."""
ORDERS: QueueKey = TOPIC_ID, COMPACTED
RELOCATED_PRODUCER_ID = -(1 << 62) - 2
"""Producer id of a relocated batch; producer epoch and sequence are the halves of the time at which
it was written, in Unix milliseconds."""
_PRODUCER = struct.Struct(">qQ")
_HEAD = struct.Struct(">qIqqqqqqqQB")
ROW = np.dtype([("offset", ">i8"), ("position", ">i8"), ("size", ">i4"), ("tag", ">i4")])
TOMBSTONE = np.dtype([("offset", ">i8"), ("since_unix_ms", ">i8")])

Int64Array = npt.NDArray[np.int64]


def is_relocated(header: Header) -> bool:
    """Return whether a batch is one that a compaction has written again."""
    return header.producer_id == RELOCATED_PRODUCER_ID


def written_unix_ms(header: Header) -> int:
    """Return when a batch was written to this place in the log; it never decreases in a log.

    A relocated batch keeps the store time of its messages.
    """
    if is_relocated(header):
        return header.producer_epoch << 32 | header.sequence
    return header.store_unix_ms


@dataclass(frozen=True, slots=True)
class Relocation:
    """A batch to write again.

    Attributes:
        header: Header of the batch, with offset, store time, owner and queue as they stay.
        batch: The batch, unstamped, without its time and without the producer's checksum.
    """

    header: Header
    batch: bytes

    def finished(self, unix_ms: int) -> Relocation:
        """Return the batch as it is written at a time."""
        head = bytearray(self.batch[:HEADER_BYTES])
        _PRODUCER.pack_into(head, BODY_FROM, RELOCATED_PRODUCER_ID, unix_ms)
        body = memoryview(self.batch)[HEADER_BYTES:]
        crc = crc32c(body, crc32c(bytes(head[BODY_FROM:])))
        struct.pack_into(">I", head, BODY_FROM - 4, crc)
        epoch, sequence = divmod(unix_ms, 1 << 32)
        header = replace(self.header, producer_epoch=epoch, sequence=sequence, checksum=crc)
        return Relocation(header, b"".join((head, body)))


def relocations(batch: bytes, header: Header, kept: npt.NDArray[np.bool_]) -> list[Relocation]:
    """Return the batches with the kept messages of a stored batch: one per run of offsets.

    Args:
        kept: Whether each message is kept.
    """
    if kept.all() and not header.output_head_bytes:
        return [_relocation(header, 0, batch[:HEADER_BYTES], batch[HEADER_BYTES : header.length])]
    edges = np.flatnonzero(np.diff(kept, prepend=False, append=False)).tolist()
    if not edges:
        return []
    section = record_section(batch, header)
    bounds = [0, *record_lengths(batch, header).cumsum().tolist()]
    starts = column_starts(header)
    extra = np.frombuffer(batch, ">u4", 2 * header.extra_key_count, starts.extra_keys)
    extra = extra.reshape(-1, 2)
    compressor, name = RecordCompressor(header.compression), header.topic.encode("ascii")
    made = []
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        columns = [
            batch[column + 4 * first : column + 4 * end]
            for column in (starts.lengths, starts.tags, starts.keys)
        ]
        own = extra[(extra[:, 0] >= first) & (extra[:, 0] < end)].copy()
        own[:, 0] -= first
        compression, records = compressor.compress(section[bounds[first] : bounds[end]])
        body = b"".join((name, *columns, own.tobytes(), records))
        head = HEADER.pack(
            MAGIC, VERSION, 0, HEADER_BYTES + len(body), 0, 0, 0, 0, 0, 0, 0, 0,
            RELOCATED_PRODUCER_ID, 0, 0, header.born_unix_ms, header.queue_id, end - first,
            len(own), len(name), compression,
        )  # fmt: skip
        made.append(_relocation(header, first, head, body))
    return made


def _relocation(header: Header, first: int, head: bytes, body: bytes) -> Relocation:
    raw = head + body
    fields = read_header(raw)
    relocated = replace(
        header,
        length=len(raw),
        first_offset=header.first_offset + first,
        producer_id=RELOCATED_PRODUCER_ID,
        count=fields.count,
        extra_key_count=fields.extra_key_count,
        compression=fields.compression,
        output_head_bytes=0,
    )
    return Relocation(relocated, raw)


@dataclass(frozen=True, slots=True)
class SectionRows:
    """The messages of a section, and its tombstones.

    Attributes:
        offsets, positions, sizes, tags: Columns of the kept messages, ascending: offset, position
            and size of the batch, tag hash.
        tombstone_offsets, tombstone_since: Kept messages without a body, and from when on the
            messages that they delete are gone, Unix milliseconds.
    """

    offsets: Int64Array
    positions: Int64Array
    sizes: Int64Array
    tags: Int64Array
    tombstone_offsets: Int64Array
    tombstone_since: Int64Array

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def bytes_count(self) -> int:
        """Bytes of the batches."""
        if not len(self):
            return 0
        firsts = np.concatenate(([True], self.positions[1:] != self.positions[:-1]))
        return int(self.sizes[firsts].sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionOrder:
    """A section of a queue: offsets [first_offset, next_offset) have only the messages of `rows`.

    Attributes:
        compacted_to: No message of the section is older than another one of the same key below
            this offset.
        data_position, data_end: Part of the log with its relocated batches.
        queue_position: Position of the batch at `next_offset`, or one between it and the batch
            before, in the queue as it was stored.
        removed_count: Messages that this order removes.
    """

    topic: str
    topic_id: int
    queue_id: int
    first_offset: int
    next_offset: int
    compacted_to: int
    data_position: int
    data_end: int
    queue_position: int
    removed_count: int
    rows: SectionRows

    @property
    def key(self) -> QueueKey:
        """The queue."""
        return self.topic_id, self.queue_id


def encode_order(order: CompactionOrder) -> bytes:
    """Return the unstamped batch of the system topic that contains an order."""
    name, rows = order.topic.encode("ascii"), order.rows
    head = _HEAD.pack(
        order.topic_id, order.queue_id, order.first_offset, order.next_offset, order.compacted_to,
        order.data_position, order.data_end, order.queue_position, order.removed_count,
        len(rows.tombstone_offsets), len(name),
    )  # fmt: skip
    messages = np.empty(len(rows), ROW)
    for field, column in (
        ("offset", rows.offsets), ("position", rows.positions), ("size", rows.sizes),
        ("tag", rows.tags),
    ):  # fmt: skip
        messages[field] = column
    tombstones = np.empty(len(rows.tombstone_offsets), TOMBSTONE)
    tombstones["offset"] = rows.tombstone_offsets
    tombstones["since_unix_ms"] = rows.tombstone_since
    content = tombstones.tobytes() + messages.tobytes()
    bodies = [content[at : at + BODY_BYTES_MAX] for at in range(0, len(content), BODY_BYTES_MAX)]
    return encode_system([head + name, *bodies], COMPACTED)


def decode_order(header: Header, batch: bytes) -> CompactionOrder:
    """Inverse of `encode_order`.

    Raises:
        BadBatch: it is not such a batch.
    """
    first, *more = (record.body for record in decode_records(batch, header, range(header.count)))
    content = b"".join(more)
    try:
        *numbers, tombstone_count, length = _HEAD.unpack_from(first)
        tombstones = np.frombuffer(content, TOMBSTONE, tombstone_count)
        messages = np.frombuffer(content[tombstones.nbytes :], ROW)
    except (ValueError, struct.error) as error:
        raise BadBatch(f"not a compaction order: {error}") from error
    (
        topic_id, queue_id, first_offset, next_offset, compacted_to, data_position, data_end,
        queue_position, removed_count,
    ) = numbers  # fmt: skip
    return CompactionOrder(
        topic=first[_HEAD.size : _HEAD.size + length].decode("ascii"),
        topic_id=topic_id,
        queue_id=queue_id,
        first_offset=first_offset,
        next_offset=next_offset,
        compacted_to=compacted_to,
        data_position=data_position,
        data_end=data_end,
        queue_position=queue_position,
        removed_count=removed_count,
        rows=SectionRows(
            messages["offset"].astype(np.int64),
            messages["position"].astype(np.int64),
            messages["size"].astype(np.int64),
            messages["tag"].astype(np.int64),
            tombstones["offset"].astype(np.int64),
            tombstones["since_unix_ms"].astype(np.int64),
        ),
    )
