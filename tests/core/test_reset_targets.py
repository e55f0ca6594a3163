"""Goal: a reset moves to its target within the queue; a note states a target beyond its bounds.

Method: tables of targets on one queue; Hypothesis for the bounds.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq._core.reset_targets import (
    ResetBounds,
    ResetOffset,
    ResetTarget,
    ShiftBy,
    ToEarliest,
    ToLatest,
    ToOffset,
    ToTime,
    resolve_target,
)

QUEUE = ResetBounds(first_offset=10, next_offset=20, committed_offset=15, time_offset=17)


@pytest.mark.parametrize(
    ("target", "offset"),
    [
        (ToOffset(10), 10),
        (ToOffset(20), 20),
        (ToEarliest(), 10),
        (ToLatest(), 20),
        (ToTime(1), 17),
        (ShiftBy(-5), 10),
        (ShiftBy(5), 20),
        (ShiftBy(0), 15),
    ],
)
def test_target_within_the_queue_is_not_changed(target: ResetTarget, offset: int) -> None:
    assert resolve_target(target, QUEUE) == ResetOffset(offset)


@pytest.mark.parametrize("target", [ToOffset(9), ShiftBy(-6)])
def test_target_before_the_first_offset_becomes_the_first_with_a_note(target: ResetTarget) -> None:
    assert resolve_target(target, QUEUE) == ResetOffset(
        10, "offset 9 is no longer kept; 10 is the first offset"
    )


@pytest.mark.parametrize("target", [ToOffset(21), ShiftBy(6)])
def test_target_beyond_the_end_becomes_the_end_with_a_note(target: ResetTarget) -> None:
    assert resolve_target(target, QUEUE) == ResetOffset(
        20, "offset 21 is beyond the end; 20 is the end"
    )


def test_queue_without_progress_is_not_shifted() -> None:
    resolved = resolve_target(ShiftBy(1), ResetBounds(10, 20))
    assert resolved.offset is None
    assert "no progress" in resolved.note


def test_shift_of_progress_ahead_of_the_log_ends_at_its_end() -> None:
    assert resolve_target(ShiftBy(0), ResetBounds(0, 5, committed_offset=8)).offset == 5


TARGETS = st.one_of(
    st.builds(ToOffset, st.integers(0, 1_000)),
    st.builds(ShiftBy, st.integers(-1_000, 1_000)),
    st.builds(ToTime, st.integers(0, 1_000)),
    st.just(ToEarliest()),
    st.just(ToLatest()),
)


@given(
    TARGETS,
    st.integers(0, 500),
    st.integers(0, 500),
    st.integers(0, 1_000),
    st.integers(0, 1_000),
)
def test_every_target_is_within_the_queue(
    target: ResetTarget, first: int, length: int, committed: int, time_offset: int
) -> None:
    resolved = resolve_target(target, ResetBounds(first, first + length, committed, time_offset))
    assert resolved.offset is not None
    assert first <= resolved.offset <= first + length
