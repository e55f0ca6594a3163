"""Goal: every rule fires when it should, once, and is resolved when it should be.

Method: the state machines get hand-made signals in event time; between any two signals their state
is stored and read back. No Spark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonspark.alert_changes import AlertState, Signal
from batonspark.alert_rules import (
    ConflictRule,
    CountRule,
    LagRule,
    LatencyRule,
    RuleBook,
    SilenceRule,
)
from batonspark.alert_subject import Alert, AlertSubject

QUEUE = "queue|g|orders|broker-0|0"
GROUP = "group|g"
APPENDS = "latency|storage/broker-0|APPEND"
BOOK = RuleBook(
    lag=LagRule(samples=3, clear_samples=2, gone_ms=60_000),
    rebalance_storm=CountRule(count_max=2, window_ms=30_000),
    steals=CountRule(count_max=0, window_ms=30_000),
    subscription_conflict=ConflictRule(clear_ms=20_000, severity="critical"),
    silent_client=SilenceRule(forget_ms=100_000, clients_max=2),
    latency=(LatencyRule(operation="APPEND", limit_ms=10, window_ms=30_000, count_min=10),),
)
AlertChanges = list[tuple[str, str, str, int]]


def alerts_of(
    key: str, signals: Iterable[Signal], until_ms: int = 0, book: RuleBook = BOOK
) -> AlertChanges:
    """Return (state, rule, detail, time) of all alerts; store the subject after each signal."""
    changes: AlertChanges = []
    stored = ""
    for signal in signals:
        subject = AlertSubject(key, book, stored)
        changes += [change_of(alert) for alert in subject.feed([signal])]
        stored = subject.stored
    subject = AlertSubject(key, book, stored)
    return changes + [change_of(alert) for alert in subject.advance(until_ms)]


def change_of(alert: Alert) -> tuple[str, str, str, int]:
    change = alert.change
    return str(change.state), alert.rule, str(change.detail), change.unix_ms


def lag(unix_ms: int, committed: int, next_offset: int, **more: int) -> Signal:
    values: dict[str, Any] = {"delivered_offset": committed, "oldest_unacked_ms": 1_000, **more}
    return Signal(
        "queue_lag", unix_ms, committed_offset=committed, next_offset=next_offset, **values
    )


def standing(count: int, since_ms: int = 0) -> list[Signal]:
    return [lag(since_ms + 10_000 * n, 5, 100) for n in range(1, count + 1)]


def test_queue_without_progress_fires_once_and_is_resolved_after_two_ok_samples() -> None:
    good = [lag(60_000, 50, 100), lag(70_000, 100, 100), lag(80_000, 100, 100)]
    assert alerts_of(QUEUE, standing(5) + good) == [
        ("FIRING", "lag", "stopped", 30_000),
        ("RESOLVED", "lag", "stopped", 70_000),
    ]


def test_changed_verdict_resolves_one_alert_and_fires_another() -> None:
    reason = Signal("stuck_changed", 45_000, reason="NO_MEMBER", text="the group has no member")
    assert alerts_of(QUEUE, [*standing(4), reason, *standing(1, 40_000)]) == [
        ("FIRING", "lag", "stopped", 30_000),
        ("RESOLVED", "lag", "stopped", 50_000),
        ("FIRING", "lag", "no_member", 50_000),
    ]


def test_alert_of_a_blocked_queue_describes_the_reason() -> None:
    reason = Signal("stuck_changed", 1, reason="HELD", text="c1 still owns it")
    subject = AlertSubject(QUEUE, BOOK)
    (alert,) = subject.feed([reason, *standing(3)])
    assert (alert.change.detail, alert.change.reason) == ("blocked", "HELD")
    assert alert.change.summary == "blocked: 95 messages wait, the oldest for 1 s; c1 still owns it"
    assert alert.change.value == 95


def test_paused_group_raises_no_alert() -> None:
    assert alerts_of(QUEUE, [Signal("stuck_changed", 1, reason="PAUSED"), *standing(9)]) == []


def test_progress_that_goes_back_fires_unless_an_operator_reset_it() -> None:
    before, after = lag(10_000, 50, 60), lag(20_000, 10, 60)
    assert alerts_of(QUEUE, [before, after]) == [("FIRING", "lag", "rewound", 20_000)]
    assert alerts_of(QUEUE, [before, Signal("progress_reset", 15_000), after]) == []


def test_repeated_or_late_sample_counts_once() -> None:
    first, second, third = standing(3)
    assert alerts_of(QUEUE, [first, second, second, first]) == []
    assert len(alerts_of(QUEUE, [first, second, second, third])) == 1


def test_queue_without_samples_is_resolved_and_forgotten() -> None:
    subject = AlertSubject(QUEUE, BOOK)
    list(subject.feed(standing(3)))
    assert subject.wake_unix_ms == 90_000
    (alert,) = subject.advance(500_000)
    assert (alert.change.state, alert.change.reason) == (AlertState.RESOLVED, "GONE")
    assert alert.change.unix_ms == 90_000
    assert subject.wake_unix_ms is None


def test_rebalances_fire_above_the_limit_and_are_resolved_as_they_leave_the_window() -> None:
    storm = [Signal("rebalanced", at) for at in (1_000, 5_000, 9_000)]
    assert alerts_of(GROUP, storm[:2], 200_000) == []
    assert alerts_of(GROUP, storm, 200_000) == [
        ("FIRING", "rebalance_storm", "", 9_000),
        ("RESOLVED", "rebalance_storm", "", 32_000),
    ]


def test_rebalance_in_several_events_counts_once() -> None:
    parts = [Signal("rebalanced", at, generation=at) for at in (1_000, 5_000) for _ in range(6)]
    assert alerts_of(GROUP, parts, 200_000) == []


def test_clock_subject_only_advances_the_time() -> None:
    subject = AlertSubject("clock|storage/broker-0", BOOK)
    assert list(subject.feed([Signal("volume_state", 1_000)])) == []
    assert subject.wake_unix_ms is None


def test_one_takeover_fires() -> None:
    assert alerts_of(GROUP, [Signal("lock_granted", 1_000)], 40_000) == [
        ("FIRING", "steals", "", 1_000),
        ("RESOLVED", "steals", "", 32_000),
    ]


def test_conflict_is_resolved_after_a_time_without_another() -> None:
    refused = [Signal("subscription_refused", at, client_id="c2") for at in (0, 15_000, 30_000)]
    assert alerts_of(GROUP, refused, 60_000) == [
        ("FIRING", "subscription_conflict", "", 0),
        ("RESOLVED", "subscription_conflict", "", 50_000),
    ]


def test_changed_subscription_is_a_conflict_only_with_differences() -> None:
    assert alerts_of(GROUP, [Signal("subscription_changed", 0)], 99_000) == []
    names = ("topic", "setting", "newcomer_value", "member_client_id", "member_value")
    text = json.dumps([dict(zip(names, ("orders", "expression", "eu", "c1", ""), strict=True))])
    (alert,) = AlertSubject(GROUP, BOOK).feed(
        [Signal("subscription_changed", 0, client_id="c2", text=text)]
    )
    assert (alert.rule, alert.severity) == ("subscription_conflict", "critical")
    words = "c2 has a different subscription: orders: expression eu, c1 has nothing"
    assert alert.change.summary == words


def test_expired_member_fires_until_it_rejoins() -> None:
    signals = [
        Signal("member_seen", 1_000, client_id="c1"),
        Signal("member_expired", 40_000, client_id="c1", silent_ms=30_000),
        Signal("member_seen", 55_000, client_id="c1"),
    ]
    assert alerts_of(GROUP, signals, 900_000) == [
        ("FIRING", "silent_client", "c1", 40_000),
        ("RESOLVED", "silent_client", "c1", 55_000),
    ]


def test_expired_members_are_forgotten_after_a_time_and_bounded_in_number() -> None:
    gone = [Signal("member_expired", n, client_id=f"c{n}") for n in range(5)]
    assert alerts_of(GROUP, gone, 900_000) == [
        ("FIRING", "silent_client", "c0", 0),
        ("FIRING", "silent_client", "c1", 1),
        ("RESOLVED", "silent_client", "c0", 100_000),
        ("RESOLVED", "silent_client", "c1", 100_001),
    ]


def test_slow_operation_fires_by_its_percentile_over_the_window() -> None:
    def took(at: int, bucket: int, count: int) -> Signal:
        return Signal("latency", at, first_bucket=bucket, buckets=[count])

    quick, slow = 64, 120  # 256 us and 32 ms
    signals = [took(1_000, quick, 995), took(2_000, slow, 5), took(3_000, slow, 20)]
    assert alerts_of(APPENDS, signals, 90_000) == [
        ("FIRING", "latency_APPEND_p99", "", 3_000),
        ("RESOLVED", "latency_APPEND_p99", "", 34_000),
    ]
    assert alerts_of(APPENDS, [took(1_000, slow, 9)]) == []


def test_disabled_rule_resolves_its_alerts() -> None:
    subject = AlertSubject(GROUP, BOOK)
    list(subject.feed([Signal("lock_granted", 1_000)]))
    book = BOOK.model_copy(update={"steals": CountRule(enabled=False, count_max=0)})
    (alert,) = AlertSubject(GROUP, book, subject.stored).advance(2_000)
    assert (alert.rule, alert.change.state, alert.change.reason) == (
        "steals",
        "RESOLVED",
        "RULE_OFF",
    )


def test_subject_without_state_needs_no_timer() -> None:
    subject = AlertSubject(GROUP, BOOK)
    assert list(subject.feed([Signal("member_seen", 1, client_id="c")])) == []
    assert subject.wake_unix_ms is None


def test_state_of_another_version_is_rejected() -> None:
    with pytest.raises(ValueError, match="version 9"):
        AlertSubject(GROUP, BOOK, '{"version": 9, "watches": {}}')


KINDS = st.sampled_from(
    ["rebalanced", "lock_granted", "subscription_refused", "member_expired", "member_seen"]
)
TIMED = st.lists(st.tuples(st.integers(0, 200_000), KINDS), max_size=40).map(sorted)


@given(TIMED, st.sets(st.integers(0, 40)), st.sets(st.integers(0, 300_000), max_size=5))
def test_alerts_do_not_depend_on_the_grouping_of_signals_and_timers(
    timed: list[tuple[int, str]], cuts: set[int], timers: set[int]
) -> None:
    signals = [Signal(kind, at, client_id="c") for at, kind in timed]
    whole = AlertSubject(GROUP, BOOK)
    expected = [*whole.feed(signals), *whole.advance(10**6)]
    subject = AlertSubject(GROUP, BOOK)
    alerts: list[Alert] = []
    for place, signal in enumerate(signals):
        for timer in sorted(at for at in timers if at < signal.unix_ms):
            alerts += subject.advance(timer)
        alerts += subject.feed([signal])
        if place in cuts:
            subject = AlertSubject(GROUP, BOOK, subject.stored)
    alerts += subject.advance(10**6)
    assert alerts == expected
    ids = [(a.rule, a.change.detail, a.change.since_unix_ms, a.change.state) for a in alerts]
    assert len(ids) == len(set(ids))
