"""Goal: a RangeSet is a set of integers. Method: random runs, compared with Python sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq_server.offsets.core.ranges import EMPTY, RangeSet

OFFSETS = st.sets(st.integers(0, 40))
BOUND = st.integers(0, 45)


def of(offsets: set[int]) -> RangeSet:
    return RangeSet.merged((offset, offset + 1) for offset in sorted(offsets))


def members(ranges: RangeSet) -> set[int]:
    """Return the offsets; assert that the runs ascend, do not touch and are not empty."""
    ends = [end for run in ranges.runs for end in run]
    assert ends == sorted(set(ends))
    return {offset for first, next_ in ranges.runs for offset in range(first, next_)}


@given(OFFSETS, OFFSETS)
def test_union_and_difference_are_those_of_sets(one: set[int], other: set[int]) -> None:
    assert members(of(one).union(of(other))) == one | other
    assert members(of(one).difference(of(other))) == one - other


@given(OFFSETS, BOUND, BOUND)
def test_subsets_are_those_of_sets(one: set[int], first: int, next_: int) -> None:
    assert members(of(one).at_or_above(first)) == {o for o in one if o >= first}
    assert members(of(one).between(first, next_)) == {o for o in one if first <= o < next_}


@given(OFFSETS, BOUND)
def test_membership_and_counts_are_those_of_sets(one: set[int], offset: int) -> None:
    ranges = of(one)
    assert ranges.count == len(one)
    assert bool(ranges) == bool(one)
    assert ranges.next_offset == max(one, default=-1) + 1
    assert ranges.first_missing(offset) == min(o for o in range(offset, 99) if o not in one)


@given(OFFSETS)
def test_equal_sets_have_equal_form(one: set[int]) -> None:
    assert of(one) == RangeSet(tuple(of(one).runs))
    assert hash(of(one)) == hash(RangeSet(tuple(of(one).runs)))
    assert (of(one) == EMPTY) == (not one)


@given(
    st.lists(st.integers(1, 1 << 40), max_size=20).map(
        lambda gaps: [(sum(gaps[: i + 1]), sum(gaps[: i + 1]) + 1) for i in range(0, len(gaps), 2)]
    )
)
def test_stored_form_round_trips_at_every_width(runs: list[tuple[int, int]]) -> None:
    ranges = RangeSet.merged(runs)
    assert RangeSet.decode(ranges.encoded) == ranges


@pytest.mark.parametrize(
    ("runs", "size"),
    [((), 0), (((9, 10),), 10), (((9, 10), (300, 310)), 15), (((0, 1 << 60),), 17)],
)
def test_stored_form_takes_the_least_width(runs: tuple[tuple[int, int], ...], size: int) -> None:
    assert len(RangeSet(runs).encoded) == size


@given(st.binary(max_size=40))
def test_arbitrary_bytes_are_decoded_or_rejected(stored: bytes) -> None:
    try:
        ranges = RangeSet.decode(stored)
    except ValueError:
        return
    ends = [end for run in ranges.runs for end in run]
    assert ends == sorted(ends)


def test_stored_runs_without_a_gap_between_them_are_rejected() -> None:
    intact = RangeSet(((5, 6), (7, 8))).encoded
    with pytest.raises(ValueError, match="a run is empty"):
        RangeSet.decode(intact[:-2] + b"\0" + intact[-1:])


def test_run_of_any_length_costs_one_entry() -> None:
    ranges = RangeSet.of(0, 1 << 60).difference(RangeSet.of(5, 6))
    assert ranges.runs == ((0, 5), (6, 1 << 60))
