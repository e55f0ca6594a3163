"""A run of a compacted topic with faults drawn from a seed, and its checks.

Writers send values and tombstones of keys, and repeat each until it is confirmed. Compaction runs
all the time, at a low rate, so that services fail in the middle of it; segments are small and are
purged; in some runs the retention of the broker removes old segments. Readers of tables ask all
nodes, at their own pace. Members of a group consume, are killed and leave. Brokers and offsets are
killed; in runs with a replica set the leader of storage is killed, frozen or cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.ordering_key import ORDERING_KEY
from batonmq._core.queues import QueueRef
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.admin import Admin
from batonmq.admin.reports import Compaction
from batonmq.errors import BatonError, NoQuorum, OffsetsUnreachable, Unreachable
from batonmq_server.storage import checkpointer, topic_compactor, topic_trimmer
from batonmq_server.storage.compaction_runner import CompactionRunner, DueQueue
from batonmq_server.storage.core.fsck import Fsck
from batonmq_server.storage.node import recover_directory
from batonmq_server.testing import MemoryBroker, run_virtual
from batonmq_server.testing.memory_network import Faults
from batonmq_server.testing.processes import SimulatedProcess
from tests.simulation.broker_set import NODES, BrokerSet
from tests.simulation.other_tasks import cancel_other_tasks
from tests.simulation.table_ledger import NUMBER, Entry, Messages, TableLedger
from tests.simulation.table_reader import TableReader, contents

TOPIC, GROUP = "prices", "tables"
BROKERS, QUEUES, WRITERS, KEYS_EACH, READERS, MEMBERS = 2, 2, 3, 6, 2, 2
FAULTS_S, QUIET_S, SETTLE_S, ALIKE_S, CLEAN_S = 30, 5, 120, 20, 240
TOMBSTONE_MS = 20_000
SEGMENT_BYTES = 8_192
PRODUCER = ProducerSettings(request_timeout_ms=2_000)
CONSUMER = ConsumerSettings(
    consume_from="first",
    buffer_messages_max=20,
    pull_messages_max=10,
    span_max=60,
    commit_interval_ms=500,
    keep_alive_ms=2_000,
    drain_timeout_ms=1_000,
)
FAULTS = Faults(loss=0.01, duplicate=0.02, slow=0.01, slow_ms_max=4_000)


def play_compactions(seed: str, *, replicated: bool = False) -> TableLedger:
    """Play the run of a seed, with two brokers or with a replica set."""
    ledger, random = TableLedger(seed), Random(seed)
    storage: dict[str, object] = {
        "segment_bytes": SEGMENT_BYTES,
        "compaction_bytes_per_s": random.choice((3_000, 30_000, 16 * 1024 * 1024)),
        "retention_ms": random.choice((0, 10_000)),
        "retention_hours": "any",
        "disk_interval_ms": 2_000,
    }
    broker = (
        BrokerSet(seed, random, storage)
        if replicated
        else MemoryBroker(
            broker_count=BROKERS, seed=seed, faults=FAULTS, settings={"storage": storage}
        )
    )
    with _frequent_rounds(ledger, random):
        run_virtual(CompactionRun(ledger, random, broker).play())
    return ledger


@contextmanager
def _frequent_rounds(ledger: TableLedger, random: Random) -> Iterator[None]:
    """Let compaction, purges and checkpoints be due every few seconds; count compactions."""
    compact = CompactionRunner.compact

    async def counted(runner: CompactionRunner, due: DueQueue) -> int:
        ledger.counts["compactions broken off"] += 1
        removed = await compact(runner, due)
        ledger.counts["compactions broken off"] -= 1
        ledger.counts["compactions"] += 1
        ledger.counts["removed"] += removed
        return removed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompactionRunner, "compact", counted)
        patch.setattr(topic_compactor, "INTERVAL_S", random.choice((0.5, 3)))
        patch.setattr(topic_compactor, "SMALL_INTERVAL_MS", random.choice((0, 3_000)))
        patch.setattr(topic_trimmer, "INTERVAL_S", 1)
        patch.setattr(checkpointer, "INTERVAL_S", random.choice((2, 8)))
        yield


class CompactionRun:
    """The scenario of one run."""

    def __init__(self, ledger: TableLedger, random: Random, broker: MemoryBroker) -> None:
        self._ledger, self._random, self._broker = ledger, random, broker
        self._members = _Members(ledger, broker)
        self._queues: tuple[QueueRef, ...] = ()
        self._number = 0

    async def play(self) -> None:
        """Execute the run."""
        async with self._broker as broker, broker.admin() as admin:
            await self._create(admin)
            async with asyncio.TaskGroup() as reading:
                written = asyncio.Event()
                for number in range(READERS):
                    reading.create_task(self._read(f"reader-{number}", written))
                async with asyncio.TaskGroup() as tasks:
                    for number in range(WRITERS):
                        tasks.create_task(self._write(number))
                    tasks.create_task(self._disturb_services())
                    tasks.create_task(self._disturb_members())
                broker._environment.network.faults = broker._quiet
                written.set()
            await self._check_lag(admin)
            await self._check_group()
            await self._check_end()
            self._count()
        await self._members.bury()

    async def _create(self, admin: Admin) -> None:
        settings = Compaction(tombstone_retention_ms=TOMBSTONE_MS, dirty_percent=1)
        count = QUEUES if isinstance(self._broker, BrokerSet) else QUEUES * BROKERS
        while not self._queues:
            try:
                created = await admin.create_topic(TOPIC, count, compaction=settings)
            except (NoQuorum, OffsetsUnreachable, Unreachable):
                continue
            self._queues = tuple(
                QueueRef(TOPIC, name, number)
                for name, of_broker in sorted(created.topic.queue_counts.items())
                for number in range(of_broker)
            )

    # ---- writers and readers

    async def _write(self, writer: int) -> None:
        """Send values and tombstones; the next one of a key once the last one is confirmed."""
        draws = Random(f"{self._ledger.seed}/writer-{writer}")
        keys = [f"key-{writer}-{number}" for number in range(KEYS_EACH)]
        end_s, first = _time_s() + FAULTS_S, list(keys)
        async with self._broker.producer(PRODUCER) as producer:
            while _time_s() < end_s:
                # The last key is written once, and outlives everything around it.
                key = first.pop() if first else draws.choice(keys[:-1])
                self._number += 1
                entry = Entry(key, self._number, draws.random() < 0.15)
                body = b"" if entry.is_tombstone else bytes(draws.choice((10, 200)))
                properties = {NUMBER: str(entry.number)}
                while True:
                    try:
                        receipt = await producer.send(
                            TOPIC, body, ordering_key=key, properties=properties
                        )
                        break
                    except BatonError:
                        self._ledger.counts["send errors"] += 1
                        await asyncio.sleep(0.1)
                self._ledger.confirmed(receipt.queue, receipt.offset, entry)
                self._ledger.counts["tombstones" if entry.is_tombstone else "values"] += 1
                await asyncio.sleep(draws.choice((0, 0.05, 0.3)))

    async def _read(self, name: str, written: asyncio.Event) -> None:
        """Read the table in laps, some of them from the beginning, until all is written."""
        draws = Random(f"{self._ledger.seed}/laps of {name}")
        nodes = [""]
        if isinstance(self._broker, BrokerSet):
            nodes += [f"broker-{number}" for number in range(NODES)]
        process = SimulatedProcess(self._broker._environment, name, 0)
        reader = TableReader(self._ledger, process, self._broker.nameserver, nodes, TOMBSTONE_MS)
        try:
            is_last = False
            while not is_last:
                is_last = written.is_set()
                if draws.random() < 0.2:
                    reader.begin_again()
                for queue in self._queues:
                    await reader.lap(queue)
                await asyncio.sleep(draws.choice((0.1, 1, 5)))
        finally:
            await reader.close()
        if reader.in_time:
            self._ledger.table_read(name, reader.table())

    # ---- faults

    async def _disturb_members(self) -> None:
        """Let members be killed and leave, and in the end all of them."""
        end_s = _time_s() + FAULTS_S - QUIET_S
        for _ in range(MEMBERS):
            self._members.start()
        while _time_s() < end_s:
            await asyncio.sleep(self._random.uniform(0.5, 6))
            self._ledger.counts[await self._members.disturb(self._random)] += 1
        await self._members.end()

    async def _disturb_services(self) -> None:
        random, counts = self._random, self._ledger.counts
        end_s = _time_s() + FAULTS_S
        while _time_s() < end_s:
            await asyncio.sleep(random.uniform(1, 6))
            if random.random() < 0.2:
                await self._broker.kill("offsets")
                counts["offsets kills"] += 1
            elif isinstance(self._broker, BrokerSet):
                counts[await self._broker.fail()] += 1
            else:
                await self._broker.kill(f"broker-{random.randrange(BROKERS)}")
                counts["broker kills"] += 1

    # ---- the end

    async def _check_lag(self, admin: Admin) -> None:
        """Lag: the messages that the group can still read, without the removed ones."""
        wrong, over_holes = ["not asked"], 0

        async def right() -> bool:
            nonlocal over_holes
            over_holes = 0
            wrong.clear()
            progress = await admin.group_progress(GROUP)
            readable = await self._readable()
            for row in progress.queues:
                queue = QueueRef(row.topic, row.broker, row.queue_id)
                begin, end = row.committed_offset, row.log_end_offset
                if queue not in readable or begin is None or end is None:
                    continue
                left = sum(offset >= begin for offset in readable[queue])
                if row.lag != left:
                    wrong.append(f"{queue} has {left} messages from {begin} on, lag is {row.lag}")
                over_holes += left < end - begin
            return not wrong

        if not await _within(SETTLE_S, right):
            self._ledger.fail("lag", "; ".join(wrong))
        self._ledger.counts["lags over holes"] += over_holes

    async def _check_group(self) -> None:
        """The group passes over all holes, and handles all messages that are left."""
        self._members.start()
        try:
            await self._broker.settled(GROUP, timeout_s=SETTLE_S)
        except TimeoutError as error:
            self._ledger.fail("settled", str(error))
        self._ledger.check_delivered(await self._readable())
        await self._members.end()

    async def _check_end(self) -> None:
        """Check topic, copies and disks, and that one message of each key is left at last."""
        ledger = self._ledger
        ledger.check_newest(await self._readable())
        if not await _within(ALIKE_S, self._alike):
            ledger.fail("alike", f"nodes have {self._copies()} after {ALIKE_S} s")
        self._check_disks()
        readable: dict[QueueRef, Messages] = {}

        async def clean() -> bool:
            readable.update(await self._readable())
            return ledger.is_clean(readable)

        if not await _within(CLEAN_S, clean):
            ledger.fail("clean", f"{readable} is left after {CLEAN_S} s")
        ledger.check_newest(readable)

    async def _alike(self) -> bool:
        """Return whether all nodes of a broker have the same messages."""
        copies = list(self._copies().values())
        return not isinstance(self._broker, BrokerSet) or copies.count(copies[0]) == len(copies)

    def _copies(self) -> dict[str, object]:
        """Return the messages at each node."""
        nodes = self._broker._environment.nodes
        return {name: contents(nodes[name].store) for name in sorted(nodes)}

    def _check_disks(self) -> None:
        """Compare the messages of each node with those that a restart finds on its disk."""
        environment = self._broker._environment
        for name, node in sorted(environment.nodes.items()):
            disk = environment.storage_disks[name].killed()
            report = Fsck(disk, node.store.log.synced_position).run()
            if report.problems:
                self._ledger.fail("alike", f"fsck of {name}: {report.problems[:3]}")
            recovering = recover_directory(
                disk,
                segment_bytes=SEGMENT_BYTES,
                monotonic_ms=lambda: 0,
                replicated=isinstance(self._broker, BrokerSet),
            )
            with recovering as recovered:
                recovered.store.confirmed(node.store.readable_position)
                if contents(recovered.store) != contents(node.store):
                    self._ledger.fail("alike", f"{name} has other messages after a restart")

    def _count(self) -> None:
        counts, nodes = self._ledger.counts, self._broker._environment.nodes
        if isinstance(self._broker, BrokerSet):
            counts["takeovers"] += self._broker.takeovers
        for _, node in sorted(nodes.items()):
            log = node.store.log
            counts["purged segments"] += sum(log.is_purged(begin) for begin, _ in log.sealed())
            counts["logs with a removed begin"] += log.first_position > 0

    async def _readable(self) -> dict[QueueRef, Messages]:
        """Return what a client reads, by queue."""
        readable: dict[QueueRef, dict[int, Entry]] = {queue: {} for queue in self._queues}
        for one in await self._broker.messages(TOPIC):
            readable[one.queue][one.offset] = _entry(one)
        return dict(readable)


class _Members:
    """The members of the group."""

    def __init__(self, ledger: TableLedger, broker: MemoryBroker) -> None:
        self._ledger, self._broker = ledger, broker
        self._processes: list[SimulatedProcess] = []

    def _alive(self) -> list[SimulatedProcess]:
        return [one for one in self._processes if one.alive and not one.leaving]

    def start(self) -> None:
        """Start a member."""
        name = f"member-{len(self._processes) + 1}"
        process = SimulatedProcess(self._broker._environment, name, 0)
        draws = Random(f"{self._ledger.seed}/{name}")
        self._processes.append(process)

        async def handle(message: ReceivedMessage) -> None:
            await asyncio.sleep(draws.choice((0, 0, 0.01, 0.3)) * draws.random())
            self._ledger.handled.add(_entry(message))

        async def main() -> None:
            environment = process.client_environment()
            consumer = Consumer(
                self._broker.nameserver,
                GROUP,
                {TOPIC: "*"},
                CONSUMER,
                client_id=name,
                environment=environment,
            )
            async with consumer, asyncio.TaskGroup() as tasks:
                running = tasks.create_task(consumer.run(handle))
                await process.stopping.wait()
                consumer.stop()
                await running

        process.run(main)

    async def disturb(self, random: Random) -> str:
        """Start, kill or stop a member; return what was done."""
        alive = self._alive()
        if len(alive) < MEMBERS:
            self.start()
            return "starts"
        process = random.choice(alive)
        if random.random() < 0.6:
            process.kill(noticed=random.random() < 0.7)
            return "kills"
        process.stop()
        return "stops"

    async def end(self) -> None:
        """Stop all members."""
        for process in self._alive():
            process.stop()
        for process in self._processes:
            if process.alive:
                await process.ended()

    async def bury(self) -> None:
        """Cancel the tasks of killed members, so that the loop can close."""
        for process in self._processes:
            process.host.thaw()
        await cancel_other_tasks()


def _entry(message: ReceivedMessage) -> Entry:
    properties: Mapping[str, Any] = message.properties
    return Entry(properties[ORDERING_KEY], int(properties[NUMBER]), not message.body)


def _time_s() -> float:
    return asyncio.get_running_loop().time()


async def _within(timeout_s: float, condition: Callable[[], Awaitable[bool]]) -> bool:
    """Return whether a condition becomes true in time."""
    end_s = _time_s() + timeout_s
    while not (is_true := await condition()) and _time_s() < end_s:  # noqa: ASYNC110
        await asyncio.sleep(1)
    return is_true
