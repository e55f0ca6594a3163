"""Goal: the Spark wheel brings all that its jobs need.

Method: the wheel alone is installed into an empty environment; the job `bronze` of that environment
reads the metrics topic of a real cluster into a Delta table.
"""

from __future__ import annotations

import json
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest

from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from tests.packaging.environments import ROOT, Environment, build_wheels, new_environment
from tests.spark.metric_events import batch, event
from tests.spark.running_cluster import TEST_CONFIG, RunningCluster
from tests.support.conditions import until_now

pytestmark = [pytest.mark.spark, pytest.mark.e2e, pytest.mark.timeout(600)]

SOURCE = "storage/wheel"
TOPIC = "BATON_SYS_METRICS"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    wheels = build_wheels(tmp_path_factory.mktemp("wheels"), (ROOT, ROOT / "spark-jobs"))
    return new_environment(tmp_path_factory.mktemp("spark-wheel") / "env", wheels, "batonmq-spark")


def store_events(cluster: RunningCluster, count: int) -> None:
    """Store a batch with `count` events in the metrics topic."""

    async def has_topic() -> bool:
        async with Admin(cluster.nameserver) as admin:
            return TOPIC in {topic.name for topic in await admin.list_topics()}

    async def send() -> None:
        events = [
            event("appended", number, topic="orders", message_count=number + 1)
            for number in range(count)
        ]
        async with Producer(cluster.nameserver) as producer:
            await producer.send(TOPIC, batch(events, 1, SOURCE).SerializeToString())

    until_now(lambda: cluster.call(has_topic()), 60)
    cluster.call(send())


@pytest.mark.long
def test_job_of_the_wheel_reads_the_metrics_topic_into_a_table(
    environment: Environment, cluster: RunningCluster, tmp_path: Path
) -> None:
    assert "batonmq-server" not in environment.packages()
    store_events(cluster, 20)
    settings = {
        "BATON_SPARK_NAMESERVER": cluster.nameserver,
        "BATON_SPARK_DATA_DIR": str(tmp_path / "data"),
        "BATON_SPARK_MASTER": "local[2]",
        "BATON_SPARK_AVAILABLE_NOW": "true",
        "BATON_SPARK_SPARK": json.dumps(TEST_CONFIG),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    environment.run("python", "-m", "batonspark.jobs.bronze", env=settings, timeout_s=300)
    table = deltalake.DeltaTable(str(tmp_path / "data" / "tables" / "bronze"))
    rows = pa.table(table.scan(["source", "event_index", "count"]).read_all()).to_pylist()
    event_rows = sorted(
        (row["event_index"], row["count"]) for row in rows if row["source"] == SOURCE
    )
    assert event_rows == [(number, number + 1) for number in range(20)]
