"""Histograms of many values, in buckets with bounds that grow by the factor 2^(1/8).

Bucket i counts values greater than 2^((i-1)/8) and not greater than 2^(i/8); bucket 0 counts values
up to 1. Two histograms are merged by adding the counts of equal buckets, in any order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate

PER_DOUBLING = 8
BUCKETS = 63 * PER_DOUBLING + 1
"""Enough for any value below 2^63."""
_UPPER_BOUNDS = [2 ** (bucket / PER_DOUBLING) for bucket in range(BUCKETS - 1)]

bucket_of = partial(bisect_left, _UPPER_BOUNDS)
"""Return the bucket of a value; a negative value counts as 0."""


def percentile(first_bucket: int, counts: Sequence[int], share: float) -> float:
    """Return the value at or below which `share` of all values are, with an error of 4.5 % at most.

    Args:
        counts: Counts of `first_bucket` and of the buckets after it.
        share: 0 to 1; 0.99 for the 99th percentile.

    Returns:
        The middle of the bucket; 0 if there are no values.
    """
    sums = list(accumulate(counts))
    if not sums or not sums[-1]:
        return 0.0
    bucket = first_bucket + bisect_left(sums, max(share * sums[-1], 1.0))
    return 1.0 if bucket <= 0 else float(2 ** ((bucket - 0.5) / PER_DOUBLING))


class LogBuckets:
    """One histogram.

    Attributes:
        counts: Counts of all buckets, from 0 on.
        total: Sum of all values.
    """

    __slots__ = ("counts", "total")

    def __init__(self, values: Sequence[int] = ()) -> None:
        self.counts = [0] * BUCKETS
        self.total = 0
        self.add(values)

    @classmethod
    def of(cls, first_bucket: int, counts: Iterable[int], total: int) -> LogBuckets:
        """Inverse of `parts`; counts of impossible buckets go to the nearest one."""
        histogram = cls()
        for bucket, count in enumerate(counts, first_bucket):
            histogram.counts[min(max(bucket, 0), BUCKETS - 1)] += count
        histogram.total = total
        return histogram

    def __len__(self) -> int:
        return sum(self.counts)

    def add(self, values: Sequence[int]) -> None:
        """Count `values`."""
        ordered, begin = sorted(values), 0
        while begin < len(ordered):
            bucket = bucket_of(ordered[begin])
            last = bucket == BUCKETS - 1
            end = len(ordered) if last else bisect_right(ordered, _UPPER_BOUNDS[bucket], begin)
            self.counts[bucket] += end - begin
            begin = end
        self.total += sum(ordered[bisect_right(ordered, 0) :])

    def merge(self, other: LogBuckets) -> None:
        """Add the counts of `other`."""
        self.counts = [
            mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)
        ]
        self.total += other.total

    def percentile(self, share: float) -> float:
        """As `percentile` of the module."""
        return percentile(0, self.counts, share)

    def parts(self) -> tuple[int, list[int], int]:
        """Return the first used bucket, the counts up to the last used one, and the total."""
        used = [bucket for bucket, count in enumerate(self.counts) if count]
        if not used:
            return 0, [], 0
        return used[0], self.counts[used[0] : used[-1] + 1], self.total
