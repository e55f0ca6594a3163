"""Goal: growth, disk usage and skew follow from the events; more queues are suggested only where
too few are known.

Method: events as services tell them, of topics with known rates; values are counted by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonspark.capacity import forecast
from batonspark.reports import ReportScope
from tests.spark.metric_events import event, rows

pytestmark = pytest.mark.spark

GB = 10**9
ORDERS: dict[str, Any] = {"group": "g", "topic": "orders"}


def appended(second: int, topic: str, queue_id: int, count: int) -> pb.MetricEvent:
    return event(
        "appended", second * 1000, topic=topic, queue_id=queue_id, message_count=count,
        byte_count=100 * count,
    )  # fmt: skip


def volume(second: int, used: int, free: int) -> pb.MetricEvent:
    return event("volume_state", second * 1000, used_bytes=used, free_bytes=free)


EVENTS = [
    volume(0, 10 * GB, 90 * GB),
    volume(50, 11 * GB, 89 * GB),
    volume(100, 12 * GB, 88 * GB),
    # 100 s: queue 0 gets nine times what the others get, in one peak of 10 s
    appended(5, "orders", 0, 9_000),
    appended(6, "orders", 1, 1_000),
    appended(55, "orders", 2, 1_000),
    appended(56, "orders", 3, 1_000),
    # a queue 5,000 messages behind is delivered at 200 a second, a queue without lag at 300
    event("queue_lag", 8_000, **ORDERS, committed_offset=0, next_offset=5_000),
    event("delivered", 7_000, **ORDERS, token=1, message_count=2_000),
    event("delivered", 7_000, **ORDERS, queue_id=1, token=1, message_count=3_000),
    # a topic with enough queues, and a group with more members than queues
    appended(5, "users", 0, 100),
    event("delivered", 7_000, group="h", topic="users", token=1, message_count=100),
    event("rebalanced", 3_000, group="h", generation=1, member_count=2, queue_count=1),
    event("rebalanced", 4_000, group="h", generation=2, member_count=3, queue_count=1),
    # a system topic
    appended(5, "BATON_SYS_ALERTS", 0, 100),
]


def test_forecast_says_when_disks_are_full_and_which_topics_need_more_queues(
    spark: SparkSession,
) -> None:
    report = forecast(rows(spark, EVENTS), ReportScope())
    (disk,) = report.summary["volumes"]
    assert disk["growth_rate"] == pytest.approx(2 * GB / 100)
    assert disk["hours_until_full"] == pytest.approx(88 / 0.02 / 3600)
    orders, users = report.summary["topics"]
    assert (orders["topic"], users["topic"]) == ("orders", "users")
    assert (orders["message_count"], orders["message_rate"]) == (12_000, 120.0)
    assert (orders["peak_rate"], orders["queue_rate"]) == (1_000.0, 200.0)
    assert (orders["queue_count"], orders["suggested_queues"]) == (4, 8)
    assert (orders["hottest_queue_id"], orders["skew"]) == (0, 3.0)
    assert (users["queue_rate"], users["queue_count"], users["suggested_queues"]) == (None, 1, 3)
    assert "  hot queue broker-0/0: 3.0 times the mean; look at its keys" in report.lines
    assert "  1 queues, suggested 3: a group has 3 members" in report.lines
    queues = {(one.topic, one.queue_id): one for one in report.rows.collect()}
    assert queues["orders", 0].share == pytest.approx(0.75)
    assert queues["orders", 0].peak_rate == 900.0
    assert len(queues) == 5


def test_disk_without_growth_is_never_full(spark: SparkSession) -> None:
    events = [volume(0, 12 * GB, 88 * GB), volume(50, 11 * GB, 89 * GB)]
    report = forecast(rows(spark, events), ReportScope())
    assert report.summary["volumes"][0]["hours_until_full"] is None
    assert report.summary["topics"] == []
    assert report.lines[0].endswith("does not grow")
