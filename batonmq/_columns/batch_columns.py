"""The columns of a batch as numpy arrays, without a loop over its records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batonmq._core.records import (
    RECORD,
    Header,
    check_columns,
    check_extra_keys,
    check_frame,
    check_lengths,
    check_part_sizes,
    column_starts,
    locate_records,
    record_section,
)
from batonmq.errors import BadBatch

Int64Array = npt.NDArray[np.int64]
LOOP_RECORDS_MAX = 40
"""Up to so many records a loop is faster than numpy."""
_NO_KEYS = (np.empty(0, np.uint16), np.empty(0, np.uint32))


def check_batch(batch: bytes | memoryview, *, stamped: bool) -> Header:
    """As `batonmq._core.records.check_batch`; faster for batches of many records."""
    header = check_frame(batch, stamped=stamped)
    if header.count <= LOOP_RECORDS_MAX:
        check_columns(batch, header)
    else:
        _check_columns(batch, header)
    return header


def tag_hashes(batch: bytes | memoryview, header: Header) -> npt.NDArray[np.int32]:
    """Return the tag-hash column: shape (count,), big-endian signed 32 bit, a view of `batch`."""
    return np.frombuffer(batch, ">i4", header.count, column_starts(header).tags)


def key_hashes(
    batch: bytes | memoryview, header: Header
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
    """Return the record index and the hash of every key, first keys before extra keys."""
    starts = column_starts(header)
    raw = bytes(batch[starts.keys : starts.keys + 4 * header.count])
    if raw == bytes(len(raw)):  # no message has a key
        return _NO_KEYS
    column = np.frombuffer(raw, ">u4")
    indexes = column.nonzero()[0]
    hashes = column[indexes]
    if header.extra_key_count:
        extra = np.frombuffer(batch, ">u4", 2 * header.extra_key_count, starts.extra_keys)
        indexes = np.concatenate((indexes, extra[::2]))
        hashes = np.concatenate((hashes, extra[1::2]))
    return indexes.astype(np.uint16), hashes.astype(np.uint32)


def record_lengths(batch: bytes | memoryview, header: Header) -> Int64Array:
    """Return the lengths of the records before compression, in bytes: shape (count,)."""
    starts = column_starts(header)
    return np.frombuffer(batch, ">u4", header.count, starts.lengths).astype(np.int64)


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """Records of one batch.

    Attributes:
        section: The records, one behind the other, decompressed.
        bounds: Shape (count, 6), byte positions in `section` at which these begin: the record's
            head, its keys, its tag, its properties, its body, the next record.
    """

    section: bytes
    bounds: Int64Array


def record_columns(batch: bytes, header: Header) -> RecordColumns:
    """Return the records of a batch that `check_batch` has accepted.

    Raises:
        BadBatch: The records can't be decompressed, or their lengths are impossible.
    """
    return columns_of(record_section(batch, header), record_lengths(batch, header))


def columns_of(section: bytes, lengths: Int64Array) -> RecordColumns:
    """Return the records in `section`, one behind the other, by their lengths.

    Raises:
        BadBatch: The lengths are impossible.
    """
    ends = lengths.cumsum()
    check_lengths(int(lengths.min()), int(ends[-1]), len(section))
    begins = ends - lengths
    heads = _heads(section, 0, begins).view(">u8").astype(np.int64)
    bounds = np.empty((len(lengths), 6), np.int64)
    bounds[:, 0] = begins
    bounds[:, 1] = begins + RECORD.size
    bounds[:, 2] = bounds[:, 1] + (heads >> 48 & 0xFFFF)
    bounds[:, 3] = bounds[:, 2] + (heads >> 32 & 0xFFFF)
    bounds[:, 4] = bounds[:, 3] + (heads & 0xFFFFFFFF)
    bounds[:, 5] = ends
    if bool((bounds[:, 4] > ends).any()):
        raise BadBatch("a record is truncated", facts={"field": "record"})
    return RecordColumns(section, bounds)


def _check_columns(batch: bytes | memoryview, header: Header) -> None:
    """As `batonmq._core.records.check_columns`."""
    lengths = record_lengths(batch, header)
    ends = lengths.cumsum()
    size, shortest, longest = int(ends[-1]), int(lengths.min()), int(lengths.max())
    records, begin = locate_records(batch, header, size)
    check_lengths(shortest, begin + size, len(records))
    heads = _heads(records, begin, ends - lengths)
    if not heads.any():  # records without keys, tag and properties
        check_part_sizes(shortest - RECORD.size, 0, 0, 0, longest - RECORD.size)
    else:
        heads = heads.view(">u8").astype(np.int64)
        keys, tags, properties = heads >> 48 & 0xFFFF, heads >> 32 & 0xFFFF, heads & 0xFFFFFFFF
        bodies = lengths - keys - tags - properties - RECORD.size
        columns = (keys, tags, properties, bodies)
        check_part_sizes(int(bodies.min()), *(int(column.max()) for column in columns))
    if header.extra_key_count:
        starts = column_starts(header)
        extra = np.frombuffer(batch, ">u4", 2 * header.extra_key_count, starts.extra_keys)
        check_extra_keys(int(extra[::2].max()), header)


def _heads(records: bytes | memoryview, first: int, begins: Int64Array) -> npt.NDArray[np.uint64]:
    """Return the 8 bytes at each of `begins`, counted from byte `first`; not byte-swapped."""
    at_every_byte = np.ndarray(
        (len(records) - first - RECORD.size + 1,), np.uint64, records, first, (1,)
    )
    return at_every_byte[begins]
