"""Finds the messages that pass a condition on their properties, within a bound per request.

Properties are text inside the records, so this is a loop over messages in Python. Its cost is
counted in steps and bounded: an answer may cover only a part of the queue, and says how far it got.
A message without any of the named properties costs nothing: the result is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from batonmq._columns.batch_columns import Int64Array, record_lengths
from batonmq._core.records import RECORD, read_header, record_section
from batonmq._core.subscription import KEYS, TAGS, SqlFilter

STEPS_MAX = 6_144
"""Maximum steps of one request, of 0.6 to 1.3 us each: it blocks other requests for under 10 ms."""
STEPS_PER_BATCH: Final = 16
"""Steps to verify a batch and to find its records."""
BYTES_PER_STEP: Final = 512
"""Bytes of a batch that one step reads; bytes of properties that one step searches."""
_FEW: Final = 16
"""Up to this number of records a Python loop is faster than numpy."""

Row = tuple[int, int, int, int, int]
"""Index of a record, and the begins of its keys, tag, properties and body in the section."""


@dataclass(frozen=True, slots=True)
class PropertyMatches:
    """The messages that one request delivers.

    Attributes:
        batches: Batches with a message to deliver, ascending.
        scanned_count: Number of messages, from the first one, that the request covers.
        kept: Indexes of the messages that pass, ascending.
    """

    batches: list[bytes]
    scanned_count: int
    kept: list[int]

    @property
    def kept_count(self) -> int:
        """Number of messages that pass."""
        return len(self.kept)


def find_passing(
    batches: Iterable[tuple[int, bytes]],
    offset: int,
    wanted: SqlFilter,
    *,
    bytes_max: int,
    messages_max: int,
) -> PropertyMatches:
    """Find the longest run of messages from `offset` on, within both limits and `STEPS_MAX`.

    Args:
        batches: For each batch its end, in messages after `offset`, and the verified batch. Only as
            many as needed are taken. The first batch contains `offset`.
        bytes_max: Maximum size of the batches to deliver; the first one always fits.
        messages_max: Maximum number of messages to deliver.
    """
    passing_batches: list[bytes] = []
    kept: list[int] = []
    scanned_count = bytes_count = 0
    steps = STEPS_MAX
    for end, batch in batches:
        header = read_header(batch)
        first = header.first_offset - offset
        room = messages_max - len(kept)
        if passing_batches and bytes_count + header.length > bytes_max:
            room = 0
        section = record_section(batch, header)
        records = range(max(scanned_count - first, 0), end - first)  # others are compacted away
        rows = _rows(section, record_lengths(batch, header), records, wanted.names)
        tested = _test_records(
            section, rows, wanted, records, passing_max=room + 1, steps_max=steps
        )
        passing, stop = tested.passing, tested.stop
        if len(passing) > room:
            stop = passing[room]
            passing = passing[:room]
        scanned_count = first + stop
        if passing:
            passing_batches.append(batch)
            bytes_count += header.length
            kept += [first + index for index in passing]
        steps -= STEPS_PER_BATCH + len(section) // BYTES_PER_STEP + tested.steps
        if scanned_count < end or steps <= 0:
            break
    return PropertyMatches(passing_batches, scanned_count, kept)


@dataclass(frozen=True, slots=True)
class _TestedRecords:
    """Indexes of the records that pass, ascending; all records below `stop` were tested."""

    passing: Sequence[int]
    stop: int
    steps: int


def _test_records(
    section: bytes,
    rows: Iterable[Row],
    wanted: SqlFilter,
    records: range,
    *,
    passing_max: int,
    steps_max: int,
) -> _TestedRecords:
    """Test records until `passing_max` pass, or the next record would take too many steps.

    The first record of a request is tested, whatever steps that takes: each request gets on.

    Args:
        rows: The records with at least one of the names in the condition.
    """
    test, cost = wanted.test, wanted.cost
    needles = {name: f"\x02{name}\x01".encode() for name in wanted.names - {TAGS, KEYS}}

    def get(name: str) -> str | None:
        needle = needles.get(name)
        if needle is None:
            first, last = (tag_at, begin) if name == TAGS else (keys_at, tag_at)
            return section[first:last].decode("utf-8", "replace") or None
        at = section.rfind(needle, begin, end)  # if a name occurs twice, the last one counts
        if at < 0:
            if not section.startswith(needle[1:], begin, end):
                return None
            at = begin - 1
        at += len(needle)
        last = section.find(b"\x02", at, end)
        return section[at : last if last >= 0 else end].decode("utf-8", "replace")

    stop, steps = records.stop, 0
    tested: list[int] = []
    passing: list[int] = []
    for index, keys_at, tag_at, begin, end in rows:  # noqa: B007  get() looks at them
        step = cost * (1 + (end - begin) // BYTES_PER_STEP)
        if steps + step > steps_max and (steps_max < STEPS_MAX or index > records.start):
            stop = index
            break
        steps += step
        tested.append(index)
        if test(get):
            passing.append(index)
            if len(passing) == passing_max:
                stop = index + 1
                break
    if test(_no_property):
        failed = set(tested).difference(passing)
        passing = [index for index in range(records.start, stop) if index not in failed]
    return _TestedRecords(passing, stop, steps)


def _rows(
    section: bytes, lengths: Int64Array, records: range, names: frozenset[str]
) -> Iterable[Row]:
    """Return the rows of the records with at least one of `names`."""
    named = bool(names - {TAGS, KEYS}), TAGS in names, KEYS in names
    make = _rows_of_few if len(lengths) <= _FEW else _rows_of_many
    return make(section, lengths, records, named)


def _rows_of_few(
    section: bytes, lengths: Int64Array, records: range, named: tuple[bool, bool, bool]
) -> Iterator[Row]:
    """As `_rows`, with a loop; `named`: whether properties, tag and keys are named."""
    by_properties, by_tag, by_keys = named
    end = 0
    for index, length in enumerate(lengths.tolist()):
        begin, end = end, end + length
        keys, tag, properties = RECORD.unpack_from(section, begin)
        if (by_properties and properties) or (by_tag and tag) or (by_keys and keys):
            keys_at = begin + RECORD.size
            tag_at = keys_at + keys
            properties_at = tag_at + tag
            if index in records:
                yield index, keys_at, tag_at, properties_at, properties_at + properties


def _rows_of_many(
    section: bytes, lengths: Int64Array, records: range, named: tuple[bool, bool, bool]
) -> Iterable[Row]:
    """As `_rows_of_few`, with numpy for all records at once."""
    begins = (np.cumsum(lengths) - lengths)[records.start : records.stop]
    at_every_byte = np.ndarray((len(section) - 7,), np.uint64, section, 0, (1,))
    heads = at_every_byte[begins].view(">u8").astype(np.int64)
    keys, tags, properties = heads >> 48 & 0xFFFF, heads >> 32 & 0xFFFF, heads & 0xFFFFFFFF
    sizes = (properties, tags, keys)
    bearing = sum(size for size, counts in zip(sizes, named, strict=True) if counts)
    places = np.flatnonzero(bearing)
    keys_at = begins[places] + RECORD.size
    tags_at = keys_at + keys[places]
    properties_at = tags_at + tags[places]
    bodies_at = properties_at + properties[places]
    columns = (places + records.start, keys_at, tags_at, properties_at, bodies_at)
    return zip(*(column.tolist() for column in columns), strict=True)


def _no_property(_: str) -> None:
    return None
