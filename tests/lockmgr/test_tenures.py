"""Goal: the phases of a hand-over follow each other, and its manner says how it came about.

Method: plain times; every row of the table.
"""

from __future__ import annotations

import pytest

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq_server.lockmgr.core.access import Condition
from batonmq_server.lockmgr.core.tenures import End, HandOver, Manner, Passed, Tenures

KEY = GroupQueue("g", "t", "a", 0)
DRAINED = Condition.CLOSED_OR_DRAINED
A, B = Incarnation("a", 1), Incarnation("b", 1)


def passed(
    told_ms: int | None, freed_ms: int | None, since_ms: int | None, begin_ms: int = 100
) -> HandOver:
    """A hand-over from `A`, which gave the queue back at `freed_ms`, or had it until the fence."""
    tenures = Tenures()
    if told_ms is not None:
        tenures.told(KEY, told_ms)
        tenures.told(KEY, told_ms + 1_000)  # only the first counts
    owner = None
    if freed_ms is None:
        owner = End(A, 3, begin_ms)
    else:
        tenures.ended(KEY, End(A, 3, freed_ms))
    found = tenures.passed(KEY, owner, Passed(B, since_ms, begin_ms))
    assert found is not None
    assert (found.end.owner, found.end.token) == (A, 3)
    return found


@pytest.mark.parametrize(
    ("told_ms", "freed_ms", "since_ms", "phases"),
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
def test_phases_follow_each_other(
    told_ms: int | None, freed_ms: int | None, since_ms: int | None, phases: tuple[int, int, int]
) -> None:
    found = passed(told_ms, freed_ms, since_ms)
    assert (found.contend_ms, found.drain_ms, found.end_ms) == phases
    if since_ms is not None:
        assert since_ms + found.contend_ms + found.drain_ms == found.end_ms


def test_a_queue_that_comes_back_or_had_no_owner_that_is_known_is_no_hand_over() -> None:
    tenures = Tenures()
    assert tenures.passed(KEY, None, Passed(B, 10, 20)) is None
    tenures.ended(KEY, End(B, 3, 10))
    assert tenures.passed(KEY, None, Passed(B, 10, 20)) is None
    tenures.told(KEY, 5)
    assert tenures.passed(KEY, End(B, 4, 20), Passed(B, 10, 20)) is None


def test_another_life_of_the_same_client_is_another_owner() -> None:
    found = Tenures().passed(KEY, End(A, 3, 20), Passed(Incarnation("a", 2), 10, 20))
    assert found is not None


def test_a_hand_over_is_forgotten_once_it_is_over() -> None:
    tenures = Tenures()
    tenures.told(KEY, 5)
    tenures.overdue(KEY)
    assert tenures.passed(KEY, End(A, 3, 20), Passed(B, 10, 20)) is not None
    found = tenures.passed(KEY, End(B, 4, 40), Passed(A, 30, 40))
    assert found is not None
    assert (found.contend_ms, found.overdue) == (0, False)


@pytest.mark.parametrize(
    ("end", "overdue", "condition", "unfinished", "manner"),
    [
        (End(A, 3, 9), False, DRAINED, False, Manner.GRACEFUL),
        (End(A, 3, 9), False, DRAINED, True, Manner.UNFINISHED),
        (End(A, 3, 9), True, DRAINED, False, Manner.GRACEFUL),
        (End(A, 3, 9), False, Condition.IDLE, True, Manner.LEASE_EXPIRED),
        (End(A, 3, 9), True, Condition.IDLE, True, Manner.DRAIN_TIMED_OUT),
        (End(A, 3, 9, forced=True), True, Condition.IDLE, True, Manner.FORCED),
        (
            End(A, 3, 9, silent=True),
            False,
            DRAINED,
            False,
            Manner.LEASE_EXPIRED,
        ),
    ],
)
def test_manner(
    end: End, overdue: bool, condition: Condition, unfinished: bool, manner: Manner
) -> None:
    found = HandOver(end, 0, 0, 9, overdue)
    assert found.manner(condition, unfinished=unfinished) is manner
