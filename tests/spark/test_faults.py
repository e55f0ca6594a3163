"""Goal: Spark's copy of a topic has each message once, despite failures.

Method: real processes. A query is killed with all its processes while a micro-batch has begun and
is not committed; storage nodes are killed under a query; retention removes messages that a query
has not read. Then all counts must be exact.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from batonmq._common.clock import Clock
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.admin import Admin
from batonspark.cluster import ClusterClient
from batonspark.decode import LOST_COUNT
from batonspark.options import ConnectionOptions
from batonspark.sink_delta import read_delta
from tests.e2e.leadership import in_sync
from tests.spark.metric_events import batch, event
from tests.spark.running_cluster import RunningCluster
from tests.spark.stream_queries import Query, committed, drain, is_in_micro_batch, started
from tests.support.conditions import until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SENT, REPEATED = 1_500, 100
WAIT_S = 300
"""Timeout that only a very busy machine comes near to."""
FREEZE_MS = 1_000
STOPPED = {"T", "Z", "X"}
"""States of threads that do not run."""


def bodies(begin: int, end: int) -> list[Message]:
    return [Message(str(n).encode(), keys=(f"k{n % 50}",)) for n in range(begin, end)]


@contextmanager
def child(queries: Sequence[Query], log: Path) -> Iterator[Child]:
    """Run queries in another process; kill it at the end."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.stream_child", json.dumps(queries)],
            start_new_session=True,
            stdout=output,
            stderr=output,
        )
    running = Child(process, log)
    try:
        yield running
    finally:
        running.kill()


class Child:
    """A process with all processes that it started."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    def check(self) -> None:
        if self._process.poll() is not None:
            raise AssertionError(f"it ended by itself:\n{self._log.read_text()[-4_000:]}")

    def send(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def freeze(self) -> bool:
        """Pause it; return whether none of its threads runs any more.

        A thread that starts a process can't be paused if the new process was, before its program
        runs: vfork(2) waits for that. Then nothing is paused.
        """
        self.send(signal.SIGSTOP)
        clock = Clock()
        end_ms = clock.monotonic_ms() + FREEZE_MS
        while not set(thread_states(self._process.pid)) <= STOPPED:
            if clock.monotonic_ms() > end_ms:
                self.send(signal.SIGCONT)
                return False
            os.sched_yield()
        return True

    def kill(self) -> None:
        if self._process.returncode is None:
            self.send(signal.SIGKILL)
            self._process.wait()


def thread_states(group: int) -> Iterator[str]:
    """Return one letter for each thread of the processes of a group; see proc(5)."""
    for stat in Path("/proc").glob("[0-9]*/task/*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            state, _, its_group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(its_group) == group:
                yield state


async def leader(cluster: RunningCluster) -> str:
    """Return the name of the storage process that leads."""
    async with Admin(cluster.nameserver) as admin:
        nodes = (await admin.cluster()).nodes
    (leading,) = [node.address for node in nodes if node.service == "storage" and node.leader]
    names = {address: name for name, address in cluster.processes.addresses.items()}
    return names[leading]


async def has_a_follower(cluster: RunningCluster) -> None:
    """Wait until a follower may be elected."""
    async with Admin(cluster.nameserver) as admin:
        await in_sync(admin, "storage", "broker-0")


def event_batches(begin: int, end: int) -> list[Message]:
    """Return batches of two events each, as services send them."""
    return [
        Message(batch([event("member_seen", n)] * 2, n + 1).SerializeToString())
        for n in range(begin, end)
    ]


@pytest.mark.long
def test_tables_and_topics_have_every_message_once_after_a_kill_within_a_micro_batch(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path
) -> None:
    source, target = cluster.create("killed", 4), cluster.create("copied", 3)
    cluster.send(source, event_batches(0, SENT))
    cluster.send(source, event_batches(0, REPEATED))
    options = cluster.options(source, maxRowsPerTrigger=150)
    queries: list[Query] = [
        {
            "source": options,
            "columns": [],
            "format": "batondelta",
            "sink": {
                "path": str(tmp_path / "table"),
                "partitionBy": "date",
                "view": "metrics",
                "checkpointLocation": str(tmp_path / "of-table"),
            },
        },
        {
            "source": options,
            "columns": ["body", "key", "map('offset', cast(offset as string)) as properties"],
            "format": "baton",
            "sink": {**cluster.options(target), "checkpointLocation": str(tmp_path / "of-topic")},
        },
    ]
    with child(queries, tmp_path / "child.log") as running:

        def are_hit() -> bool:
            if not all(committed(query) >= 2 and is_in_micro_batch(query) for query in queries):
                running.check()
                return False
            if not running.freeze():
                return False
            if all(is_in_micro_batch(query) for query in queries):
                return True
            running.send(signal.SIGCONT)
            return False

        cluster.call(until(are_hit, timeout_s=WAIT_S))
        running.kill()
    assert all(is_in_micro_batch(query) for query in queries)
    for query in queries:
        query["source"] = cluster.options(source, maxRowsPerTrigger=1_000)
        drain(spark, query)
    table = read_delta(spark, str(tmp_path / "table"))
    assert table.count() == 2 * SENT
    assert table.select("seq", "event_index").distinct().count() == 2 * SENT
    copied = spark.read.format("baton").options(**cluster.options(target)).load()
    sent = [message.body for message in [*event_batches(0, SENT), *event_batches(0, REPEATED)]]
    assert sorted(bytes(row.body) for row in copied.collect()) == sorted(sent)


@pytest.mark.long
def test_stream_continues_after_its_broker_restarts(spark: SparkSession, tmp_path: Path) -> None:
    with RunningCluster(tmp_path / "cluster") as cluster:
        topic = cluster.create("restarted", 2)
        cluster.send(topic, bodies(0, SENT))
        given: Query = {
            "source": cluster.options(topic, maxRowsPerTrigger=200),
            "columns": ["*"],
            "format": "batondelta",
            "sink": {
                "path": str(tmp_path / "table"),
                "checkpointLocation": str(tmp_path / "checkpoint"),
            },
        }
        query = started(spark, given, processingTime="0 seconds")
        cluster.call(until(lambda: is_in_micro_batch(given), timeout_s=WAIT_S))
        cluster.call(cluster.processes.kill("storage"))
        cluster.call(cluster.processes.serving("storage"))
        cluster.call(until(lambda: committed(given) >= 3, timeout_s=WAIT_S))
        cluster.call(cluster.processes.restart("storage"))
        query.processAllAvailable()
        query.stop()
        assert query.exception() is None
    table = read_delta(spark, str(tmp_path / "table"))
    assert table.count() == SENT
    assert table.select("body").distinct().count() == SENT


def test_reads_continue_on_a_new_leader_or_follower(spark: SparkSession, tmp_path: Path) -> None:
    """Reads go to followers, and after the death of the leader to the next leader."""
    # Otherwise a follower without CPU time for seconds would leave the in-sync set and never lead.
    slow = {"replica_lag_ms_max": 30_000}
    with RunningCluster(tmp_path / "cluster", storage_replicas=2, storage=slow) as cluster:
        topic = cluster.create("replicated", 2)
        cluster.send(topic, bodies(0, SENT))
        cluster.processes.auto_restart = False
        for source in ("followers", "leader"):
            frame = spark.read.format("baton").options(**cluster.options(topic, readFrom=source))
            assert frame.load().select("body").distinct().count() == SENT
        cluster.call(has_a_follower(cluster))
        cluster.call(cluster.processes.kill(cluster.call(leader(cluster))))
        for source in ("followers", "leader"):
            frame = spark.read.format("baton").options(**cluster.options(topic, readFrom=source))
            assert frame.load().select("body").distinct().count() == SENT


@pytest.mark.long
def test_messages_removed_before_reading_are_an_error_or_a_counted_loss(
    spark: SparkSession, tmp_path: Path
) -> None:
    settings = {"segment_bytes": 65_536, "retention_bytes": 262_144, "disk_interval_ms": 50}
    with RunningCluster(tmp_path / "cluster", storage=settings) as cluster:
        topic = cluster.create("short", 1)
        queue = QueueRef(topic, "broker-0", 0)
        given: Query = {
            "source": cluster.options(topic, maxRowsPerTrigger=100),
            "columns": ["*"],
            "format": "batondelta",
            "sink": {
                "path": str(tmp_path / "table"),
                "checkpointLocation": str(tmp_path / "checkpoint"),
            },
        }
        small = ProducerSettings(batch_bytes_max=32_768)
        cluster.send(topic, bodies(0, 100), small, queue=queue)
        drain(spark, given)
        sent = 100
        with ClusterClient(ConnectionOptions(cluster.nameserver)) as client:
            while (first := client.extents(topic)[queue].first_offset) <= 100:
                more = [Message(str(n).encode() + b" " * 500) for n in range(sent, sent + 500)]
                cluster.send(topic, more, small, queue=queue)
                sent += 500
        with pytest.raises(StreamingQueryException, match="no longer kept"):
            drain(spark, given)
        given["source"] = cluster.options(topic, failOnDataLoss="false")
        drain(spark, given)
        table = read_delta(spark, str(tmp_path / "table")).collect()
        messages = [row for row in table if row.body is not None]
        lost = sum(int(row.properties[LOST_COUNT]) for row in table if row.body is None)
        assert lost >= first - 100 > 0
        assert len(messages) + lost == sent
        assert len({row.offset for row in messages}) == len(messages)
