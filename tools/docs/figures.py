"""Measures the figures that README and docs quote, and prints them.

    python -m tools.docs.figures [NAME ...]

The names are codec, compression, disk, records, send, groups, faults and owners. Not a test: no
figure has a bound. Without a name all are measured, in about five minutes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter  # noqa: TID251  a stop-watch
from typing import Any

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as pb_grpc
from batonmq._connection.channels import connect
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.session import OwnershipEvent
from batonmq._core.compression import Compression, RecordCompressor
from batonmq._core.queues import GroupQueue
from batonmq._core.records import (
    BatchBuilder,
    Header,
    Message,
    Record,
    check_batch,
    decode_records,
    encode_record,
    read_header,
)
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.etcd import EtcdProcess
from batonmq_server.local.layout import ClusterOptions
from batonmq_server.offsets.codec import encode_key, encode_progress
from batonmq_server.offsets.core.change_log import Entry
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.offsets.disk import LmdbDisk
from tests.nameserver.counted_store import counted_store, incarnation_of, join_all, member
from tests.support.conditions import until

PROCESSES = ("nameserver", "lockmgr", "offsets", "storage", "etcd")
PAUSES = (*((name, 10) for name in PROCESSES), ("lockmgr", 40), ("nameserver", 40))
TOPIC = "figures"
BODY = b"x" * 100
FROM_FIRST = ConsumerSettings(consume_from="first")


async def codec() -> None:
    """Measure the time per message to encode, check and decode a batch of 1,000 messages."""
    messages = [Message(BODY, "AA", (f"key-{number}",)) for number in range(1_000)]

    def encode() -> bytes:
        builder = BatchBuilder()
        for message in messages:
            builder.add(message, encode_record(message))
        return builder.encode(topic="flights", queue_id=0)

    batch = encode()
    header = read_header(batch)
    show("batch, bytes besides the body, per message", len(batch) / 1_000 - len(BODY), "bytes")
    show("encode, per message", 1_000 * best_s(encode), "µs")
    show(
        "check in storage, per batch", 1e6 * best_s(lambda: check_batch(batch, stamped=False)), "µs"
    )
    every = range(header.count)
    decode_s = best_s(lambda: list(decode_records(batch, header, every)))
    show("decode, per message", 1_000 * decode_s, "µs")


async def compression() -> None:
    """Measure size and time of compressed batches of JSON orders against uncompressed ones."""
    random = Random(1)
    messages = [Message(_order(random, number)) for number in range(1_000)]
    plain = _packed(Compression.NONE, messages)
    every = range(len(messages))
    times: dict[Compression, tuple[float, float, float]] = {}
    for one in Compression:
        batch = _packed(one, messages)
        header = read_header(batch)
        show(f"{one.name.lower()}: size, of that without", len(batch) / len(plain), "")
        times[one] = (
            best_s(partial(_packed, one, messages)),
            best_s(partial(check_batch, batch, stamped=False)),
            best_s(partial(_decoded, batch, header, every)),
        )
    for one, found in times.items():
        for what, took_s, plain_s in zip(
            ("encode", "check", "decode"), found, times[Compression.NONE], strict=True
        ):
            show(f"{one.name.lower()}: {what}, of that without", took_s / plain_s, "")
            show(f"{one.name.lower()}: {what}", 1e6 * took_s, "µs")


def _decoded(batch: bytes, header: Header, indexes: Sequence[int]) -> list[Record]:
    return list(decode_records(batch, header, indexes))


def _order(random: Random, number: int) -> bytes:
    items = [
        {
            "sku": f"SKU-{random.randrange(5_000)}",
            "quantity": random.randrange(1, 5),
            "price_cents": random.randrange(100, 100_000),
        }
        for _ in range(3)
    ]
    customer = f"c-{random.randrange(100_000)}"
    order = {"order_id": 10_000_000 + number, "customer": customer, "items": items, "paid": True}
    return json.dumps(order).encode()


def _packed(compression: Compression, messages: Sequence[Message]) -> bytes:
    builder = BatchBuilder(RecordCompressor(compression))
    for message in messages:
        builder.add(message, encode_record(message))
    return builder.encode(topic="orders", queue_id=0)


async def disk() -> None:
    """Measure the time of one synced write of offsets, by the number of queues in it."""

    def entry(number: int) -> Entry:
        progress = Progress(
            last_call_monotonic_ms=0,
            token=1,
            committed_offset=number,
            delivered_offset=number,
            delivered_reserved=number + 2_000,
        )
        return encode_key(GroupQueue("group", "topic", "broker-a", number)), encode_progress(
            progress
        )

    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, LmdbDisk(Path(folder)) as progress:
        for count in (1, 100, 1_000):
            write = partial(progress.write_blocking, [entry(number) for number in range(count)])
            took = sorted(timed(write) for _ in range(100))
            show(f"offsets, synced write of {count} queues, p50", 1_000 * took[50], "ms")
        progress.write_blocking([entry(number) for number in range(100_000)])
        show("offsets, read 100,000 queues", 1_000 * timed(lambda: list(progress.read())), "ms")


async def send(cluster: LocalCluster) -> None:
    """Measure rates and times of sends, and how much a restarted storage node reads."""
    async with Admin(cluster.nameserver) as admin:
        for queues in (1, 8):
            await admin.create_topic(f"{TOPIC}-{queues}", queues)
    for queues in (1, 8):
        async with Producer(cluster.nameserver) as producer:
            begin = perf_counter()
            pending = []
            for number in range(100_000):
                pending.append(await producer.submit(f"{TOPIC}-{queues}", Message(BODY)))
                if number % 1_000 == 0:
                    await asyncio.sleep(0)
            for receipt in pending:
                await receipt
            show(f"publish to {queues} queues", 100_000 / (perf_counter() - begin), "messages/s")
            took = []
            for _ in range(300):
                begin = perf_counter()
                await producer.send(f"{TOPIC}-{queues}", BODY)
                took.append(perf_counter() - begin)
            show(f"one send at a time, {queues} queues, p50", 1_000 * sorted(took)[150], "ms")
    await cluster.restart("storage")
    report = json.loads((cluster.data_dir / "storage" / "recovery.json").read_text())
    show("recovery, log", report["scanned_bytes"] / 1e6, "MB")
    show("recovery, time", report["elapsed_ms"], "ms")


async def groups(cluster: LocalCluster) -> None:
    """Measure joins of a group, and the time until a killed process is no longer listed."""
    async with Admin(cluster.nameserver) as admin, connect(cluster.nameserver) as channel:
        await admin.create_topic(TOPIC, 8)
        stub = pb_grpc.NameserverServiceStub(channel)

        async def beat(group: str, number: int, topic: str = TOPIC) -> pb.Group:
            member = queue_pb2.Incarnation(
                client_id=f"member-{number:04}", incarnation_id=number + 1
            )
            request = pb.HeartbeatRequest(
                group=group, incarnation=member, subscriptions=[pb.Subscription(topic=topic)]
            )
            return (await stub.Heartbeat(request, timeout=30)).group

        begin = perf_counter()
        for number in range(100):
            await beat("one-by-one", number)
        show("100 joins, one after the other", 1_000 * (perf_counter() - begin), "ms")
        for what in ("100 joins at once", "100 heartbeats at once"):
            begin = perf_counter()
            async with asyncio.TaskGroup() as tasks:
                for number in range(100):
                    tasks.create_task(beat("at-once", number))
            show(what, 1_000 * (perf_counter() - begin), "ms")
        await admin.create_topic("crowded", 64)
        before, begin = await beat("crowd", 0, "crowded"), perf_counter()
        async with asyncio.TaskGroup() as tasks:
            joins = [tasks.create_task(beat("crowd", n, "crowded")) for n in range(1, 20)]
        show("20 members join 64 queues at once", 1_000 * (perf_counter() - begin), "ms")
        newest = max(join.result().generation for join in joins)
        show("generations of these joins", newest - before.generation, "")
        await _pushes(stub, lambda number: beat("pushed", number))
        cluster.auto_restart = False
        await cluster.kill("storage")
        begin = perf_counter()

        async def unlisted() -> bool:
            return all(node.service != "storage" for node in (await admin.cluster()).nodes)

        await until(unlisted)
        show("killed process no longer listed after", perf_counter() - begin, "s")


async def records() -> None:
    """Measure what one join writes to etcd, by members and queues of the group."""
    for count, queue_count in itertools.product((10, 100, 999), (64, 1_024)):
        with tempfile.TemporaryDirectory() as folder:
            async with (
                EtcdProcess(Path(folder)) as etcd,
                counted_store(etcd.endpoint, "figures", queue_count) as (session, store),
            ):
                await join_all(store, count)
                await store.join(member(count))
                show(f"{count} members, {queue_count} queues: join", session.last_bytes, "bytes")
                await store.leave("g", *incarnation_of(0))
                show(f"{count} members, {queue_count} queues: leave", session.last_bytes, "bytes")


async def _pushes(
    stub: pb_grpc.NameserverServiceAsyncStub, join: Callable[[int], Awaitable[object]]
) -> None:
    """Measure the time from a heartbeat to the push of the change to another member."""
    await join(0)
    spent_ms = []
    watch = stub.WatchGroup(pb.WatchGroupRequest(group="pushed"))
    await watch.read()
    for number in range(1, 51):
        begin = perf_counter()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_done(join(number)))
            await watch.read()
            spent_ms.append(1_000 * (perf_counter() - begin))
    watch.cancel()
    show("from a heartbeat to the push, median", sorted(spent_ms)[25], "ms")


async def _done(call: Awaitable[object]) -> None:
    await call


async def faults(cluster: LocalCluster) -> None:
    """Measure the longest gaps of a producer and a consumer when a process is killed or paused."""
    async with Admin(cluster.nameserver) as admin:
        await admin.create_topic(TOPIC, 4)
    flow = Flow(cluster.nameserver)
    async with (
        Consumer(cluster.nameserver, "steady", {TOPIC: "*"}, FROM_FIRST) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        producing = tasks.create_task(flow.produce())
        tasks.create_task(flow.consume(consumer))
        await asyncio.sleep(2)
        for victim in PROCESSES:
            begin = perf_counter()
            await cluster.kill(victim)
            await cluster.serving(victim)
            await asyncio.sleep(5)
            flow.show(f"{victim} killed and restarted", begin)
        for victim, seconds in PAUSES:
            begin = perf_counter()
            cluster.pause(victim)
            await asyncio.sleep(seconds)
            cluster.resume(victim)
            await asyncio.sleep(5)
            flow.show(f"{victim} paused for {seconds} s", begin)
        producing.cancel()
        await asyncio.sleep(3)
        consumer.stop()
    show("messages with a receipt and not handled", len(flow.sent - flow.handled.keys()), "")
    show("messages handled twice", sum(count - 1 for count in flow.handled.values()), "")


class Flow:
    """Numbered messages, one every few milliseconds, and the times of their sends and handlings."""

    def __init__(self, nameserver: str) -> None:
        self._nameserver = nameserver
        self._sent_at: list[float] = []
        self._handled_at: list[float] = []
        self.sent: set[bytes] = set()
        self.handled: dict[bytes, int] = {}

    async def produce(self) -> None:
        """Send until cancelled."""
        async with Producer(self._nameserver) as producer:
            while True:
                body = str(len(self.sent)).encode()
                await producer.send(TOPIC, body)
                self.sent.add(body)
                self._sent_at.append(perf_counter())
                await asyncio.sleep(0.005)

    async def consume(self, consumer: Consumer) -> None:
        """Handle until stopped."""
        async for message in consumer:
            self.handled[message.body] = self.handled.get(message.body, 0) + 1
            self._handled_at.append(perf_counter())

    def show(self, what: str, since: float) -> None:
        """Print the longest gaps since `since`."""
        show(f"{what}: producer, longest gap", longest_s(self._sent_at, since), "s")
        show(f"{what}: consumer, longest gap", longest_s(self._handled_at, since), "s")


async def owners(cluster: LocalCluster) -> None:
    """Measure for how long a queue has no owner: hand-overs, a killed leader, a killed consumer."""
    async with Admin(cluster.nameserver) as admin:
        await admin.create_topic(TOPIC, 8)
    released: dict[object, int] = {}
    took: list[int] = []
    granted_at: list[float] = []

    def seen(event: OwnershipEvent) -> None:
        if event.kind == "draining":
            released[event.queue] = event.monotonic_ms
        elif event.kind == "granted":
            granted_at.append(perf_counter())
            if event.queue in released:
                took.append(event.monotonic_ms - released.pop(event.queue))

    async def member(name: str, seconds: float) -> None:
        async with (
            Consumer(
                cluster.nameserver,
                "owners",
                {TOPIC: "*"},
                FROM_FIRST,
                client_id=name,
                on_ownership=seen,
            ) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(_drop_all(consumer))
            await asyncio.sleep(seconds)
            consumer.stop()

    flow = Flow(cluster.nameserver)
    async with asyncio.TaskGroup() as tasks:
        producing = tasks.create_task(flow.produce())
        staying = tasks.create_task(member("stays", 40))
        for number in range(6):
            await asyncio.sleep(1)
            await member(f"visits-{number}", 2)
        took.sort()
        show(f"hand-over, p50 of {len(took)}", took[len(took) // 2], "ms")
        show("hand-over, p99", took[len(took) * 99 // 100], "ms")
        granted_at.clear()
        await cluster.kill("lockmgr")
        begin = perf_counter()
        await member("comes-late", 12)
        show("lockmgr killed: first grant after", min(granted_at) - begin, "s")
        await staying
        await _kill_a_consumer(cluster.nameserver, seen, granted_at)
        producing.cancel()


async def _kill_a_consumer(
    nameserver: str, seen: Callable[[OwnershipEvent], None], granted_at: list[float]
) -> None:
    command = ("-m", "batonmq.cli", "--nameserver", nameserver, "consume", TOPIC)
    victim = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        *("--group", "successors", "--from", "first", "--follow"),
        stdout=asyncio.subprocess.DEVNULL,
    )
    await asyncio.sleep(4)
    granted_at.clear()
    os.kill(victim.pid, signal.SIGKILL)
    await victim.wait()
    begin = perf_counter()
    repeated = 0
    async with Consumer(
        nameserver, "successors", {TOPIC: "*"}, FROM_FIRST, on_ownership=seen
    ) as consumer:
        async for message in consumer:
            repeated += message.redelivered
            if len(granted_at) >= 8 and perf_counter() - begin > 35:
                consumer.stop()
    show("consumer killed: last queue granted after", granted_at[-1] - begin, "s")
    show("consumer killed: messages flagged redelivered", repeated, "")


async def _drop_all(consumer: Consumer) -> None:
    async for _ in consumer:
        pass


def show(what: str, value: float, unit: str) -> None:
    """Print one figure."""
    shown = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"
    print(f"{what:<58}{shown:>10} {unit}", flush=True)


def timed(work: Callable[[], object]) -> float:
    """Return the duration of `work` in seconds."""
    begin = perf_counter()
    work()
    return perf_counter() - begin


def best_s(work: Callable[[], object]) -> float:
    """Return the duration of the fastest of twenty runs, in seconds."""
    return min(timed(work) for _ in range(20))


def longest_s(times: Sequence[float], since: float) -> float:
    """Return the longest time without an event after `since`."""
    after = [since, *(at for at in times if at > since)]
    return max((b - a for a, b in itertools.pairwise(after)), default=0.0)


async def _in_cluster(measure: Callable[[LocalCluster], Coroutine[Any, Any, None]]) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        async with LocalCluster(Path(folder), ClusterOptions(), lambda _: None) as cluster:
            await measure(cluster)


ALONE = {"codec": codec, "compression": compression, "disk": disk, "records": records}
IN_CLUSTER = {"send": send, "groups": groups, "faults": faults, "owners": owners}


async def main(names: Sequence[str]) -> None:
    """Measure the named figures, or all."""
    for name in names or (*ALONE, *IN_CLUSTER):
        if name in ALONE:
            await ALONE[name]()
        else:
            await _in_cluster(IN_CLUSTER[name])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
