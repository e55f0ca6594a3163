"""Goal: windows have the measures of their events, in any order and grouping of the events.

Method: events as services publish them, decoded as Spark decodes them. Values are compared with
values counted by hand; random splits, and repeated or late micro-batches, are compared with the
result over all events at once.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._core.log_buckets import LogBuckets
from batonspark import latency, rollup
from batonspark.rollup_writer import WindowWriter, delete_windows
from batonspark.sink_delta import read_delta
from batonspark.tables import BRONZE, LATENCY, ROLLUP, Warehouse
from tests.spark.metric_events import NOON, assert_same_rows, event, rows

pytestmark = pytest.mark.spark

QUEUE: dict[str, Any] = {"group": "g", "topic": "orders"}
Operation = pb.Latency.Operation


def at(second: int) -> datetime:
    return datetime.fromtimestamp(NOON / 1000 + second, UTC).replace(tzinfo=None)


def latencies(at_ms: int, values: list[int], operation: str = "APPEND") -> pb.MetricEvent:
    first, counts, total = LogBuckets(values).parts()
    sketch = pb.LogBuckets(first_bucket=first, counts=counts, sum=total)
    number = Operation.Value(f"OPERATION_{operation}")
    return event("latency", at_ms, operation=number, us=sketch)


EVENTS = [
    event("appended", 1_000, topic="orders", message_count=100, byte_count=1_000, next_offset=100),
    event("appended", 12_000, topic="orders", queue_id=1, message_count=20, byte_count=200),
    event("delivered", 2_000, **QUEUE, message_count=50, byte_count=500, filtered_count=3,
          redelivered_count=5),
    event("queue_lag", 3_000, **QUEUE, committed_offset=10, delivered_offset=30, next_offset=100,
          acked_beyond_count=5, oldest_unacked_ms=1_500),
    event("queue_lag", 8_000, **QUEUE, committed_offset=50, delivered_offset=50, next_offset=100,
          oldest_unacked_ms=-1),
    event("queue_lag", 9_000, **QUEUE, queue_id=1, committed_offset=5, delivered_offset=9,
          next_offset=20, oldest_unacked_ms=7_000),
    event("committed", 3_000, **QUEUE, committed_offset=10),
    event("committed", 7_000, **QUEUE, committed_offset=50),
    event("committed", 23_000, **QUEUE, committed_offset=90),
    event("handed_over", 4_000, **QUEUE, contend_ms=10, drain_ms=20, fence_ms=1, persist_ms=2),
    event("handed_over", 14_000, **QUEUE, drain_ms=7),
    event("lock_granted", 4_000, **QUEUE, stolen=True, wait_ms=3),
    event("lock_granted", 5_000, **QUEUE, wait_ms=3),
    event("lock_denied", 5_000, **QUEUE, count=4),
    event("lock_denied", 6_000, **QUEUE),
    event("rebalanced", 5_000, group="g", moves=[pb.Rebalanced.QueueMove(to_client_id="c")] * 2),
    event("subscription_refused", 5_500, client_id="c2"),
    event("member_expired", 6_000, group="g", client_id="c"),
    event("handled", 6_000, **QUEUE, message_count=40, failed_count=2),
    event("retried", 6_000, **QUEUE, message_count=2),
]  # fmt: skip


@pytest.fixture(scope="module")
def windows(spark: SparkSession) -> list[dict[str, object]]:
    return [row.asDict() for row in rollup.rollup(rows(spark, EVENTS)).collect()]


def find(windows: list[dict[str, object]], **wanted: object) -> dict[str, object]:
    (row,) = [row for row in windows if all(row[name] == value for name, value in wanted.items())]
    return row


def has(row: dict[str, object], **wanted: object) -> bool:
    return {name: row[name] for name in wanted} == wanted


def test_window_of_ten_seconds_has_the_measures_of_a_queue(
    windows: list[dict[str, object]],
) -> None:
    row = find(
        windows, level="queue", window_s=10, window_start=at(0), consumer_group="g", queue_id=0
    )
    assert has(row, delivered_count=50, delivered_rate=5.0, redelivery_ratio=0.1, filtered_count=3)
    assert has(row, lag=50, lag_max=85, lag_ms=None, lag_ms_max=1_500, in_flight=0)
    assert has(row, lock_grant_count=2, steal_count=1, lock_denial_count=5)
    assert has(row, handled_count=40, failed_count=2, retried_count=2, committed_rate=10.0)
    assert has(row, hand_over_count=1, hand_over_p50_ms=33, hand_over_p99_ms=33)


def test_events_without_a_group_belong_to_the_queue(windows: list[dict[str, object]]) -> None:
    row = find(windows, level="queue", window_s=10, topic="orders", consumer_group=None, queue_id=0)
    assert has(row, appended_count=100, appended_rate=10.0, appended_bytes_rate=100.0, lag=None)


def test_events_without_a_queue_belong_to_the_group(windows: list[dict[str, object]]) -> None:
    row = find(windows, level="queue", window_s=10, consumer_group="g", topic=None)
    assert has(row, rebalance_count=1, moved_queue_count=2, expired_member_count=1, queue_id=None)


def test_minute_of_a_queue_is_the_sum_of_its_ten_second_windows(
    windows: list[dict[str, object]],
) -> None:
    row = find(
        windows, level="queue", window_s=60, window_start=at(0), consumer_group="g", queue_id=0
    )
    assert has(row, delivered_count=50, delivered_rate=50 / 60, committed_rate=4.0, lag=50)
    assert has(row, hand_over_count=2, hand_over_p50_ms=7, hand_over_p95_ms=33)


def test_windows_of_topic_and_group_are_sums_of_their_queues(
    windows: list[dict[str, object]],
) -> None:
    group = find(windows, level="group", window_s=10, window_start=at(0), consumer_group="g")
    assert has(group, lag=65, in_flight=4, lag_max=85, lag_ms=7_000, rebalance_count=1, topic=None)
    topic = find(windows, level="topic", window_s=60, topic="orders")
    assert has(topic, appended_count=120, delivered_count=50, lag=65, consumer_group=None)


def test_columns_are_those_of_the_tables(spark: SparkSession) -> None:
    nothing = rows(spark, EVENTS).where("false")
    assert rollup.rollup(nothing).schema.simpleString() == ROLLUP.schema.simpleString()
    assert latency.latency(nothing).schema.simpleString() == LATENCY.schema.simpleString()


def test_percentiles_are_those_of_the_merged_sketches(spark: SparkSession) -> None:
    random = Random(5)
    parts = [[int(random.lognormvariate(6, 2)) for _ in range(n)] for n in (1, 50, 700)]
    events = [latencies(at_ms, part) for at_ms, part in zip((0, 5_000, 31_000), parts, strict=True)]
    merged = latency.latency(rows(spark, [*events, latencies(1, [], "FSYNC")]))
    by_window = {(row.window_s, row.window_start): row for row in merged.collect()}
    assert len(by_window) == 3
    for key, values in (
        ((10, at(0)), parts[0] + parts[1]),
        ((10, at(30)), parts[2]),
        ((60, at(0)), [*parts[0], *parts[1], *parts[2]]),
    ):
        row, sketch = by_window[key], LogBuckets(values)
        assert (row.first_bucket, row.buckets, row.value_sum) == sketch.parts()
        assert (row["count"], row.mean_us) == (len(values), sum(values) / len(values))
        for name, share in (("p50_us", 0.5), ("p95_us", 0.95), ("p99_us", 0.99)):
            assert row[name] == pytest.approx(sketch.percentile(share))


def test_impossible_numbers_of_an_event_do_not_end_the_query(spark: SparkSession) -> None:
    """Such events come from a faulty program: one must not stop the tables for good."""
    most, operation = (1 << 63) - 1, Operation.OPERATION_FSYNC
    sketches = [
        pb.LogBuckets(first_bucket=first, counts=counts, sum=most)
        for first, counts in (
            (0, [1]),
            ((1 << 31) - 1, [1, 1]),
            (-5, [1]),
            (3, [most]),
            (3, [most]),
        )
    ]
    wrong = [
        *(event("appended", 1_000, topic="t", message_count=most) for _ in range(2)),
        event("queue_lag", 1_000, group="g", topic="t", committed_offset=most, next_offset=-9,
              delivered_offset=-9, acked_beyond_count=most),
        event("committed", 1_000, group="g", topic="t", committed_offset=-most),
        event("committed", 2_000, group="g", topic="t", committed_offset=most),
        *(event("latency", 1_000, operation=operation, us=sketch) for sketch in sketches),
    ]  # fmt: skip
    events = rows(spark, [*wrong, *EVENTS[:1], latencies(1_000, [500, 700])])
    found = [row.asDict() for row in rollup.rollup(events).collect()]
    topics = [find(found, level="topic", window_s=60, topic=name) for name in ("orders", "t")]
    assert [row["appended_count"] for row in topics] == [100, 0]
    by_operation = {
        row.operation: row for row in latency.latency(events).where("window_s = 60").collect()
    }
    assert (by_operation["APPEND"]["count"], by_operation["APPEND"].value_sum) == (2, 1_200)
    assert by_operation["FSYNC"].first_bucket == 0
    assert len(by_operation["FSYNC"].buckets) == 1


def some_events(random: Random, count: int) -> list[pb.MetricEvent]:
    """Return events of a few queues within three minutes, many at the same time."""
    events = []
    for _ in range(count):
        at_ms = random.randrange(180) * 1_000
        queue: dict[str, Any] = {"group": random.choice("gh"), "topic": random.choice("xy"),
                 "queue_id": random.randrange(2)}  # fmt: skip
        n, offset = random.randrange(9), random.randrange(100)
        events.append(random.choice([
            event("delivered", at_ms, **queue, message_count=n, redelivered_count=n // 2),
            event("committed", at_ms, **queue, committed_offset=offset),
            event("queue_lag", at_ms, **queue, committed_offset=offset, delivered_offset=offset + n,
                  next_offset=offset + 50, oldest_unacked_ms=offset * 10),
            event("handed_over", at_ms, **queue, drain_ms=offset),
            event("rebalanced", at_ms, group=queue["group"]),
            latencies(at_ms, [random.randrange(1, 10**6) for _ in range(n)]),
        ]))  # fmt: skip
    return events


@pytest.mark.long
def test_windows_do_not_depend_on_the_split_into_micro_batches(spark: SparkSession) -> None:
    """Twelve splits in one run: each has groups, topics and sources of its own."""
    random, splits, parts = Random(11), 12, 5
    whole = rows(spark, some_events(random, 250))
    named = {
        name: F.concat_ws("/", name, "split")
        for name in ("consumer_group", "topic", "broker", "source")
    }
    lots = spark.range(splits).withColumnRenamed("id", "split")
    part = (F.xxhash64("seq", "split") % parts + parts) % parts
    copies = whole.crossJoin(lots).withColumn("part", part).withColumns(named).persist()
    for module in (rollup, latency):
        pieces = [
            module.fold(module.measures(copies.where(F.col("part") == n))) for n in range(parts)
        ]
        split = module.windows(reduce(DataFrame.unionByName, pieces))
        assert_same_rows(split, module.windows(module.fold(module.measures(copies))))
    copies.unpersist()


@pytest.mark.long
def test_repeated_or_late_micro_batches_do_not_change_the_windows(
    spark: SparkSession, tmp_path: Path
) -> None:
    random = Random(3)
    whole = rows(spark, some_events(random, 120)).persist()
    warehouse = Warehouse(str(tmp_path))
    warehouse.ensure(BRONZE, ROLLUP, LATENCY)
    writer = WindowWriter(warehouse, lambda: "query")
    parts = [whole.where(F.col("seq") % 3 == n) for n in (2, 0, 1)]
    for number in (0, 1, 1, 0, 2):
        writer.write(parts[number], number)
    assert_same_rows(read_delta(spark, warehouse.table(ROLLUP)), rollup.rollup(whole))
    assert_same_rows(read_delta(spark, warehouse.table(LATENCY)), latency.latency(whole))
    whole.unpersist()


@pytest.mark.long
def test_query_without_checkpoint_recomputes_the_windows_of_bronze(
    spark: SparkSession, tmp_path: Path
) -> None:
    warehouse = Warehouse(str(tmp_path))
    warehouse.ensure(BRONZE, ROLLUP, LATENCY)
    old, new = event("delivered", -86_400_000, **QUEUE, message_count=1), EVENTS[2]
    WindowWriter(warehouse, lambda: "first").write(rows(spark, [old, new]), 0)
    events = rows(spark, [new]).withColumn("date", F.to_date("store_time"))
    table = events.write.format("batondelta").option("partitionBy", "date").mode("append")
    table.save(warehouse.table(BRONZE))
    assert delete_windows(warehouse) == {}
    WindowWriter(warehouse, lambda: "second").write(rows(spark, [new]), 0)
    expected = rollup.rollup(rows(spark, [old, new]))
    assert_same_rows(read_delta(spark, warehouse.table(ROLLUP)), expected)
