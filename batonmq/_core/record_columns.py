"""The records of a batch as columns: where each part of each record lies, without a loop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batonmq._core.records import RECORD, Header, Int64Array, record_lengths, record_section
from batonmq.errors import BadBatch


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """Records of one batch.

    Attributes:
        section: The records, one behind the other, not compressed.
        bounds: Shape (count, 6), byte positions in `section`: where the record's head begins, its
            keys, its tag, its properties, its body, and where that ends, which is the beginning
            of the next record.
    """

    section: bytes
    bounds: Int64Array


def record_columns(batch: bytes, header: Header) -> RecordColumns:
    """The records of a batch that `check_batch` has passed.

    Raises:
        BadBatch: they can't be unpacked, or their lengths can't be.
    """
    section = record_section(batch, header)
    lengths = record_lengths(batch, header)
    ends = lengths.cumsum()
    if int(lengths.min()) < RECORD.size or int(ends[-1]) != len(section):
        raise BadBatch("record lengths do not add up to the batch", facts={"field": "lengths"})
    begins = ends - lengths
    at_every_byte = np.ndarray((len(section) - RECORD.size + 1,), np.uint64, section, 0, (1,))
    heads = at_every_byte[begins].view(">u8").astype(np.int64)
    bounds = np.empty((header.count, 6), np.int64)
    bounds[:, 0] = begins
    bounds[:, 1] = begins + RECORD.size
    bounds[:, 2] = bounds[:, 1] + (heads >> 48 & 0xFFFF)
    bounds[:, 3] = bounds[:, 2] + (heads >> 32 & 0xFFFF)
    bounds[:, 4] = bounds[:, 3] + (heads & 0xFFFFFFFF)
    bounds[:, 5] = ends
    if bool((bounds[:, 4] > ends).any()):
        raise BadBatch("a record is cut short", facts={"field": "record"})
    return RecordColumns(section, bounds)
