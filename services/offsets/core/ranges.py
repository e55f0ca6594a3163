"""Immutable sets of offsets, stored as runs: a run of ten million costs as much as a run of one.

As a set never changes, a snapshot of a queue's progress only copies references.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable

Run = tuple[int, int]
"""`(first_offset, next_offset)`, half-open and not empty."""

_HEAD = struct.Struct("<cq")
_WIDTHS = (("B", 1, 1 << 8), ("H", 2, 1 << 16), ("I", 4, 1 << 32), ("Q", 8, 1 << 64))
_BYTES_OF = {code.encode(): width for code, width, _ in _WIDTHS}


class RangeSet:
    """Ascending runs that neither overlap nor touch; offsets are not negative.

    Stored form (`encoded`), nothing for an empty set, else little-endian:

        at  size  field
         0     1  width w of a number: "B" 1 byte, "H" 2, "I" 4, "Q" 8
         1     8  first offset of the first run
         9     w  length of the first run
               w  then for each further run: gap before it, length
    """

    __slots__ = ("_encoded", "runs")

    def __init__(self, runs: tuple[Run, ...] = ()) -> None:
        self.runs = runs
        self._encoded: bytes | None = None

    @classmethod
    def of(cls, first_offset: int, next_offset: int) -> RangeSet:
        """Return the set of one run; empty if `next_offset` is not greater."""
        return cls(((first_offset, next_offset),)) if next_offset > first_offset else EMPTY

    @classmethod
    def merged(cls, runs: Iterable[Run]) -> RangeSet:
        """Return the set of ascending runs that may touch or overlap."""
        joined: list[Run] = []
        for first, next_ in runs:
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], next_))
            else:
                joined.append((first, next_))
        return cls(tuple(joined))

    @classmethod
    def decode(cls, encoded: bytes) -> RangeSet:
        """Return the set of a stored form; inverse of `encoded`.

        Raises:
            ValueError: the bytes are not the stored form of a set.
        """
        if not encoded:
            return EMPTY
        width = _BYTES_OF.get(encoded[:1])
        size = len(encoded) - _HEAD.size
        if width is None or size <= 0 or size % width or size // width % 2 == 0:
            raise ValueError(f"{len(encoded)} bytes are not a range set")
        code, at = _HEAD.unpack_from(encoded)
        numbers = struct.unpack_from(f"<{size // width}{code.decode()}", encoded, _HEAD.size)
        if at < 0 or not all(numbers):
            raise ValueError("a run is empty or begins before offset 0")
        runs, gap = [], 0
        for index in range(0, len(numbers), 2):
            first = at + gap
            at = first + numbers[index]
            runs.append((first, at))
            gap = numbers[index + 1] if index + 1 < len(numbers) else 0
        return cls(tuple(runs))

    @property
    def encoded(self) -> bytes:
        """The stored form; encoded once."""
        if self._encoded is None:
            self._encoded = self._encode()
        return self._encoded

    def _encode(self) -> bytes:
        if not self.runs:
            return b""
        numbers: list[int] = []
        at = self.runs[0][0]
        for first, next_ in self.runs:
            numbers += (first - at, next_ - first)
            at = next_
        largest = max(numbers)
        code = next(code for code, _, limit in _WIDTHS if largest < limit)
        head = _HEAD.pack(code.encode(), self.runs[0][0])
        return head + struct.pack(f"<{len(numbers) - 1}{code}", *numbers[1:])

    def __bool__(self) -> bool:
        return bool(self.runs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeSet) and self.runs == other.runs

    def __hash__(self) -> int:
        return hash(self.runs)

    def __repr__(self) -> str:
        return f"RangeSet({self.runs!r})"

    @property
    def count(self) -> int:
        """Number of offsets."""
        return sum(next_ - first for first, next_ in self.runs)

    @property
    def next_offset(self) -> int:
        """One past the greatest offset; 0 if empty."""
        return self.runs[-1][1] if self.runs else 0

    def first_missing(self, offset: int) -> int:
        """Return the lowest offset that is at or above `offset` and not in the set."""
        index = self._index(offset)
        if index < len(self.runs) and self.runs[index][0] <= offset:
            return self.runs[index][1]
        return offset

    def at_or_above(self, offset: int) -> RangeSet:
        """Return the subset that is not below `offset`."""
        if not self.runs or self.runs[0][0] >= offset:
            return self
        runs = self.runs[self._index(offset) :]
        if runs and runs[0][0] < offset:
            runs = ((offset, runs[0][1]), *runs[1:])
        return RangeSet(runs)

    def between(self, first_offset: int, next_offset: int) -> RangeSet:
        """Return the subset inside `[first_offset, next_offset)`."""
        if not self.runs:
            return self
        runs = self.at_or_above(first_offset).runs
        runs = runs[: bisect_left(runs, (next_offset,))]
        if runs and runs[-1][1] > next_offset:
            runs = (*runs[:-1], (runs[-1][0], next_offset))
        return RangeSet(runs)

    def union(self, other: RangeSet) -> RangeSet:
        """Return the offsets in either set; copies the longer one and merges around the shorter."""
        longer, shorter = (self, other) if len(self.runs) >= len(other.runs) else (other, self)
        if not shorter.runs:
            return longer
        runs = longer.runs
        start = longer._index(shorter.runs[0][0] - 1)
        stop = bisect_left(runs, (shorter.next_offset + 1,))
        middle = RangeSet.merged(sorted(runs[start:stop] + shorter.runs)).runs
        return RangeSet(runs[:start] + middle + runs[stop:])

    def difference(self, other: RangeSet) -> RangeSet:
        """Return the offsets in this set and not in `other`."""
        if not self.runs or not other.runs:
            return self
        start = self._index(other.runs[0][0])
        stop = bisect_left(self.runs, (other.next_offset,))
        if start >= stop:
            return self
        kept: list[Run] = []
        cuts, cut = other.runs, other._index(self.runs[start][0])
        for first, next_ in self.runs[start:stop]:
            rest = first
            while cut < len(cuts) and cuts[cut][0] < next_:
                if cuts[cut][0] > rest:
                    kept.append((rest, cuts[cut][0]))
                rest = max(rest, cuts[cut][1])
                if rest >= next_:
                    break
                cut += 1
            if rest < next_:
                kept.append((rest, next_))
        return RangeSet(self.runs[:start] + tuple(kept) + self.runs[stop:])

    def _index(self, offset: int) -> int:
        """Return the index of the first run that ends after `offset`."""
        index = bisect_left(self.runs, (offset + 1,))
        return index - 1 if index and self.runs[index - 1][1] > offset else index


EMPTY = RangeSet()
