"""Batches in the files of a backup, and how a batch is stored again. Pure."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator

from batonmq._core.checksum import crc32c
from batonmq._core.queue_sender import ONE_BATCH_EPOCH
from batonmq._core.records import (
    BODY_FROM,
    HEADER,
    HEADER_BYTES,
    STAMP_TO,
    Header,
    check_batch,
    read_header,
)
from batonmq.errors import BadBatch

_PRODUCER = struct.Struct(">qII")
_QUEUE_ID_AT = 80
_WAITING = struct.Struct(">qqI")


def split_batches(content: bytes) -> Iterator[tuple[Header, bytes]]:
    """Yield the stored batches of a chunk, each checked.

    Raises:
        BadBatch, BadChecksum: The content is not a sequence of stored batches.
    """
    at = 0
    while at < len(content):
        length = int.from_bytes(content[at + 8 : at + 12], "big")
        batch = content[at : at + max(length, HEADER_BYTES)]
        yield check_batch(batch, stamped=True), batch
        at += length


def encode_waiting(batches: Iterable[tuple[int, int, bytes]]) -> bytes:
    """Return the content of a file of scheduled batches: delivery time, number, batch of each."""
    return b"".join(
        _WAITING.pack(time, number, len(batch)) + batch for time, number, batch in batches
    )


def decode_waiting(content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Inverse of `encode_waiting`.

    Raises:
        BadBatch, BadChecksum: A batch is damaged.
    """
    at = 0
    while at < len(content):
        if at + _WAITING.size > len(content):
            raise BadBatch("a file of scheduled batches is truncated", facts={"field": "length"})
        deliver_unix_ms, number, length = _WAITING.unpack_from(content, at)
        at += _WAITING.size
        batch = content[at : at + length]
        check_batch(batch, stamped=False)
        yield deliver_unix_ms, number, batch
        at += length


def restored_id(*what: object) -> int:
    """Return the producer id of a restored batch: the same for the same batch of a backup."""
    digest = hashlib.sha256("/".join(map(str, what)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2 | 1 << 61


def without_stamp(batch: bytes, queue_id: int, producer_id: int) -> bytes:
    """Return a batch as a producer of one batch sends it: for another queue and without a stamp.

    The records and their columns stay as they are, and so does the time of creation.
    """
    head = bytearray(batch[:HEADER_BYTES])
    head[12:STAMP_TO] = bytes(STAMP_TO - 12)
    _PRODUCER.pack_into(head, BODY_FROM, producer_id, ONE_BATCH_EPOCH, 0)
    struct.pack_into(">I", head, _QUEUE_ID_AT, queue_id)
    crc = crc32c(batch[HEADER_BYTES:], crc32c(bytes(head[BODY_FROM:])))
    struct.pack_into(">I", head, STAMP_TO, crc)
    assert len(head) == HEADER.size
    return bytes(head) + batch[HEADER_BYTES:]


def scheduled_key(header: Header) -> tuple[int, int] | None:
    """Return delivery time and number of the scheduled batch that a batch delivers; else None."""
    if header.producer_id >= 0:
        return None
    return -header.producer_id, header.producer_epoch << 32 | header.sequence


def header_of(batch: bytes) -> Header:
    """Return the header of a batch that was checked."""
    return read_header(batch)
