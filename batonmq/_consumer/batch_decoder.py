"""Decodes the messages of a stored batch that a filter accepts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batonmq._core.records import Header, Record, check_batch, decode_records, tag_hashes
from batonmq._core.subscription import Filter


def decode_batch(
    raw: bytes, first_offset: int, end_offset: int, wanted: Filter
) -> Iterator[tuple[Header, Record]]:
    """Yield the records of `raw` in [first_offset, end_offset) that `wanted` accepts, in order.

    Raises:
        BadBatch, BadChecksum, LimitExceeded: the batch is damaged.
    """
    header = check_batch(raw, stamped=True)
    begin = max(first_offset - header.first_offset, 0)
    stop = min(end_offset - header.first_offset, header.count)
    indexes: Sequence[int] = range(begin, stop)
    if (accepted := wanted.hashes) is not None:
        hashes = tag_hashes(raw, header)
        indexes = [index for index in indexes if hashes[index] in accepted]
    for record in decode_records(raw, header, indexes):
        if wanted.accepts(record.tag, record.keys, record.properties):
            yield header, record
