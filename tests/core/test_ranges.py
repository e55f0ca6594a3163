"""Goal: functions on ranges agree with sets of offsets, and return normalized ranges.

Method: Hypothesis over small offsets, so that ranges often meet, overlap and repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from batonmq._core.ranges import Range, contains, normalize, of_sorted, subtract

OFFSETS_MAX = 24
ANY_RUN = st.tuples(st.integers(0, OFFSETS_MAX), st.integers(0, OFFSETS_MAX)).map(
    lambda pair: (min(pair), max(pair))
)
ANY_RUNS = st.lists(ANY_RUN, max_size=8)
"""In any order, overlapping, also empty."""
SETS = st.sets(st.integers(0, OFFSETS_MAX))


def members(ranges: Iterable[Range]) -> set[int]:
    return {offset for first, end in ranges for offset in range(first, end)}


def assert_normal(ranges: Sequence[Range]) -> None:
    assert all(first < end for first, end in ranges), "empty run"
    assert all(a[1] < b[0] for a, b in pairwise(ranges)), "runs touch"


@given(ANY_RUNS)
def test_normalize_keeps_the_offsets_and_normalizes_the_ranges(ranges: list[Range]) -> None:
    answer = normalize(ranges)
    assert_normal(answer)
    assert members(answer) == members(ranges)


@given(SETS)
def test_of_sorted_returns_the_ranges_of_a_set(offsets: set[int]) -> None:
    answer = of_sorted(sorted(offsets))
    assert_normal(answer)
    assert members(answer) == offsets


@given(SETS, SETS)
def test_subtract_is_the_difference_of_sets(offsets: set[int], minus: set[int]) -> None:
    answer = subtract(of_sorted(sorted(offsets)), of_sorted(sorted(minus)))
    assert_normal(answer)
    assert members(answer) == offsets - minus


@given(SETS, st.integers(-1, OFFSETS_MAX + 1))
@example({0, 1, 5, 6}, 5)  # the first offset of a later run
def test_contains_is_membership_of_sets(offsets: set[int], offset: int) -> None:
    assert contains(of_sorted(sorted(offsets)), offset) == (offset in offsets)


def test_contains_is_false_without_ranges() -> None:
    assert not contains((), 0)
