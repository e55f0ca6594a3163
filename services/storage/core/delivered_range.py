"""The offsets of one queue that were delivered to one owner, for the metric stream.

Consecutive pulls become one range. The delivered offsets are kept as runs in numpy columns, so
there is no loop over messages, whatever the filter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from batonmq_server.storage.core.consumequeue import Int64Array

ISLANDS_MAX = 4_096
"""Maximum number of runs of delivered offsets in one reported range; more are reported in parts."""
PULLS_MAX = 65_536
"""Maximum number of pulls in one range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullDelivery:
    """What one pull delivered.

    Attributes:
        kept: Delivered offsets, ascending, relative to the first one that is not lost; None if all
            were delivered.
        lost_count: Number of offsets at the start that retention had removed.
        redelivered_count: Number of delivered offsets that an earlier owner may have started.
        byte_count: Size of the delivered batches.
    """

    first_offset: int
    next_offset: int
    kept: Int64Array | None = None
    lost_count: int = 0
    redelivered_count: int = 0
    byte_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRange:
    """A range [first_offset, next_offset) as the metric stream reports it.

    Attributes:
        runs: Run lengths, alternating: offsets not delivered, offsets delivered. Empty if all
            offsets were delivered.
    """

    first_offset: int
    next_offset: int
    message_count: int
    filtered_count: int
    lost_count: int
    redelivered_count: int
    byte_count: int
    runs: list[int]


class DeliveredRange:
    """Consecutive pulls of one owner: each begins where the one before ended."""

    __slots__ = ("_byte_count", "_first", "_lost", "_parts", "_redelivered", "next_offset")

    def __init__(self, first: PullDelivery) -> None:
        self._first, self._lost = first.first_offset, first.lost_count
        self._byte_count = self._redelivered = 0
        self._parts: list[tuple[int, int, Int64Array | None]] = []
        self._add(first)

    def extend(self, step: PullDelivery) -> bool:
        """Add a pull if it continues this range; return whether it does."""
        fits = step.first_offset == self.next_offset and not step.lost_count
        if fits and len(self._parts) < PULLS_MAX:
            self._add(step)
            return True
        return False

    def reports(self) -> Iterator[ReportedRange]:
        """Yield the range in parts; counts that can't be divided are in the first part."""
        if len(self._parts) == 1 and self._parts[0][2] is None and not self._lost:
            yield self._whole()
            return
        begins, ends = self._edges()
        if len(begins):
            apart = begins[1:] != ends[:-1]
            begins = begins[np.concatenate(([True], apart))]
            ends = ends[np.concatenate((apart, [True]))]
        cuts = [self._first, *begins[ISLANDS_MAX::ISLANDS_MAX].tolist(), self.next_offset]
        for index in range(len(cuts) - 1):
            part = slice(index * ISLANDS_MAX, (index + 1) * ISLANDS_MAX)
            yield self._part(cuts[index], cuts[index + 1], begins[part], ends[part])

    def _add(self, step: PullDelivery) -> None:
        begin = step.first_offset + step.lost_count
        if step.kept is None and self._parts and self._parts[-1][2] is None:
            begin = self._parts.pop()[0]
        self._parts.append((begin, step.next_offset, step.kept))
        self.next_offset = step.next_offset
        self._redelivered += step.redelivered_count
        self._byte_count += step.byte_count

    def _edges(self) -> tuple[Int64Array, Int64Array]:
        """Return the begins and ends of the runs of delivered offsets; runs may touch."""
        begins, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for whole, parts in groupby(self._parts, lambda part: part[2] is None):
            if whole:
                edges = np.array([part[:2] for part in parts if part[0] < part[1]], np.int64)
                begins.append(edges.reshape(-1, 2)[:, 0])
                ends.append(edges.reshape(-1, 2)[:, 1])
            else:
                kept = [kept + begin for begin, _, kept in parts if kept is not None]
                first, last = _islands(np.concatenate(kept))
                begins.append(first)
                ends.append(last)
        return np.concatenate(begins), np.concatenate(ends)

    def _whole(self) -> ReportedRange:
        """Return the range if all of its messages were delivered, which needs no columns."""
        return ReportedRange(
            first_offset=self._first,
            next_offset=self.next_offset,
            message_count=self.next_offset - self._first,
            filtered_count=0,
            lost_count=0,
            redelivered_count=self._redelivered,
            byte_count=self._byte_count,
            runs=[],
        )

    def _part(self, first: int, next_: int, begins: Int64Array, ends: Int64Array) -> ReportedRange:
        is_first = first == self._first
        count = int((ends - begins).sum())
        lost_count = self._lost if is_first else 0
        edges = np.column_stack((begins, ends)).ravel()
        runs: list[int] = np.diff(edges, prepend=first, append=next_).tolist()
        return ReportedRange(
            first_offset=first,
            next_offset=next_,
            message_count=count,
            filtered_count=next_ - first - count - lost_count,
            lost_count=lost_count,
            redelivered_count=self._redelivered if is_first else 0,
            byte_count=self._byte_count if is_first else 0,
            runs=[] if count == next_ - first else runs,
        )


def _islands(offsets: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the begins and ends of the runs in ascending `offsets`."""
    if not len(offsets):
        return offsets, offsets
    breaks = np.flatnonzero(np.diff(offsets) != 1)
    begins = offsets[np.concatenate(([0], breaks + 1))]
    return begins, offsets[np.concatenate((breaks, [len(offsets) - 1]))] + 1
