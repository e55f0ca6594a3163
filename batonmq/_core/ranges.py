"""Half-open ranges of offsets: ascending, disjoint, and not adjacent."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Range = tuple[int, int]
"""[first, next) in offsets; never empty."""


def normalize(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges in ascending order, joined if they overlap or are adjacent."""
    joined: list[Range] = []
    for first, end in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif first < end:
            joined.append((first, end))
    return joined


def subtract(ranges: Sequence[Range], minus: Sequence[Range]) -> list[Range]:
    """Return the offsets of `ranges` that are not in `minus`; both are normalized."""
    remaining: list[Range] = []
    for begin, end in ranges:
        first = begin
        index = max(bisect_right(minus, (first, first)) - 1, 0)
        while index < len(minus) and minus[index][0] < end:
            cut_first, cut_end = minus[index]
            if cut_first > first:
                remaining.append((first, min(cut_first, end)))
            first = max(first, cut_end)
            index += 1
        if first < end:
            remaining.append((first, end))
    return remaining


def contains(ranges: Sequence[Range], offset: int) -> bool:
    """Return whether `offset` is in one of the normalized `ranges`."""
    index = bisect_right(ranges, offset, key=lambda run: run[0]) - 1
    return index >= 0 and offset < ranges[index][1]


def of_sorted(offsets: Iterable[int]) -> list[Range]:
    """Return ascending offsets as ranges."""
    runs: list[Range] = []
    for offset in offsets:
        if runs and runs[-1][1] == offset:
            runs[-1] = (runs[-1][0], offset + 1)
        else:
            runs.append((offset, offset + 1))
    return runs
