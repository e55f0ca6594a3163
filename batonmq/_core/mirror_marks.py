"""Marks of mirrored batches: from which queue of which cluster a batch is, and from which offset.

The mark is in the producer fields of the batch, so it is stored with the messages, by one write:

    producer id  names the source queue: cluster, topic with its id and time of creation, and queue
    epoch        bit 31 is set; bits 20 to 30 are the upper bits of the source offset; bits 0 to 19
                 count the gaps in the source offsets, as far as these upper bits are the same
    sequence     the lower 32 bits of the source offset of the first message

So the log of the target says how far it has come, and its check of sequences rejects a batch that
it has, or that would leave others out. An ordinary producer counts its epochs from 0, and an epoch
that is used for one batch only is not a mark.

Of two batches with the same id and epoch, all source offsets in between are in the target too.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from batonmq._core.checksum import crc32c
from batonmq._core.queue_sender import ONE_BATCH_EPOCH
from batonmq._core.queues import QueueRef
from batonmq._core.records import (
    BODY_FROM,
    HEADER_BYTES,
    STAMP_TO,
    Header,
    column_starts,
)
from batonmq.errors import LimitExceeded

MIRROR_EPOCH = 1 << 31
"""Epochs from here on, but the last one, are those of mirrors."""
_GAP_BITS, _SEQUENCE_BITS = 20, 32
GAPS_MAX = (1 << _GAP_BITS) - 1
SOURCE_OFFSET_MAX = ((1 << 11) - 1) << _SEQUENCE_BITS
"""Offsets of mirrored messages are below it."""
_PRODUCER = struct.Struct(">qII")
_LENGTH_AT, _STAMP_CHECKSUM_AT, _QUEUE_ID_AT, _FLAGS_AT = 8, 12, 80, 94
_COMPRESSION_MASK = 0xF


class MirrorMark(NamedTuple):
    """The place of a mirrored batch in its source; the module says how it is stored."""

    source_id: int
    epoch: int
    first_offset: int
    message_count: int

    @property
    def next_offset(self) -> int:
        """Source offset after the last message."""
        return self.first_offset + self.message_count


def source_id(cluster: str, topic_id: int, create_unix_ms: int, queue: QueueRef) -> int:
    """Return the producer id of all mirrored batches of a queue; positive."""
    what = "/".join(
        map(str, (cluster, topic_id, create_unix_ms, queue.topic, queue.broker, queue.queue_id))
    )
    digest = hashlib.sha256(what.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2 | 1 << 61


def mark_of(header: Header) -> MirrorMark | None:
    """Return the mark of a batch; None if it was not mirrored."""
    epoch = header.producer_epoch
    if header.producer_id <= 0 or not MIRROR_EPOCH <= epoch < ONE_BATCH_EPOCH:
        return None
    upper = (epoch - MIRROR_EPOCH) >> _GAP_BITS
    offset = upper << _SEQUENCE_BITS | header.sequence
    return MirrorMark(header.producer_id, epoch, offset, header.count)


def next_mark(last: MirrorMark | None, source: int, header: Header) -> MirrorMark:
    """Return the mark of a batch of the source that is mirrored after `last`.

    Args:
        last: Mark of the last batch in the target; None for the first one.
        source: Producer id of the source queue.

    Raises:
        LimitExceeded: The offset or the number of gaps does not fit.
    """
    offset = header.first_offset
    upper = offset >> _SEQUENCE_BITS
    gaps = 0
    if last is not None and last.first_offset >> _SEQUENCE_BITS == upper:
        gaps = (last.epoch & GAPS_MAX) + (offset != last.next_offset)
    if offset >= SOURCE_OFFSET_MAX or gaps > GAPS_MAX:
        raise LimitExceeded(
            f"offset {offset} after {gaps} gaps of its queue can't be mirrored",
            remedy="Move the producers to a new topic, and mirror that.",
            facts={"field": "offset", "limit": SOURCE_OFFSET_MAX},
        )
    return MirrorMark(source, MIRROR_EPOCH | upper << _GAP_BITS | gaps, offset, header.count)


def learned_mark(
    sent: MirrorMark, *, expected: int | None = None, epoch: int | None = None
) -> MirrorMark:
    """Return where the mirrored messages end, as an empty mark, from the rejection of a batch.

    Args:
        sent: Mark of the rejected batch.
        expected: Sequence that storage expects after the last one of the same epoch.
        epoch: Newer epoch that storage knows. The messages end at the returned offset or later,
            if those of the rejected batch are mirrored.
    """
    offset, half = sent.first_offset, 1 << (_SEQUENCE_BITS - 1)
    if epoch is not None:
        upper = (epoch - MIRROR_EPOCH) >> _GAP_BITS
        return MirrorMark(sent.source_id, epoch, max(offset, upper << _SEQUENCE_BITS), 0)
    if expected is not None:
        offset += (expected - offset + half) % (1 << _SEQUENCE_BITS) - half
    return MirrorMark(sent.source_id, sent.epoch, max(0, offset), 0)


def marked_batch(batch: bytes, header: Header, queue_id: int, mark: MirrorMark) -> bytes:
    """Return a stored batch as a mirror sends it: for another queue, with a mark, without a stamp.

    The records stay as they are, and so does the time of creation. If the messages are outputs of a
    transformer, their inputs are not named any more: these are offsets of the source.
    """
    head, rest = bytearray(batch[:HEADER_BYTES]), batch[HEADER_BYTES:]
    if header.output_head_bytes:
        at = column_starts(header).outputs - HEADER_BYTES
        rest = rest[:at] + rest[at + header.output_bytes :]
        (flags,) = struct.unpack_from(">H", head, _FLAGS_AT)
        struct.pack_into(">H", head, _FLAGS_AT, flags & _COMPRESSION_MASK)
        struct.pack_into(">I", head, _LENGTH_AT, HEADER_BYTES + len(rest))
    head[_STAMP_CHECKSUM_AT:STAMP_TO] = bytes(STAMP_TO - _STAMP_CHECKSUM_AT)
    sequence = mark.first_offset & ((1 << _SEQUENCE_BITS) - 1)
    _PRODUCER.pack_into(head, BODY_FROM, mark.source_id, mark.epoch, sequence)
    struct.pack_into(">I", head, _QUEUE_ID_AT, queue_id)
    struct.pack_into(">I", head, STAMP_TO, crc32c(rest, crc32c(bytes(head[BODY_FROM:]))))
    return bytes(head) + rest
