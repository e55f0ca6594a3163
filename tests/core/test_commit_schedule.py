"""Goal: all queues are committed regularly, and often while a handler hangs, whatever else happens.

Method: the schedule alone, with times of the test.
"""

from __future__ import annotations

from collections.abc import Iterable

from batonmq._core.commit_schedule import LONG_CALL_COMMIT_MS, CommitSchedule

INTERVAL_MS = 5_000


def due_times(
    times: Iterable[int], *, running: bool = False, long_from_ms: int | None = None
) -> list[int]:
    """Return the times of the calls, of those at `times`, that commit all queues."""
    schedule = CommitSchedule(INTERVAL_MS, 0)

    def is_due(now_ms: int) -> bool:
        def runs_long() -> bool:
            return long_from_ms is not None and now_ms >= long_from_ms

        return schedule.is_due(now_ms, running=running, runs_long=runs_long)

    return [now_ms for now_ms in times if is_due(now_ms)]


def test_all_queues_are_committed_at_each_interval() -> None:
    assert due_times(range(0, 16_000, 1_000)) == [5_000, 10_000, 15_000]


def test_commits_in_between_delay_no_regular_one() -> None:
    assert due_times(range(0, 11_000, 2)) == [5_000, 10_000]
    assert due_times(range(0, 11_000, 2), running=True) == [5_000, 10_000]


def test_late_call_moves_the_next_commit() -> None:
    assert due_times([4_999, 7_000, 11_999, 12_000]) == [7_000, 12_000]


def test_all_queues_are_committed_often_while_a_handler_runs_long() -> None:
    often = due_times(range(0, 4_000, 2), running=True, long_from_ms=2_100)
    assert often == [2_500, 3_000, 3_500]


def test_handlers_are_looked_at_twice_a_second_at_most() -> None:
    schedule, looks = CommitSchedule(60_000, 0), 0

    def runs_long() -> bool:
        nonlocal looks
        looks += 1
        return False

    for now_ms in range(0, 3_000, 2):
        schedule.is_due(now_ms, running=True, runs_long=runs_long)
    assert looks == 5


def test_wait_ends_with_the_next_look() -> None:
    schedule = CommitSchedule(INTERVAL_MS, 0)
    assert schedule.wait_ms(100, running=False) == 4_900
    assert schedule.wait_ms(100, running=True) == LONG_CALL_COMMIT_MS - 100
    assert schedule.wait_ms(7_000, running=True) == 0
    schedule.is_due(4_800, running=True, runs_long=lambda: False)
    assert schedule.wait_ms(4_800, running=True) == 200
