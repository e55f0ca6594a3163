"""Goal: Spark reads the messages that were sent, from the given offsets and in the given parts.

Method: a real cluster, batch reads and streams with every option; rows are compared with what was
sent and with the answers of the storage nodes.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.admin import Admin
from batonmq.admin.reports import Compaction
from batonspark import decode
from batonspark.cluster import ClusterClient
from batonspark.options import ConnectionOptions, read_options
from batonspark.slice_reader import MessagesLost, read_slice
from batonspark.source import starting_offsets
from tests.spark.running_cluster import RunningCluster

pytestmark = pytest.mark.spark


def read(spark: SparkSession, cluster: RunningCluster, topic: str, **options: object) -> DataFrame:
    return spark.read.format("baton").options(**cluster.options(topic, **options)).load()


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(row.body) for row in frame.select("body").collect())


def drain(
    spark: SparkSession, cluster: RunningCluster, topic: str, folder: Path, **options: object
) -> list[dict[str, Any]]:
    """Stream all messages into a table; return the progress of each micro-batch."""
    frame = spark.readStream.format("baton").options(**cluster.options(topic, **options)).load()
    query = (
        frame.writeStream.format("batondelta")
        .option("path", str(folder / "table"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return [json.loads(progress.json) for progress in query.recentProgress]


def test_columns_are_those_of_the_schema(spark: SparkSession, cluster: RunningCluster) -> None:
    topic = cluster.create("columns")
    for view, schema in (("messages", decode.MESSAGES), ("metrics", decode.METRICS)):
        frame = read(spark, cluster, topic, view=view)
        assert to_arrow_schema(frame.schema, timezone="UTC").equals(schema)
        assert frame.count() == 0


def test_rows_are_the_messages_that_were_sent(spark: SparkSession, cluster: RunningCluster) -> None:
    topic = cluster.create("rows", 4)
    sent = [
        Message(
            str(n).encode(),
            tag="odd" if n % 2 else "",
            keys=("k", str(n)) if n % 3 else (),
            properties={"größe": str(n), "b": ""} if n % 5 else {},
        )
        for n in range(500)
    ]
    cluster.send(topic, sent[:250])
    cluster.send(topic, sent[250:], ProducerSettings(compression="zstd", linger_ms=20))
    rows = {int(row.body): row for row in read(spark, cluster, topic).collect()}
    assert len(rows) == len(sent)
    places = {(row.broker, row.queue_id, row.offset) for row in rows.values()}
    assert len(places) == len(sent)
    for n, message in enumerate(sent):
        row = rows[n]
        assert (row.topic, row.tag) == (topic, message.tag or None)
        assert row.key == (" ".join(message.keys) or None)
        assert row.properties == message.properties
        assert row.store_time is not None


def test_batch_read_has_the_given_start_and_end(
    spark: SparkSession, cluster: RunningCluster
) -> None:
    topic = cluster.create("ranges")
    queue = QueueRef(topic, "broker-0", 0)
    cluster.send(topic, [Message(str(n).encode()) for n in range(100)], queue=queue)
    name = "broker-0/0"
    where = {"startingOffsets": json.dumps({name: 10}), "endingOffsets": json.dumps({name: 25})}
    assert numbers(read(spark, cluster, topic, **where)) == list(range(10, 25))
    assert numbers(read(spark, cluster, topic, startingOffsets="latest")) == []
    assert numbers(read(spark, cluster, topic, queues="broker-1/0")) == []
    rows = read(spark, cluster, topic).orderBy("offset").collect()
    middle = rows[50].store_time
    expected = [int(row.body) for row in rows if row.store_time >= middle]
    at = read(spark, cluster, topic, startingTimestamp=middle.isoformat())
    assert numbers(at) == expected
    before = read(spark, cluster, topic, endingTimestamp=middle.isoformat())
    assert numbers(before) == [n for n in range(100) if n not in expected]


def test_pushed_filters_skip_partitions_and_keep_all_rows(
    spark: SparkSession, cluster: RunningCluster
) -> None:
    topic = cluster.create("pushed", 4)
    cluster.send_numbers(topic, range(400))
    whole = read(spark, cluster, topic)
    middle = whole.orderBy("store_time").collect()[200].store_time
    for condition in (
        "broker = 'broker-0' and queue_id = 1",
        "queue_id in (0, 5) and offset >= 7 and offset < 9",
        f"store_time >= '{middle}'",
        f"store_time < '{middle}' and body <> '3'",
        "offset > 3 and offset <= 3",
    ):
        pushed = read(spark, cluster, topic, pushDown="true").where(condition)
        assert numbers(pushed) == numbers(whole.where(condition)), condition
    one = read(spark, cluster, topic, pushDown="true").where("broker = 'broker-0' and queue_id = 1")
    assert one.rdd.getNumPartitions() == 1
    assert whole.rdd.getNumPartitions() == 4


def test_stream_limits_its_micro_batches_and_resumes_at_its_checkpoint(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path
) -> None:
    topic = cluster.create("limited", 2)
    cluster.send_numbers(topic, range(250))
    batches = drain(spark, cluster, topic, tmp_path, maxRowsPerTrigger=100)
    rows = [batch["numInputRows"] for batch in batches if batch["numInputRows"]]
    assert sum(rows) == 250
    assert max(rows) <= 100
    cluster.send_numbers(topic, range(250, 300))
    drain(spark, cluster, topic, tmp_path, maxRowsPerTrigger=100)
    table = spark.read.parquet(str(tmp_path / "table"))
    assert numbers(table) == list(range(300))


def test_stream_reports_its_backlog(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path
) -> None:
    topic = cluster.create("behind", 1)
    cluster.send(topic, [Message(str(n).encode()) for n in range(40)])
    first = drain(spark, cluster, topic, tmp_path, maxRowsPerTrigger=30)[0]
    (source,) = first["sources"]
    (key,) = (key for key in source["endOffset"] if key != "topic_id")
    assert source["latestOffset"][key] - source["endOffset"][key] == 10


def test_starting_offsets_fix_the_start_of_a_stream(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path
) -> None:
    topic = cluster.create("pinned", 2)
    cluster.send_numbers(topic, range(20))
    pinned = starting_offsets(cluster.options(topic, startingOffsets="latest"))
    cluster.send_numbers(topic, range(20, 30))
    drain(spark, cluster, topic, tmp_path, startingOffsets=pinned)
    assert numbers(spark.read.parquet(str(tmp_path / "table"))) == list(range(20, 30))


@pytest.mark.long
def test_holes_of_a_compacted_topic_are_no_loss_and_kept_messages_are_rows_once(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path
) -> None:
    """Ranges begin and end in holes, and some micro-batches have nothing but a hole."""
    topic, keys, sent = "compacted", 10, 200

    async def compacted() -> QueueRef:
        async with (
            Admin(cluster.nameserver, timeout_s=60) as admin,
            Producer(cluster.nameserver) as producer,
            asyncio.timeout(240),
        ):
            created = await admin.create_topic(topic, 1, compaction=Compaction(dirty_percent=1))
            (queue,) = created.topic.queues
            outcomes = [
                await producer.submit(topic, Message(b"%d" % n), ordering_key=f"key-{n % keys}")
                for n in range(sent)
            ]
            for outcome in outcomes:
                await outcome
            while (await admin.message_counts({queue: 0}))[queue] > keys:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            return queue

    queue = cluster.call(compacted())
    name = f"{queue.broker}/{queue.queue_id}"
    kept = list(range(sent - keys, sent))
    assert numbers(read(spark, cluster, topic)) == kept
    for begin, end in ((45, 195), (45, 120), (191, 193)):
        where = {"startingOffsets": json.dumps({name: begin})}
        where |= {"endingOffsets": json.dumps({name: end})}
        found = numbers(read(spark, cluster, topic, **where))
        assert found == [n for n in kept if begin <= n < end], (begin, end)
    start = json.dumps({name: 45})
    batches = drain(spark, cluster, topic, tmp_path, startingOffsets=start, maxRowsPerTrigger=60)
    assert len(batches) > 2, "at least one of them has nothing but a hole"
    table = spark.read.parquet(str(tmp_path / "table"))
    assert numbers(table) == kept
    assert table.where("body is null").count() == 0, "no row counts a loss"


@pytest.mark.parametrize("sent", [0, 5, 30])
def test_slice_of_a_topic_that_was_created_again_is_an_error_or_a_counted_loss(
    cluster: RunningCluster, sent: int
) -> None:
    """A micro-batch that is repeated after a restart has a slice of the topic before."""
    topic = cluster.create(f"again-{sent}", 2)
    queue = QueueRef(topic, "broker-0", 0)
    cluster.send(topic, [Message(b"old")] * 20, queue=queue)

    async def create_again() -> None:
        async with Admin(cluster.nameserver, timeout_s=60) as admin:
            await admin.delete_topic(topic)
            await admin.create_topic(topic, 2)

    with ClusterClient(ConnectionOptions(cluster.nameserver)) as client:
        before = client.extents(topic)[queue].topic_id
        cluster.call(create_again())
        assert client.extents(topic)[queue].topic_id != before
    cluster.send(topic, [Message(b"new")] * sent, queue=queue)
    wanted = decode.QueueSlice(queue, 10, 20, before)
    given = cluster.options(topic, timeoutMs=3_000)
    with pytest.raises(MessagesLost, match=r"\[10, 20\) .* created again"):
        list(read_slice(read_options(given), wanted))
    for view in ("messages", "metrics"):
        options = read_options({**given, "view": view, "failOnDataLoss": "false"})
        (row,) = (row for part in read_slice(options, wanted) for row in part.to_pylist())
        count = row["count"] if view == "metrics" else dict(row["properties"])[decode.LOST_COUNT]
        assert int(count) == 10


def test_unknown_option_is_an_error(spark: SparkSession, cluster: RunningCluster) -> None:
    with pytest.raises(PySparkException, match="unknown option startingoffset;"):
        read(spark, cluster, "any", startingOffset="latest").count()


def test_missing_topic_is_an_error(spark: SparkSession, cluster: RunningCluster) -> None:
    with pytest.raises(PySparkException, match=r"TOPIC_NOT_FOUND|TopicNotFound"):
        read(spark, cluster, "nowhere").count()


def test_arrow_batches_are_small(cluster: RunningCluster) -> None:
    rows = pa.RecordBatch.from_pylist([{"n": n} for n in range(25)])
    assert [part.num_rows for part in decode.rows_within(rows, 10)] == [10, 10, 5]
