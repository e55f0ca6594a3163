"""Goal: the phases of a hand-over are consecutive, and its manner is how the owner lost the
queue.

Method: plain times.
"""

from __future__ import annotations

import pytest

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq_server.lockmgr.core.decision import FenceCondition
from batonmq_server.lockmgr.core.handover_timing import (
    HandOverManner,
    HandOverTimes,
    HandOverTimings,
    NextOwner,
    OwnershipEnd,
)

KEY = GroupQueue("g", "t", "a", 0)
DRAINED = FenceCondition.CLOSED_OR_DRAINED
A, B = Incarnation("a", 1), Incarnation("b", 1)


def passed(
    notified_ms: int | None, freed_ms: int | None, since_ms: int | None, begin_ms: int = 100
) -> HandOverTimes:
    """Return a hand-over from `A`, which owned the queue until `freed_ms`, or until the fence."""
    timings = HandOverTimings()
    if notified_ms is not None:
        timings.owner_notified(KEY, notified_ms)
        timings.owner_notified(KEY, notified_ms + 1_000)  # only the first counts
    owner = None
    if freed_ms is None:
        owner = OwnershipEnd(A, 3, begin_ms)
    else:
        timings.ownership_ended(KEY, OwnershipEnd(A, 3, freed_ms))
    times = timings.queue_granted(KEY, owner, NextOwner(B, since_ms, begin_ms))
    assert times is not None
    assert (times.end.owner, times.end.token) == (A, 3)
    return times


@pytest.mark.parametrize(
    ("notified_ms", "freed_ms", "since_ms", "phases"),
    [
        (20, 70, 10, (10, 50, 70)),
        (20, None, 10, (10, 80, 100)),
        (None, 70, 10, (0, 60, 70)),
        (None, None, 10, (0, 90, 100)),
        (5, 70, 10, (0, 60, 70)),
        (5, 7, 10, (0, 0, 10)),
        (20, 7, None, (0, 0, 100)),
        (None, None, None, (0, 0, 100)),
        (200, 300, 10, (90, 0, 100)),
    ],
)
def test_phases_are_consecutive(
    notified_ms: int | None,
    freed_ms: int | None,
    since_ms: int | None,
    phases: tuple[int, int, int],
) -> None:
    times = passed(notified_ms, freed_ms, since_ms)
    assert (times.contend_ms, times.drain_ms, times.end_ms) == phases
    if since_ms is not None:
        assert since_ms + times.contend_ms + times.drain_ms == times.end_ms


def test_grant_to_the_previous_or_without_a_known_owner_is_no_hand_over() -> None:
    timings = HandOverTimings()
    assert timings.queue_granted(KEY, None, NextOwner(B, 10, 20)) is None
    timings.ownership_ended(KEY, OwnershipEnd(B, 3, 10))
    assert timings.queue_granted(KEY, None, NextOwner(B, 10, 20)) is None
    timings.owner_notified(KEY, 5)
    assert timings.queue_granted(KEY, OwnershipEnd(B, 4, 20), NextOwner(B, 10, 20)) is None


def test_another_incarnation_of_the_same_client_is_another_owner() -> None:
    times = HandOverTimings().queue_granted(
        KEY, OwnershipEnd(A, 3, 20), NextOwner(Incarnation("a", 2), 10, 20)
    )
    assert times is not None


def test_times_of_a_hand_over_are_dropped_after_it() -> None:
    timings = HandOverTimings()
    timings.owner_notified(KEY, 5)
    timings.owner_overdue(KEY)
    assert timings.queue_granted(KEY, OwnershipEnd(A, 3, 20), NextOwner(B, 10, 20)) is not None
    times = timings.queue_granted(KEY, OwnershipEnd(B, 4, 40), NextOwner(A, 30, 40))
    assert times is not None
    assert (times.contend_ms, times.overdue) == (0, False)


@pytest.mark.parametrize(
    ("end", "overdue", "condition", "unfinished", "manner"),
    [
        (OwnershipEnd(A, 3, 9), False, DRAINED, False, HandOverManner.GRACEFUL),
        (OwnershipEnd(A, 3, 9), False, DRAINED, True, HandOverManner.UNFINISHED),
        (OwnershipEnd(A, 3, 9), True, DRAINED, False, HandOverManner.GRACEFUL),
        (OwnershipEnd(A, 3, 9), False, FenceCondition.IDLE, True, HandOverManner.LEASE_EXPIRED),
        (OwnershipEnd(A, 3, 9), True, FenceCondition.IDLE, True, HandOverManner.DRAIN_TIMED_OUT),
        (
            OwnershipEnd(A, 3, 9, forced=True),
            True,
            FenceCondition.IDLE,
            True,
            HandOverManner.FORCED,
        ),
        (
            OwnershipEnd(A, 3, 9, silent=True),
            False,
            DRAINED,
            False,
            HandOverManner.LEASE_EXPIRED,
        ),
    ],
)
def test_manner_follows_from_the_end_of_the_ownership_and_the_condition(
    end: OwnershipEnd,
    overdue: bool,
    condition: FenceCondition,
    unfinished: bool,
    manner: HandOverManner,
) -> None:
    times = HandOverTimes(end, 0, 0, 9, overdue)
    assert times.manner(condition, unfinished=unfinished) is manner
