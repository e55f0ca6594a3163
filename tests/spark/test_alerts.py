"""Goal: events reach the evaluators of their subject, and alert changes reach the tables.

Method: Spark's tester drives the stateful processor without a session, with signals and with
watermarks; the DataFrames around it get events as services publish them.
"""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.tws_tester import TwsTester

from baton.common.v1 import error_pb2
from baton.metrics.v1 import metrics_service_pb2 as pb
from batonspark.alert_rules import ConflictRule, CountRule, LagRule, RuleBook
from batonspark.alert_writer import LABELS, AlertGauges, messages
from batonspark.alerts import CHANGES, SubjectProcessor, alert_rows, signals
from tests.spark.metric_events import NOON, event, rows

BOOK = RuleBook(
    lag=LagRule(samples=3, gone_ms=60_000),
    steals=CountRule(count_max=0, window_ms=30_000),
    subscription_conflict=ConflictRule(clear_ms=20_000),
)
QUEUE: dict[str, Any] = {"group": "g", "topic": "orders", "queue_id": 3}
SUBJECT = "queue|g|orders|broker-0|3"


def signal(kind: str, unix_ms: int, **values: Any) -> Row:
    nothing = dict.fromkeys(
        ("client_id", "reason", "text", "committed_offset", "delivered_offset", "next_offset",
         "oldest_unacked_ms", "silent_ms", "generation", "first_bucket", "buckets")
    )  # fmt: skip
    return Row(kind=kind, unix_ms=unix_ms, acked_beyond_count=0, **{**nothing, **values})


def driver() -> TwsTester:
    processor = SubjectProcessor(BOOK)
    return TwsTester(processor, timeMode="EventTime", eventTimeExtractor=lambda row: row.unix_ms)


def names(rows: Any) -> list[tuple[str, str, int]]:
    return [(row.state, row.rule, row.unix_ms) for row in rows]


def test_signals_of_a_micro_batch_are_processed_in_time_order() -> None:
    lag = {"committed_offset": 5, "delivered_offset": 9, "next_offset": 50}
    late_first = [signal("queue_lag", at, **lag) for at in (30_000, 10_000, 20_000)]
    (row,) = driver().test(SUBJECT, late_first)
    assert (row.subject, row.state, row.detail, row.unix_ms) == (
        SUBJECT,
        "FIRING",
        "stalled",
        30_000,
    )


def test_watermark_resolves_due_alerts_and_removes_the_state() -> None:
    driven = driver()
    rows = driven.test("group|g", [signal("lock_granted", 1_000)])
    rows += driven.test("group|g", [signal("subscription_refused", 5_000, client_id="c2")])
    assert names(rows) == [
        ("FIRING", "steals", 1_000),
        ("FIRING", "subscription_conflict", 5_000),
    ]
    assert driven.setWatermark(24_999) == []
    assert names(driven.setWatermark(25_000)) == [("RESOLVED", "subscription_conflict", 25_000)]
    assert names(driven.setWatermark(99_000)) == [("RESOLVED", "steals", 32_000)]
    assert driven.peekValueState("subject", "group|g") is None


def test_subjects_are_independent() -> None:
    driven = driver()
    assert driven.test("group|g", [signal("lock_granted", 1_000)])
    assert driven.test("group|h", [signal("lock_granted", 1_000)])
    assert driven.peekValueState("subject", "group|i") is None


def test_subject_without_state_stores_none() -> None:
    driven = driver()
    assert driven.test("group|g", [signal("member_seen", 1_000, client_id="c")]) == []
    assert driven.peekValueState("subject", "group|g") is None


@pytest.mark.spark
def test_events_become_signals_of_their_subjects(spark: SparkSession) -> None:
    conflict = [error_pb2.SubscriptionDifference(topic="orders", setting="expression")]
    append, pull = pb.Latency.OPERATION_APPEND, pb.Latency.OPERATION_PULL
    sketch = pb.LogBuckets(first_bucket=4, counts=[1, 2], sum=9)
    events = [
        event("queue_lag", 1_000, **QUEUE, committed_offset=5, delivered_offset=9, next_offset=50,
              acked_beyond_count=2, oldest_unacked_ms=70),
        event("stuck_changed", 2_000, **QUEUE, reason="HELD", message="c1 has it"),
        event("lock_granted", 3_000, **QUEUE, stolen=True),
        event("lock_granted", 3_000, **QUEUE),
        event("delivered", 3_000, **QUEUE, message_count=4),
        event("subscription_refused", 4_000, client_id="c2", differences=conflict),
        event("member_expired", 5_000, group="g", client_id="c", silent_ms=31_000),
        event("latency", 6_000, operation=append, us=sketch),
        event("latency", 6_000, operation=pull, us=sketch),
    ]  # fmt: skip
    events[5].subscription_refused.group = "g"
    by_subject = {
        (row.subject, row.kind): row for row in signals(rows(spark, events), BOOK).collect()
    }
    assert sorted(by_subject) == [
        ("group|g", "lock_granted"),
        ("group|g", "member_expired"),
        ("group|g", "subscription_refused"),
        ("latency|storage/broker-0|APPEND", "latency"),
        (SUBJECT, "queue_lag"),
        (SUBJECT, "stuck_changed"),
    ]
    lag = by_subject[SUBJECT, "queue_lag"]
    assert (lag.unix_ms, lag.acked_beyond_count, lag.oldest_unacked_ms) == (NOON + 1_000, 2, 70)
    assert by_subject[SUBJECT, "stuck_changed"].text == "c1 has it"
    assert '"setting": "expression"' in by_subject["group|g", "subscription_refused"].text
    assert by_subject["group|g", "member_expired"].silent_ms == 31_000
    assert by_subject["latency|storage/broker-0|APPEND", "latency"].buckets == [1, 2]


@pytest.mark.spark
def test_event_without_valid_names_or_buckets_is_no_signal(spark: SparkSession) -> None:
    operation = pb.Latency.OPERATION_APPEND
    no_end = pb.LogBuckets(first_bucket=(1 << 31) - 1, counts=[1, 1])
    events = [
        event("queue_lag", 1_000, topic="orders"),
        event("queue_lag", 1_000, group="g|h", topic="orders"),
        event("stuck_changed", 1_000, group="g"),
        event("rebalanced", 1_000, group="g|h"),
        event("latency", 1_000, operation=operation, us=no_end),
        event("latency", 1_000, operation=operation),
    ]
    events[2].queue.queue.queue_id = 3
    assert signals(rows(spark, events), BOOK).collect() == []


@pytest.mark.spark
def test_events_published_late_keep_their_order_and_are_not_dropped(spark: SparkSession) -> None:
    happened = [-90_000, -30_000, -4_000, 0, 90_000]
    late_events = rows(spark, [event("queue_lag", at, **QUEUE) for at in happened])
    late_events = late_events.withColumn("store_time", F.timestamp_millis(F.lit(NOON)))
    collected = signals(late_events, BOOK).collect()
    assert [row.unix_ms - NOON for row in collected] == [-10_000, -10_000, -4_000, 0, 10_000]
    assert {row["at"].microsecond for row in collected} == {0}


@pytest.mark.spark
def test_alert_change_becomes_an_alert_row_and_a_message(spark: SparkSession) -> None:
    change = (SUBJECT, "lag", "warning", "FIRING", "stalled", NOON, NOON + 5, "text", "", 9.0, 0.0)
    slow = ("latency|client/a|b|SEND", "latency_SEND_p99", *change[2:])
    both = alert_rows(spark.createDataFrame([change, slow], CHANGES)).collect()
    assert [(row.source, row.operation) for row in both] == [(None, None), ("client/a|b", "SEND")]
    alerts = alert_rows(spark.createDataFrame([change], CHANGES))
    (alert,) = alerts.collect()
    assert alert.alert_id == f"lag|{SUBJECT}|stalled|{NOON}"
    place = (alert.consumer_group, alert.topic, alert.broker, alert.queue_id)
    assert place == ("g", "orders", "broker-0", 3)
    (message,) = messages(alerts).collect()
    assert (message.key, message.tag) == (alert.alert_id, "FIRING")
    assert message.properties == {
        "rule": "lag", "severity": "warning", "consumer_group": "g", "topic": "orders"
    }  # fmt: skip
    assert '"summary":"text"' in message.body


def test_gauge_exists_while_the_alert_fires() -> None:
    registry = CollectorRegistry()
    gauges = AlertGauges(registry)
    labels = dict.fromkeys(
        ("rule", "severity", "detail", "topic", "broker", "queue_id", "source", "operation"), ""
    )
    labels |= {"rule": "steals", "consumer_group": "g"}
    alert = {name: value or None for name, value in labels.items()}
    gauges.set([{**alert, "state": "FIRING"}])
    assert registry.get_sample_value("baton_alert", labels) == 1
    gauges.set([{**alert, "state": "RESOLVED"}])
    assert registry.get_sample_value("baton_alert", labels) is None
    gauges.set([{**alert, "state": "RESOLVED"}])


def test_gauge_ends_with_its_alert_although_the_severity_of_the_rule_has_changed() -> None:
    """A rule that is disabled resolves its alerts with the severity `info`."""
    registry = CollectorRegistry()
    gauges = AlertGauges(registry)
    alert: dict[str, str | None] = {**dict.fromkeys(LABELS), "rule": "steals"}
    gauges.set([{**alert, "severity": "critical", "state": "FIRING", "consumer_group": "g"}])
    gauges.set([{**alert, "severity": "critical", "state": "FIRING", "consumer_group": "h"}])
    gauges.set([{**alert, "severity": "info", "state": "RESOLVED", "consumer_group": "g"}])
    (metric,) = registry.collect()
    assert [one.labels["consumer_group"] for one in metric.samples] == ["h"]
