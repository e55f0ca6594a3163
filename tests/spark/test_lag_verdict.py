"""Goal: the verdict on a queue follows Burrow's rules and the known stuck reason.

Method: windows of hand-made samples, one for each rule and each border; no Spark.
"""

from __future__ import annotations

import pytest

from batonspark.lag_verdict import LagLimits, LagSample, LagVerdict, judge

LIMITS = LagLimits(samples=4, lag_min=1, age_ms_max=60_000)


def window(
    committed: list[int], lag: list[int], delivered: list[int] | None = None, age_ms: int = 5_000
) -> list[LagSample]:
    return [
        LagSample(10_000 * n, at, (delivered or committed)[n], behind, age_ms if behind else 0)
        for n, (at, behind) in enumerate(zip(committed, lag, strict=True))
    ]


def test_any_sample_without_lag_is_ok() -> None:
    assert judge(window([5, 5, 5, 5], [9, 9, 0, 9]), "HELD", LIMITS) is LagVerdict.OK


def test_lag_below_the_minimum_counts_as_none() -> None:
    samples = window([5, 5, 5, 5], [9, 9, 9, 9])
    assert judge(samples, "", LagLimits(4, 10, 0)) is LagVerdict.OK
    assert judge(samples, "", LagLimits(4, 9, 0)) is not LagVerdict.OK


def test_incomplete_window_is_ok() -> None:
    assert judge(window([5, 5, 5], [9, 9, 9]), "", LIMITS) is LagVerdict.OK
    assert judge([], "", LIMITS) is LagVerdict.OK


def test_shrinking_lag_is_ok_however_large() -> None:
    samples = window([10, 20, 30, 40], [10**9, 10**9 - 1, 10**9 - 2, 10**9 - 3])
    assert judge(samples, "", LIMITS) is LagVerdict.OK


def test_progress_with_growing_lag_is_slow() -> None:
    assert judge(window([1, 2, 3, 4], [5, 6, 6, 7]), "", LIMITS) is LagVerdict.SLOW


def test_one_shrink_in_the_window_is_not_slow() -> None:
    assert judge(window([1, 2, 3, 4], [5, 9, 8, 20]), "", LIMITS) is LagVerdict.OK


def test_old_messages_are_slow_although_the_lag_shrinks() -> None:
    samples = window([1, 2, 3, 4], [9, 8, 7, 6], age_ms=60_001)
    assert judge(samples, "", LIMITS) is LagVerdict.SLOW
    assert judge(samples, "", LagLimits(4, 1, 0)) is LagVerdict.OK


def test_messages_in_flight_and_no_progress_is_stalled() -> None:
    assert judge(window([5] * 4, [9] * 4, [8] * 4), "", LIMITS) is LagVerdict.STALLED


def test_nothing_delivered_and_no_progress_is_stopped() -> None:
    assert judge(window([5] * 4, [9] * 4), "", LIMITS) is LagVerdict.STOPPED


def test_acks_beyond_the_committed_offset_are_progress() -> None:
    assert judge(window([5] * 4, [9, 7, 5, 3], [14] * 4), "HEAD_OF_LINE", LIMITS) is LagVerdict.OK


@pytest.mark.parametrize(
    ("reason", "verdict"),
    [
        ("NO_MEMBER", LagVerdict.NO_MEMBER),
        ("HEAD_OF_LINE", LagVerdict.STALLED),
        ("NOT_PULLING", LagVerdict.STOPPED),
        ("OUTDATED_NODE", LagVerdict.STOPPED),
        ("PAUSED", LagVerdict.BLOCKED),
        ("REFUSED_SUBSCRIPTION", LagVerdict.BLOCKED),
        ("A_REASON_OF_TOMORROW", LagVerdict.BLOCKED),
        ("MOVING", LagVerdict.STOPPED),
    ],
)
def test_stuck_reason_decides_for_a_queue_without_progress(
    reason: str, verdict: LagVerdict
) -> None:
    assert judge(window([5] * 4, [9] * 4), reason, LIMITS) is verdict


def test_stuck_reason_is_ignored_while_progress_advances() -> None:
    assert judge(window([1, 2, 3, 4], [9, 8, 7, 6]), "NO_MEMBER", LIMITS) is LagVerdict.OK


def test_progress_that_goes_back_is_rewound_at_once() -> None:
    assert judge(window([5, 4], [0, 1]), "", LIMITS) is LagVerdict.REWOUND
