"""The speed at which Spark writes the metrics streams into a table, on two cores."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

from pyspark.sql import DataFrameReader, SparkSession

from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from batonspark.session import build_session
from bench.events import sample_batches
from bench.figures import Figure, Goal, figure
from bench.setup import Setup

TOPIC = "events"
QUEUES = 4
CORES = 2
EVENTS_PER_BATCH = 2_000
ROUNDS = 3
_TICKS_PER_S = 100
_RATE = Goal(value_min=400_000)
_CPU = Goal(value_max=CORES * 1e6 / 400_000)


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows per second, and microseconds of CPU time of Spark per row."""

    rows_per_s: float
    cpu_us: float


async def spark(setup: Setup) -> list[Figure]:
    """Measure writes of events into a Delta table, and reads of events as rows of Spark."""
    count = setup.sized(1_000_000, 40_000)
    options = ClusterOptions(auto_restart=False, log_level="WARNING")
    figures: list[Figure] = []
    async with LocalCluster(setup.folder / "cluster", options, start=start_program) as cluster:
        setup.say("events for Spark")
        await _fill(cluster.nameserver, count)
        setup.say("a session of Spark")
        session = await asyncio.to_thread(build_session, "bench", f"local[{CORES}]")
        session.sparkContext.setLogLevel("ERROR")
        reader = session.read.format("baton").options(nameserver=cluster.nameserver, topic=TOPIC)
        try:
            for sink, work in (("a Delta table", _to_delta), ("nothing", _to_nothing)):
                setup.say(f"rows to {sink}")
                run = await asyncio.to_thread(
                    _measure, session, partial(work, reader, setup.folder / "table"), count
                )
                name = f"metric rows from gRPC to {sink}"
                figures += [
                    figure(name, run.rows_per_s, "rows/s", _RATE),
                    figure(f"{name}, processor time", run.cpu_us, "us/row", _CPU),
                ]
        finally:
            await asyncio.to_thread(session.stop)
    return figures


async def _fill(nameserver: str, count: int) -> None:
    async with Admin(nameserver) as admin:
        await admin.create_topic(TOPIC, QUEUES)
    async with Producer(nameserver) as producer:
        pending = [
            await producer.submit(TOPIC, Message(batch.SerializeToString()))
            for batch in sample_batches(count, EVENTS_PER_BATCH)
        ]
        for each in pending:
            await each


def _measure(session: SparkSession, work: Callable[[], None], count: int) -> _Run:
    runs: list[_Run] = []
    for round_number in range(ROUNDS + 1):
        began, cpu_s = perf_counter(), _cpu_s(session)
        work()
        took, spent = perf_counter() - began, _cpu_s(session) - cpu_s
        if round_number:  # in the first round Java compiles
            runs.append(_Run(count / took, spent / count * 1e6))
    return _Run(median(r.rows_per_s for r in runs), median(r.cpu_us for r in runs))


def _to_delta(reader: DataFrameReader, table: Path) -> None:
    """Write to a Delta table; its writer decodes the messages as in bronze, but without state."""
    shutil.rmtree(table, ignore_errors=True)
    reader.load().write.format("batondelta").mode("append").options(
        path=str(table), partitionBy="date", view="metrics"
    ).save()


def _to_nothing(reader: DataFrameReader, table: Path) -> None:
    """Read the topic as a query does: Spark gets a row for each event."""
    reader.option("view", "metrics").load().write.format("noop").mode("append").save()


def _cpu_s(session: SparkSession) -> float:
    """Return the CPU time of the JVM and of all processes that it has started."""
    jvm = session.sparkContext._jvm
    assert jvm is not None
    pid = jvm.java.lang.ProcessHandle.current().pid()
    children: dict[int, list[int]] = {}
    spent: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            values = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(values[1]), []).append(int(path.parent.name))
        spent[int(path.parent.name)] = sum(map(int, values[11:15]))
    waiting, total = [pid], 0
    while waiting:
        each = waiting.pop()
        total += spent.get(each, 0)
        waiting += children.get(each, [])
    return total / _TICKS_PER_S
