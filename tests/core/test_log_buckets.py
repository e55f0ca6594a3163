"""Goal: histograms follow their definition, merge in any order, and percentiles are close.

Method: Hypothesis against the definition, one value at a time, and against sorted values.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq._core.log_buckets import BUCKETS, LogBuckets, bucket_of, percentile

VALUES = st.integers(0, 1 << 40)


@given(VALUES)
def test_value_lies_between_the_bounds_of_its_bucket(value: int) -> None:
    bucket = bucket_of(value)
    assert value <= 2 ** (bucket / 8) * (1 + 1e-12)
    assert bucket == 0 or value > 2 ** ((bucket - 1) / 8) * (1 - 1e-12)


def test_powers_of_two_are_the_upper_bounds_of_their_buckets() -> None:
    assert [bucket_of(2**n) for n in range(60)] == [8 * n for n in range(60)]


def test_values_out_of_range_are_in_the_outermost_buckets() -> None:
    assert [bucket_of(value) for value in (-5, 0, 1, (1 << 63) - 1)] == [0, 0, 0, BUCKETS - 1]


@given(st.lists(st.lists(VALUES, max_size=20), max_size=6), st.randoms())
def test_parts_merged_in_any_order_equal_the_whole(parts: list[list[int]], random: object) -> None:
    whole = LogBuckets([value for part in parts for value in part])
    random.shuffle(parts)  # type: ignore[attr-defined]
    merged = LogBuckets()
    for part in parts:
        merged.merge(LogBuckets.of(*LogBuckets(part).parts()))
    assert merged.parts() == whole.parts()
    assert len(merged) == sum(map(len, parts))


@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=200), st.floats(0.01, 1))
def test_percentile_has_an_error_of_at_most_4_5_percent(values: list[int], share: float) -> None:
    exact = sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
    estimate = LogBuckets(values).percentile(share)
    assert abs(estimate - exact) <= exact * 0.045


def test_empty_histogram_has_percentile_zero() -> None:
    assert LogBuckets().percentile(0.5) == 0
    assert LogBuckets().parts() == (0, [], 0)
    assert percentile(3, [], 0.5) == 0


@pytest.mark.parametrize("first_bucket", [-3, BUCKETS + 5])
def test_impossible_buckets_count_in_the_nearest(first_bucket: int) -> None:
    assert len(LogBuckets.of(first_bucket, [1, 2], 7)) == 3
