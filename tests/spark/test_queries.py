"""Goal: published events are in the tables once, are added up, and raise their alerts.

Method: a real cluster, whose metrics topic gets further batches, some of them twice; the queries
run until they have read everything, are restarted, and lose their checkpoints.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event

import deltalake
import numpy as np
import pyarrow as pa
import pytest
from prometheus_client import CollectorRegistry
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._core.queues import QueueRef
from batonmq._process.config import load
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonspark import rollup
from batonspark.alert_writer import AlertGauges, AlertWriter
from batonspark.bronze import DATED
from batonspark.compaction import compact
from batonspark.decode import METRICS
from batonspark.delta_files import DeltaTarget, write_files
from batonspark.metric_rows import MetricMessages, metric_rows
from batonspark.queries import QueryContext, start_alerts, start_bronze, start_rollup
from batonspark.settings import PREFIX, JobSettings
from batonspark.sink_delta import commit_files, read_delta
from batonspark.tables import ALERTS, BRONZE, ROLLUP, Table
from tests.spark.metric_events import NOON, assert_same_rows, batch, event
from tests.spark.running_cluster import RunningCluster
from tests.support.conditions import until_now

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

SOURCE, GROUP = "storage/of-the-test", "of-the-test"
RULES = "lag: {samples: 3, clear_samples: 2}\n"


def run(start: Callable[[QueryContext], StreamingQuery], context: QueryContext) -> None:
    start(context).awaitTermination()


def table(context: QueryContext, which: Table) -> DataFrame:
    return read_delta(context.session, context.warehouse.table(which))


def ours(context: QueryContext) -> DataFrame:
    """Return the rows of bronze from this test."""
    return table(context, BRONZE).where(F.col("source") == SOURCE)


def ours_of(context: QueryContext, which: Table) -> DataFrame:
    """Return the rows of a table for the group of this test."""
    return table(context, which).where(F.col("consumer_group") == GROUP)


def now(events: list[pb.MetricEvent]) -> list[pb.MetricEvent]:
    """Return the events, moved from noon to the present."""
    shift = Clock().unix_ms() - NOON
    for one in events:
        one.unix_ms += shift
    return events


def send(cluster: RunningCluster, *batches: pb.MetricBatch) -> None:
    """Store batches in one queue, in order, as a service does."""

    async def store() -> None:
        async with Producer(cluster.nameserver) as producer:
            for one in batches:
                body = one.SerializeToString()
                await producer.send("BATON_SYS_METRICS", body, ordering_key=one.source)

    cluster.call(store())


def put(context: QueryContext, of: QueueRef, one: pb.MetricBatch, store_ms: int) -> None:
    """Add the events of a batch to bronze, as if storage had stored it at that time."""
    context.warehouse.ensure(BRONZE)
    body = one.SerializeToString()
    found = metric_rows(MetricMessages(of, [body], np.arange(1), np.array([store_ms])), METRICS)
    dated = found.append_column(DATED.field("date"), found["store_time"].cast(pa.date32()))
    where = DeltaTarget(context.warehouse.table(BRONZE), DATED, ("date",), "zstd")
    commit_files(where, write_files(where, iter([dated])), None)


def lag(at_ms: int, committed: int, next_offset: int = 100) -> pb.MetricEvent:
    return event("queue_lag", at_ms, group=GROUP, topic="orders", committed_offset=committed,
                 delivered_offset=50, next_offset=next_offset)  # fmt: skip


async def _has_topics(nameserver: str) -> bool:
    """Return whether the nameserver has created the system topics."""
    async with Admin(nameserver) as admin:
        names = {topic.name for topic in await admin.list_topics()}
        return {"BATON_SYS_METRICS", "BATON_SYS_ALERTS"} <= names


@pytest.fixture(scope="module")
def done(
    spark: SparkSession, cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory
) -> QueryContext:
    """Store the events of a queue that stalls and recovers, each batch twice; run the queries."""
    until_now(lambda: cluster.call(_has_topics(cluster.nameserver)), 60)
    folder = tmp_path_factory.mktemp("jobs")
    rules = folder / "rules.yaml"
    rules.write_text(RULES)
    env = {
        "BATON_SPARK_NAMESERVER": cluster.nameserver,
        "BATON_SPARK_DATA_DIR": str(folder / "data"),
        "BATON_SPARK_RULES_FILE": str(rules),
        "BATON_SPARK_AVAILABLE_NOW": "true",
    }
    settings = load(JobSettings, PREFIX, env)
    context = QueryContext(spark, settings, AlertGauges(CollectorRegistry()))
    stands = now([lag(at_ms, 5) for at_ms in (0, 1_000, 2_000, 3_000)])
    first, second = batch(stands[:2], 1, SOURCE), batch(stands[2:], 2, SOURCE)
    send(cluster, first, second, first)
    run(start_bronze, context)
    moves = batch(now([lag(at_ms, 100) for at_ms in (4_000, 5_000)]), 3, SOURCE)
    stands_again = batch(now([lag(at_ms, 101, 200) for at_ms in (6_000, 7_000, 8_000)]), 4, SOURCE)
    send(cluster, second, moves, stands_again)
    for start in (start_bronze, start_rollup, start_alerts):
        run(start, context)
    return context


@pytest.fixture
def copied(done: QueryContext, tmp_path: Path) -> QueryContext:
    """Return a copy of the tables and checkpoints."""
    shutil.copytree(done.settings.data_dir, tmp_path / "data")
    settings = done.settings.model_copy(update={"data_dir": str(tmp_path / "data")})
    return QueryContext(done.session, settings, AlertGauges(CollectorRegistry()))


@pytest.mark.long
def test_events_are_kept_once(done: QueryContext) -> None:
    rows = ours(done).orderBy("seq", "event_index").collect()
    sizes = {1: 2, 2: 2, 3: 2, 4: 3}
    expected = [(seq, index) for seq, size in sizes.items() for index in range(size)]
    assert [(row.seq, row.event_index) for row in rows] == expected
    sources = table(done, BRONZE).select("source").distinct().collect()
    assert len(sources) > 1, "the events of the cluster itself are missing"


def test_windows_are_those_of_all_events(done: QueryContext) -> None:
    expected = rollup.rollup(table(done, BRONZE))
    assert_same_rows(table(done, ROLLUP), expected)


def test_alerts_reach_the_table_and_the_topic_once(
    done: QueryContext, cluster: RunningCluster
) -> None:
    alerts = ours_of(done, ALERTS).orderBy("time", "state").collect()
    assert [(row.state, row.detail) for row in alerts] == [
        ("FIRING", "stalled"),
        ("RESOLVED", "stalled"),
        ("FIRING", "stopped"),
    ]
    sent = done.session.read.format("baton").options(**cluster.options("BATON_SYS_ALERTS")).load()
    bodies = [json.loads(row.body) for row in sent.orderBy("offset").collect()]
    alert_states = [
        (each["alert_id"], each["state"]) for each in bodies if GROUP in each["alert_id"]
    ]
    assert alert_states[:3] == [(row.alert_id, row.state) for row in alerts]


def test_alerts_of_a_repeated_micro_batch_are_written_once(
    copied: QueryContext, cluster: RunningCluster
) -> None:
    topic = cluster.create("alerts")
    copied.warehouse.ensure(ALERTS)
    options = cluster.options(topic)
    writer = AlertWriter(copied.warehouse, lambda: "again", options, copied.gauges)
    firing = ours_of(copied, ALERTS).where("state = 'FIRING' AND detail = 'stopped'")
    alerts = firing.withColumn("alert_id", F.lit("again")).persist()
    before = table(copied, ALERTS).count()
    for number in (7, 7, 6):
        writer.write(alerts, number)
    alerts.unpersist()
    assert table(copied, ALERTS).count() == before + 1
    sent = copied.session.read.format("baton").options(**cluster.options(topic)).load()
    numbers = [row.key for row in sent.collect()]
    assert numbers == ["again"] * 2, "one for micro-batch 7, and one for 6"


def test_gauges_are_restored_from_the_table(copied: QueryContext) -> None:
    registry = CollectorRegistry()
    AlertWriter(copied.warehouse, str, None, AlertGauges(registry)).restore()
    (metric,) = registry.collect()
    ours = [one.labels for one in metric.samples if one.labels["consumer_group"] == GROUP]
    assert [labels["detail"] for labels in ours] == ["stopped"]


@pytest.mark.long
def test_query_without_its_checkpoint_writes_nothing_twice(copied: QueryContext) -> None:
    count = ours(copied).count()
    shutil.rmtree(Path(copied.settings.data_dir, "checkpoints"))
    for start in (start_bronze, start_rollup, start_alerts):
        run(start, copied)
    assert ours(copied).count() == count
    expected = rollup.rollup(table(copied, BRONZE))
    assert_same_rows(table(copied, ROLLUP), expected)
    alerts = ours_of(copied, ALERTS).orderBy("time", "state").collect()
    assert [(row.state, row.detail, row.reason) for row in alerts][3:] == [
        ("RESOLVED", "stopped", "STATE_LOST")
    ]


def test_bronze_without_its_checkpoint_starts_although_a_queue_of_its_rows_is_gone(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path
) -> None:
    """A broker was removed, and the table still has its rows."""
    until_now(lambda: cluster.call(_has_topics(cluster.nameserver)), 60)
    env = {
        "BATON_SPARK_NAMESERVER": cluster.nameserver,
        "BATON_SPARK_DATA_DIR": str(tmp_path),
        "BATON_SPARK_AVAILABLE_NOW": "true",
    }
    settings = load(JobSettings, PREFIX, env)
    context = QueryContext(spark, settings, AlertGauges(CollectorRegistry()))
    removed = QueueRef("BATON_SYS_METRICS", "removed-broker", 0)
    put(context, removed, batch([event("member_seen", 0)]), NOON)
    send(cluster, batch([event("member_seen", 0)], 1, "storage/of-another-test"))
    run(start_bronze, context)
    sources = {row.source for row in table(context, BRONZE).select("source").collect()}
    assert "storage/of-another-test" in sources


def test_rollup_without_its_checkpoint_counts_the_minute_before_its_first_day_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Retention has removed the day of that minute; the next day has a part of its events."""
    env = {"BATON_SPARK_DATA_DIR": str(tmp_path), "BATON_SPARK_AVAILABLE_NOW": "true"}
    context = QueryContext(spark, load(JobSettings, PREFIX, env), AlertGauges(CollectorRegistry()))
    queue, midnight_ms = QueueRef("BATON_SYS_METRICS", "broker-0", 0), 12 * 3_600_000
    for seq, (count, stored_ms) in enumerate([(3, -5_000), (4, 5_000)], 1):
        appended = event("appended", midnight_ms - 10_000, topic="orders", message_count=count)
        put(context, queue, batch([appended], seq), NOON + midnight_ms + stored_ms)

    def appended_counts() -> list[int]:
        run(start_rollup, context)
        rows = table(context, ROLLUP).where("level = 'queue' AND window_s = 60")
        return [row.appended_count for row in rows.collect()]

    assert appended_counts() == [7]
    deltalake.DeltaTable(context.warehouse.table(BRONZE)).delete("date = '2026-01-01'")
    shutil.rmtree(tmp_path / "checkpoints")
    assert appended_counts() == [7]


def test_compaction_joins_files_and_deletes_old_days_without_affecting_streams(
    copied: QueryContext, cluster: RunningCluster
) -> None:
    path = copied.warehouse.table(BRONZE)
    files, count = len(deltalake.DeltaTable(path).file_uris()), table(copied, BRONZE).count()
    old = ours(copied).withColumn("date", F.to_date(F.lit("2020-01-01")))
    old.write.format("batondelta").option("partitionBy", "date").mode("append").save(path)
    assert compact(copied.settings, Event())
    assert len(deltalake.DeltaTable(path).file_uris()) < files
    assert table(copied, BRONZE).where("date = '2020-01-01'").isEmpty()
    assert table(copied, BRONZE).count() == count
    send(cluster, batch(now([lag(0, 3)]), 5, SOURCE))
    run(start_bronze, copied)
    assert ours(copied).where("seq = 5").count() == 1
