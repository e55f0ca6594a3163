"""Goal: rows become messages, each stored once even if it is written several times.

Method: rows written into a real cluster, by Spark and task by task; repeated as they were, in
another order, and after other rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from batonspark.options import write_options
from batonspark.sink import StoredMessages, write_rows
from tests.spark.running_cluster import RunningCluster

pytestmark = pytest.mark.spark


def stored(spark: SparkSession, cluster: RunningCluster, topic: str) -> DataFrame:
    return spark.read.format("baton").options(**cluster.options(topic)).load()


def bodies(spark: SparkSession, cluster: RunningCluster, topic: str) -> list[str]:
    rows = stored(spark, cluster, topic).orderBy("broker", "queue_id", "offset").collect()
    return [bytes(row.body).decode() for row in rows]


def write(
    cluster: RunningCluster, topic: str, name: str, texts: Sequence[str], **options: object
) -> StoredMessages:
    rows = pa.RecordBatch.from_pydict({"body": list(texts), "key": [t[:1] for t in texts]})
    parts = [rows.slice(0, 30), rows.slice(30)]
    return write_rows(write_options(cluster.options(topic, **options)), name, iter(parts))


def test_rows_become_messages_ordered_by_key(spark: SparkSession, cluster: RunningCluster) -> None:
    topic = cluster.create("written", 4)
    rows = spark.range(0, 600, numPartitions=1).selectExpr(
        "cast(id as string) as body",
        "concat('k', id % 7) as key",
        "if(id % 2 = 0, 'even', null) as tag",
        "map('n', cast(id as string), 'empty', null) as properties",
    )
    options = cluster.options(topic, rowsPerBatch=50, compression="zstd")
    rows.write.format("baton").mode("append").options(**options).save()
    messages = stored(spark, cluster, topic).orderBy("broker", "queue_id", "offset").collect()
    assert sorted(int(row.body) for row in messages) == list(range(600))
    by_key = defaultdict(list)
    for row in messages:
        number = int(row.body)
        by_key[row.key].append((row.broker, row.queue_id, number))
        assert row.tag == (None if number % 2 else "even")
        assert row.properties == {"n": str(number), "empty": ""}
    for places in by_key.values():
        assert len({place[:2] for place in places}) == 1
        assert [number for *_, number in places] == sorted(number for *_, number in places)


def test_write_with_a_write_id_stores_once(spark: SparkSession, cluster: RunningCluster) -> None:
    topic = cluster.create("named", 2)
    rows = spark.range(0, 200, numPartitions=2).selectExpr("cast(id as string) as body")
    for _ in range(2):
        options = cluster.options(topic, writeId="nightly")
        rows.write.format("baton").mode("append").options(**options).save()
    assert Counter(bodies(spark, cluster, topic)) == Counter(map(str, range(200)))
    rows.write.format("baton").mode("append").options(**cluster.options(topic)).save()
    assert len(bodies(spark, cluster, topic)) == 400


def test_repeated_rows_are_recognized_by_batch(
    spark: SparkSession, cluster: RunningCluster
) -> None:
    topic = cluster.create("again", 3)
    texts = [f"{n % 5} {n}" for n in range(100)]
    first = write(cluster, topic, "t", texts[:60], rowsPerBatch=10)
    assert (first.message_count, first.repeated_count) == (60, 0)
    again = write(cluster, topic, "t", texts[:60], rowsPerBatch=10)
    assert (again.message_count, again.repeated_count) == (60, 60)
    other = write(cluster, topic, "u", texts[:60], rowsPerBatch=10)
    assert other.repeated_count == 0
    assert len(bodies(spark, cluster, topic)) == 120


def test_reordered_rows_are_recognized_if_sorted_by_content(
    spark: SparkSession, cluster: RunningCluster
) -> None:
    topic = cluster.create("shuffled", 3)
    texts = [f"{n % 5} {n}" for n in range(100)]
    write(cluster, topic, "t", texts, order="content")
    again = write(cluster, topic, "t", texts[::-1], order="content")
    assert again.repeated_count == 100
    assert sorted(bodies(spark, cluster, topic)) == sorted(texts)


def test_reordered_rows_are_never_lost(spark: SparkSession, cluster: RunningCluster) -> None:
    topic = cluster.create("reordered", 1)
    write(cluster, topic, "t", ["a 1", "a 2"])
    write(cluster, topic, "t", ["a 2", "a 3"])
    assert set(bodies(spark, cluster, topic)) == {"a 1", "a 2", "a 3"}


def test_unknown_columns_are_an_error(spark: SparkSession, cluster: RunningCluster) -> None:
    rows = spark.range(1).selectExpr("cast(id as string) as body", "id as offset")
    with pytest.raises(PySparkException, match="messages are written from the columns"):
        rows.write.format("baton").mode("append").options(**cluster.options("any")).save()
