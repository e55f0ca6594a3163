"""Sketches of many values: counts in buckets whose bounds grow by the factor 2^(1/8).

Bucket i holds what is greater than 2^((i-1)/8) and not greater than 2^(i/8); values up to 1 are in
bucket 0. Two sketches are merged by adding the counts of equal buckets, in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

PER_DOUBLING = 8
BUCKETS = 63 * PER_DOUBLING + 1
"""Enough for any value below 2^63."""

Int64Array = npt.NDArray[np.int64]


def bucket_of(values: npt.ArrayLike) -> Int64Array:
    """The bucket of each value; negative values count as 0."""
    positive = np.maximum(np.asarray(values, np.float64), 1.0)
    buckets: Int64Array = (
        np.ceil(np.log2(positive) * PER_DOUBLING).astype(np.int64).clip(max=BUCKETS - 1)
    )
    return buckets


def percentile(first_bucket: int, counts: Sequence[int] | Int64Array, share: float) -> float:
    """The value below or at which `share` of all values lie, wrong by 4.5 % at most.

    Args:
        counts: Of `first_bucket` and those that follow.
        share: 0 to 1; 0.99 for the 99th percentile.

    Returns:
        The middle of the bucket; 0 without values.
    """
    summed = np.cumsum(np.asarray(counts, np.int64))
    if not len(summed) or not summed[-1]:
        return 0.0
    bucket = first_bucket + int(np.searchsorted(summed, max(share * float(summed[-1]), 1.0)))
    return 1.0 if bucket <= 0 else float(2 ** ((bucket - 0.5) / PER_DOUBLING))


class LogBuckets:
    """One sketch.

    Attributes:
        counts: Of all buckets from 0 on.
        total: Sum of all values.
    """

    __slots__ = ("counts", "total")

    def __init__(self, values: npt.ArrayLike = ()) -> None:
        self.counts: Int64Array = np.zeros(BUCKETS, np.int64)
        self.total = 0
        self.add(values)

    @classmethod
    def of(cls, first_bucket: int, counts: Iterable[int], total: int) -> LogBuckets:
        """Inverse of `parts`; buckets that can't be are taken for the nearest."""
        sketch, given = cls(), np.fromiter(counts, np.int64)
        places = np.arange(first_bucket, first_bucket + len(given)).clip(0, BUCKETS - 1)
        np.add.at(sketch.counts, places, given)
        sketch.total = total
        return sketch

    def __len__(self) -> int:
        return int(self.counts.sum())

    def add(self, values: npt.ArrayLike) -> None:
        """Count `values`, all at once."""
        given = np.asarray(values)
        if given.size:
            self.counts += np.bincount(bucket_of(given), minlength=BUCKETS)
            self.total += int(np.maximum(given, 0).sum())

    def merge(self, other: LogBuckets) -> None:
        """Count what `other` has counted, too."""
        self.counts += other.counts
        self.total += other.total

    def percentile(self, share: float) -> float:
        """See `percentile` of the module."""
        return percentile(0, self.counts, share)

    def parts(self) -> tuple[int, list[int], int]:
        """First bucket with a value, counts from there to the last one with a value, and total."""
        filled = np.flatnonzero(self.counts)
        if not len(filled):
            return 0, [], 0
        first = int(filled[0])
        return first, self.counts[first : int(filled[-1]) + 1].tolist(), self.total
