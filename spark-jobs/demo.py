"""Run the jobs beside a busy cluster and check their results: `make spark-demo`.

1. Start a local cluster, and bronze, rollup and alerts in one process.
2. Send New York's flights through a group with members that join and leave (`baton demo`); in the
   middle, restart storage and offsets. Meanwhile a member of another group is killed with one
   message in flight, so that its queue is taken over; and a client with a different subscription
   tries to join that group. Then restart the lock manager.
3. When the alerts have fired and are resolved, run the reports: in spite of the restarts no event
   is missing. Count the events again with a reader that does not use Spark.

The exit status is 1 unless every number is as expected.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa

from baton.metrics.v1.metrics_service_pb2 import MetricBatch
from batonmq._common import timeouts
from batonmq._common.aio import interruptible
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.puller import Puller
from batonmq._core.names import METRICS_TOPIC
from batonmq._core.queues import QueueRef
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq.errors import SubscriptionConflict
from batonmq_server.demo.demo_run import DemoResult, run_demo
from batonmq_server.demo.flights import load_flights
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions

HERE = Path(__file__).resolve().parent
TOPIC, GROUP = "reservations", "desk"
SEGMENT_BYTES = 16 * 1024 * 1024
LIMIT_S = 300
"""Time for the alerts to be resolved, and for each report; `--limit-s` is for slow machines."""
RULES = """
version: 1
rebalance_storm: {count_max: 2, window_ms: 30000}
steals: {count_max: 0, window_ms: 15000}
subscription_conflict: {severity: critical, clear_ms: 15000}
silent_client: {forget_ms: 15000}
"""
"""Rules with short times, so that the demo can wait until the alerts are resolved."""
REPORTS = ("duplicate_audit", "handover_report", "capacity_forecast")
AWAITED = frozenset({"rebalance_storm", "steals", "subscription_conflict"})
RESTART_PHASE = "2: "
"""Start of the name of the demo's phase in which storage and offsets are restarted."""
RESTARTED = {
    "storage": "storage/broker-0",
    "offsets": "offsets/offsets-0",
    "lockmgr": "lockmgr/lockmgr-0",
}
"""Processes that are restarted, and the sources of their events."""


@dataclass(frozen=True, slots=True)
class DemoPaths:
    """Folder, nameserver, settings and limits of the demo."""

    folder: Path
    nameserver: str
    cores: int
    limit_s: int

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings of every job, as environment variables."""
        return {
            "BATON_SPARK_NAMESERVER": self.nameserver,
            "BATON_SPARK_DATA_DIR": str(self.folder / "spark"),
            "BATON_SPARK_MASTER": f"local[{self.cores}]",
            "BATON_SPARK_RULES_FILE": str(self.folder / "rules.yaml"),
            "BATON_SPARK_TRIGGER_MS": "2000",
            "BATON_SPARK_WATERMARK_S": "5",
        }

    def table(self, name: str) -> str:
        """Return the path of a table."""
        return str(self.folder / "spark" / "tables" / name)

    def report(self, name: str, file: str) -> Path:
        """Return the path of a file of a report."""
        return self.folder / "spark" / "reports" / name / file

    async def job(self, name: str, log: Path) -> Process:
        """Start a job; its output goes to a file beside its log."""
        given = [f"{key}={value}" for key, value in self.settings.items()]
        program = ["env", *given, sys.executable, "-m", f"batonspark.jobs.{name}"]
        with log.open("wb") as errors, log.with_suffix(".txt").open("wb") as output:
            return await asyncio.create_subprocess_exec(*program, stdout=output, stderr=errors)


async def demo(folder: Path, flight_count: int, cores: int, limit_s: int) -> bool:
    """Run the demo; return whether every result is as expected."""
    flights = load_flights()[:flight_count]
    settings = {"storage": {"segment_bytes": SEGMENT_BYTES}}
    async with LocalCluster(folder / "cluster", ClusterOptions(settings=settings)) as cluster:
        stage = DemoPaths(folder, cluster.nameserver, cores, limit_s)
        (folder / "rules.yaml").write_text(RULES)
        say(f"cluster is up at {stage.nameserver}; the jobs start beside it")
        async with streaming(stage) as jobs, asyncio.TaskGroup() as tasks:
            planted = tasks.create_task(plant(stage.nameserver))
            middle = asyncio.Event()
            restarted = tasks.create_task(restart_in(middle, cluster))
            told = progress(middle)
            result = await run_demo(stage.nameserver, flights, folder / "journals", told)
            say(f"{result.consumed:,} flights handled, {result.handovers} hand-overs")
            await planted
            await restarted
            await restart(cluster, "lockmgr")
            say("waiting for the alerts to be resolved")
            alerts = await resolved(stage, jobs)
        say("the jobs are stopped; the reports run")
        for name in REPORTS:
            await reported(stage, name)
        events, rows = await counted(stage)
    return verdict(stage, result, alerts, (events, rows))


@asynccontextmanager
async def streaming(stage: DemoPaths) -> AsyncIterator[Process]:
    """Run bronze, rollup and alerts; raise RuntimeError unless they end with status 0."""
    log = stage.folder / "stream.log"
    process = await stage.job("stream", log)
    try:
        yield process
        if process.returncode is None:
            process.terminate()
        if await process.wait() != 0:
            raise RuntimeError(f"the streaming jobs failed: see {log}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def restart_in(middle: asyncio.Event, cluster: LocalCluster) -> None:
    """Restart storage and offsets, one after the other, in the middle of the demo."""
    await middle.wait()
    for name in ("storage", "offsets"):
        await restart(cluster, name)


async def restart(cluster: LocalCluster, name: str) -> None:
    """Restart a process gracefully."""
    await cluster.restart(name)
    say(f"{name} was restarted")


async def plant(nameserver: str) -> None:
    """Cause one redelivery, one takeover and one subscription conflict."""
    async with Admin(nameserver) as admin:
        await admin.create_topic(TOPIC, 1)
    async with Producer(nameserver) as producer:
        await producer.send(TOPIC, b"seat 12A")
    hold = [sys.executable, str(HERE / "demo.py"), "--hold", nameserver]
    holder = await asyncio.create_subprocess_exec(*hold, stdout=PIPE)
    assert holder.stdout is not None
    try:
        output = await holder.stdout.readline()
    finally:
        holder.kill()
        await holder.wait()
    if output.strip() != b"received":
        raise RuntimeError("the member to be killed received no message")
    say("a member was killed with one message in flight; its lease expires in 30 s")
    await take_over(nameserver)


async def take_over(nameserver: str) -> None:
    """Receive the message with another member; then join with a different subscription."""
    got = asyncio.Event()
    flagged: list[bool] = []

    async def handle(message: ReceivedMessage) -> None:
        flagged.append(message.redelivered)
        got.set()

    async with member(nameserver, "second") as second, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(second.run(handle))
        await got.wait()
        say(f"the other member received it, marked as redelivered: {flagged[0]}")
        try:
            async with member(nameserver, "third", "window"):
                raise RuntimeError("a member with a different subscription joined the group")
        except SubscriptionConflict:
            say("a third member was rejected: its subscription differs")
        second.stop()
        await running


async def hold(nameserver: str) -> None:
    """Run the member that is killed."""

    async def handle(_: ReceivedMessage) -> None:
        print("received", flush=True)
        await asyncio.Event().wait()

    async with member(nameserver, "first") as first:
        await first.run(handle)


def member(nameserver: str, client_id: str, expression: str = "*") -> Consumer:
    """Return a member of the group with a filter expression."""
    settings = ConsumerSettings(consume_from="first", send_back=False)
    return Consumer(nameserver, GROUP, {TOPIC: expression}, settings, client_id=client_id)


async def resolved(stage: DemoPaths, jobs: Process) -> Counter[tuple[str, str]]:
    """Wait until the awaited alerts are resolved; return the number of alerts by rule and state.

    Raises:
        RuntimeError: they are not resolved in time, or the jobs have ended.
    """
    log = stage.folder / "stream.log"
    try:
        async with timeouts.timeout(stage.limit_s):
            while jobs.returncode is None:
                found = await changes(stage)
                if all(found[rule, "RESOLVED"] >= found[rule, "FIRING"] > 0 for rule in AWAITED):
                    return found
                await asyncio.sleep(1)
    except TimeoutError:
        raise RuntimeError(f"alerts are not resolved after {stage.limit_s} s: see {log}") from None
    raise RuntimeError(f"the streaming jobs ended: see {log}")


async def changes(stage: DemoPaths) -> Counter[tuple[str, str]]:
    """Return the number of rows of the table `alerts` by rule and state."""
    path = stage.table("alerts")
    if not deltalake.DeltaTable.is_deltatable(path):
        return Counter()
    rows = await asyncio.to_thread(read, path, ["rule", "state"])
    return Counter((row["rule"], row["state"]) for row in rows.to_pylist())


async def reported(stage: DemoPaths, name: str) -> None:
    """Run one report; `verdict` checks its result."""
    log = stage.folder / f"{name}.log"
    process = await stage.job(name, log)
    async with timeouts.timeout(stage.limit_s):
        await process.wait()
    if not stage.report(name, "report.json").exists():
        raise RuntimeError(f"{name} failed: see {log}")


async def counted(stage: DemoPaths) -> tuple[int, int]:
    """Return the number of events in the topic, up to the end of bronze, and of rows in bronze.

    All events of a queue without rows in bronze count, because bronze missed them.
    """
    columns = ["sys_broker", "sys_queue_id", "sys_offset"]
    rows = await asyncio.to_thread(read, stage.table("bronze"), columns)
    last = rows.group_by(columns[:2]).aggregate([("sys_offset", "max")]).to_pylist()
    ends = {
        QueueRef(METRICS_TOPIC, one["sys_broker"], one["sys_queue_id"]): one["sys_offset_max"]
        for one in last
    }
    async with Admin(stage.nameserver) as admin:
        for held in (await admin.describe_topic(METRICS_TOPIC)).queues:
            if held.next_offset and held.queue not in ends:
                ends[held.queue] = held.next_offset - 1
    events = 0
    seen: set[tuple[str, int, int]] = set()
    async with Puller(stage.nameserver) as puller:
        await puller.assign(ends)
        for queue in ends:
            await puller.seek(queue, "begin")
        open_queues = set(ends)
        while open_queues:
            for queue, messages in (await puller.poll()).items():
                for message in messages:
                    if message.offset <= ends[queue]:
                        events += _events_of(message.body, seen)
                    if message.offset >= ends[queue]:
                        open_queues.discard(queue)
    return events, rows.num_rows


def _events_of(body: bytes, seen: set[tuple[str, int, int]]) -> int:
    """Return the rows that a batch makes in bronze; 0 if it is a repeated batch."""
    batch = MetricBatch.FromString(body)
    name = (batch.source, batch.incarnation_id, batch.seq)
    if name in seen:
        return 0
    seen.add(name)
    return len(batch.events) + bool(batch.dropped_count)


def verdict(
    stage: DemoPaths, result: DemoResult, alerts: Counter[tuple[str, str]], counts: tuple[int, int]
) -> bool:
    """Print the results; return whether they are as expected."""
    audit = json.loads(stage.report("duplicate_audit", "report.json").read_text())
    for name in REPORTS:
        print(f"\n--- {name}\n{(stage.folder / f'{name}.txt').read_text().strip()}")
    print("\n--- alerts")
    rules = sorted({rule for rule, _ in alerts})
    for rule in rules:
        print(f"{rule}: {alerts[rule, 'FIRING']} fired, {alerts[rule, 'RESOLVED']} resolved")
    events, rows = counts
    planted = [one for one in audit["duplicates"] if one["consumer_group"] == GROUP]
    right = {
        f"events in {events:,} = rows in bronze {rows:,}": events == rows,
        f"flights lost {result.lost}, twice {result.duplicated}": result.ok,
        f"audit is {audit['verdict']}": audit["verdict"] == "clean",
        f"restarts {', '.join(RESTARTED)}, gaps {audit['gap_count']}": (
            restarts(stage) == Counter(RESTARTED.values()) and audit["gap_count"] == 0
        ),
        f"graceful duplicates {audit['bug_count']}": audit["bug_count"] == 0,
        f"planted redelivery found {len(planted)} time, as {_causes(planted)}": (
            [(one["count"], one["cause"]) for one in planted] == [(1, "crash")]
        ),
        f"other duplicates {audit['duplicate_count'] - len(planted)}": (
            audit["duplicate_count"] == len(planted)
        ),
        f"alerts fired and were resolved: {', '.join(sorted(AWAITED))}": all(
            alerts[rule, "RESOLVED"] == alerts[rule, "FIRING"] > 0 for rule in AWAITED
        ),
    }
    print("\n--- verdict")
    for text, is_right in right.items():
        print(f"{'ok ' if is_right else 'NOT'} {text}")
    print(f"page: {stage.report('handover_report', 'report.html')}")
    return all(right.values())


def restarts(stage: DemoPaths) -> Counter[str]:
    """Return how often each source stopped gracefully, by its events in bronze."""
    rows = read(stage.table("bronze"), ["source", "kind"]).to_pylist()
    return Counter(row["source"] for row in rows if row["kind"] == "process_stopped")


def _causes(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(sorted({one["cause"] for one in rows})) or "nothing"


def read(path: str, columns: list[str]) -> pa.Table:
    """Return columns of a table."""
    table = deltalake.DeltaTable(path)
    return pa.table(table.scan(columns).read_all())


def progress(middle: asyncio.Event) -> Callable[[str, int, int], None]:
    """Return a callback that prints each new phase of the demo, and sets `middle` in its middle."""
    seen: set[str] = set()

    def tell(what: str, done: int, total: int) -> None:
        if what not in seen:
            seen.add(what)
            if what.startswith(RESTART_PHASE):
                middle.set()
            say(f"flights: {what}, {done:,} of {total:,}")

    return tell


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, flush=True)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="spark-demo", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/spark-demo"))
    parser.add_argument("--flights", type=int, default=100_000)
    parser.add_argument("--cores", type=int, default=2, help="of Spark")
    parser.add_argument("--limit-s", type=int, default=LIMIT_S, help="time for the jobs of Spark")
    parser.add_argument("--hold", metavar="HOST:PORT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hold:
        asyncio.run(hold(given.hold))
        return
    folder = given.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        right = asyncio.run(interruptible(demo(folder, given.flights, given.cores, given.limit_s)))
    except asyncio.CancelledError:
        sys.exit(130)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
