"""Goal: a trigger is understood to the letter or refused, and the demand of a group never asks for
members that can own nothing.

Method: the rules get metadata and diagnoses; the boundaries are tried.
"""

from __future__ import annotations

from typing import Any

import pytest

from batonmq._core.retries import retry_topic
from batonmq.admin.group_reports import QueueDiagnosis
from batonmq.errors import BatonError, InvalidArgument, InvalidName, Unreachable
from batonmq_server.nameserver.core.diagnosis import StuckReason
from batonmq_server.scaler.core.demand import NO_HELP, NOTHING_TO_DO, demand_of
from batonmq_server.scaler.core.trigger import (
    ENTRIES_MAX,
    LagMetric,
    Trigger,
    metric_of,
    trigger_of,
)

BY_SECONDS = {"group": "billing", "lagSeconds": "30"}
SECONDS, MESSAGES = LagMetric.SECONDS, LagMetric.MESSAGES
TRIGGER = Trigger("billing", {SECONDS: 30.0, MESSAGES: 100.0})


def queue(
    number: int, lag: int | None, seconds: float | None, reason: str = "MOVING", **changed: Any
) -> QueueDiagnosis:
    values: dict[str, Any] = {
        "group": "billing",
        "topic": "orders",
        "broker": "broker-a",
        "queue_id": number,
        "reason": reason,
        "message": f"because {reason}",
        "remedy": "",
        "evidence": {},
        "lag": lag,
        "lag_ms": None if seconds is None else round(seconds * 1000),
        "committed_offset": 0,
        "log_end_offset": 0,
        "client_id": None,
        "unmoved_ms": 0,
    }
    return QueueDiagnosis(**values | changed)


def test_trigger_has_the_metrics_with_a_target() -> None:
    keda = {"scalerAddress": "scaler.baton:9879", "enableTLS": "true"}
    assert trigger_of(BY_SECONDS | keda) == Trigger("billing", {SECONDS: 30.0})
    both = BY_SECONDS | {"lagMessages": "0.5", "activationLagMessages": "7"}
    assert trigger_of(both) == Trigger("billing", {SECONDS: 30.0, MESSAGES: 0.5}, 7)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({}, "group is missing"),
        ({"group": "billing"}, "has no target"),
        (BY_SECONDS | {"lagSecond": "1"}, "unknown entry 'lagSecond'"),
        (BY_SECONDS | {"lagSeconds": "0"}, "lagSeconds is 0"),
        (BY_SECONDS | {"lagMessages": "0.000"}, "lagMessages is 0"),
        (BY_SECONDS | {"activationLagMessages": "-1"}, "activationLagMessages is '-1'"),
        (BY_SECONDS | {str(number): "" for number in range(ENTRIES_MAX)}, "has 34 entries"),
        *(
            (BY_SECONDS | {"lagSeconds": text}, "lagSeconds is ")
            for text in (
                "",
                " 1",
                "1 ",
                "+1",
                "-1",
                "1e3",
                "nan",
                "inf",
                "1_0",
                "٣",
                "0x1",
                "1.0000",
            )
        ),
        (BY_SECONDS | {"lagSeconds": "9" * 10}, "lagSeconds is '9999999999'"),
    ],
)
def test_invalid_metadata_are_refused_with_the_entry(metadata: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        trigger_of(metadata)
    assert named in refused.value.message


@pytest.mark.parametrize("group", ["a b", "x" * 128, "../etc", "group:*", "ü", "a\n"])
def test_invalid_group_is_refused(group: str) -> None:
    with pytest.raises(InvalidName):
        trigger_of(BY_SECONDS | {"group": group})


def test_error_shows_only_the_beginning_of_a_value() -> None:
    for metadata in ({"lagSeconds": "9" * 100_000}, {"x" * 100_000: ""}):
        with pytest.raises(BatonError) as refused:
            trigger_of(BY_SECONDS | metadata)
        assert len(refused.value.message) < 200


def test_metric_without_a_target_is_refused() -> None:
    assert metric_of(TRIGGER, "lag-messages") is MESSAGES
    for name in ("lag-messages", "s0-lag-seconds", ""):
        with pytest.raises(InvalidArgument, match="metricName"):
            metric_of(Trigger("billing", {SECONDS: 1.0}), name)


def test_value_is_the_oldest_age_and_the_sum_of_messages() -> None:
    demand = demand_of("billing", [queue(0, 50, 3), queue(1, 70, 45), queue(2, 0, 0, "IDLE")])
    assert demand.active(TRIGGER)
    assert demand.value(TRIGGER, SECONDS) == 45
    assert demand.value(TRIGGER, MESSAGES) == 120


def test_group_without_lag_or_queue_has_nothing_to_do() -> None:
    for queues in ([], [queue(0, 0, 0, "IDLE"), queue(1, 0, 0, "IDLE")]):
        demand = demand_of("billing", queues)
        assert not demand.active(TRIGGER)
        assert (demand.value(TRIGGER, SECONDS), demand.value(TRIGGER, MESSAGES)) == (0, 0)


def test_lag_up_to_the_activation_needs_no_member() -> None:
    trigger = Trigger("billing", {SECONDS: 30.0}, activation_messages=10)
    assert not demand_of("billing", [queue(0, 10, 60)]).active(trigger)
    assert demand_of("billing", [queue(0, 11, 60)]).active(trigger)


def test_value_never_asks_for_more_members_than_queues() -> None:
    """KEDA divides the value by the target. A retry topic adds no member."""
    retries = queue(0, 9_000, 86_400, topic=retry_topic("billing"))
    demand = demand_of("billing", [queue(0, 10**9, 86_400), queue(1, 0, 0, "IDLE"), retries])
    assert demand.queue_count == 2
    assert demand.value(TRIGGER, SECONDS) == 2 * 30
    assert demand.value(TRIGGER, MESSAGES) == 2 * 100


def test_every_reason_of_the_nameserver_is_decided() -> None:
    reasons = {reason.value for reason in StuckReason}
    assert reasons >= NOTHING_TO_DO
    assert reasons >= NO_HELP
    for reason in reasons:
        demand = demand_of("billing", [queue(0, 50, 40, reason)])
        assert demand.active(TRIGGER) == (reason not in NOTHING_TO_DO)
        helped = reason not in NOTHING_TO_DO | NO_HELP
        assert demand.value(TRIGGER, MESSAGES) == (50 if helped else 0), reason


def test_paused_group_needs_no_member_and_says_so() -> None:
    demand = demand_of("billing", [queue(0, 50, 40, "PAUSED"), queue(1, 50, 40, "PAUSED")])
    assert not demand.active(TRIGGER)
    assert demand.stuck_counts == {"PAUSED": 2}
    assert demand.stuck["PAUSED"].message == "because PAUSED"


def test_stuck_queue_keeps_its_member_and_is_named() -> None:
    queues = [queue(0, 50, 4_000, "DATA_LOSS"), queue(1, 5, 1)]
    demand = demand_of("billing", queues)
    assert demand.active(TRIGGER)
    assert demand.value(TRIGGER, SECONDS) == 1, "a further member can't read the damaged batch"
    assert demand.stuck_counts == {"DATA_LOSS": 1}


@pytest.mark.parametrize(("lag", "seconds"), [(None, 1.0), (1, None)])
def test_unknown_lag_is_an_error_and_no_zero(lag: int | None, seconds: float | None) -> None:
    queues = [queue(0, 5, 1), queue(1, lag, seconds, "STORAGE_UNREACHABLE")]
    with pytest.raises(Unreachable) as unknown:
        demand_of("billing", queues)
    assert "orders/broker-a/1: STORAGE_UNREACHABLE: because" in unknown.value.message
