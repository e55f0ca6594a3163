"""Delayed messages: lateness, throughput of many at once, and the cost of a waiting one."""

from __future__ import annotations

import asyncio
import tracemalloc
from statistics import quantiles
from time import perf_counter

from batonmq._common.clock import Clock
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from batonmq_server.storage.core.delay_queue import DelayedBatch, DelayQueue
from bench.figures import Figure, Goal, figure
from bench.setup import TOPIC, Setup

QUEUES = 8
DUE_PER_S = 2_000
DELAY_MS = 2_000
TICKS_PER_S = 50
DAY_MS = 86_400_000


async def delays(setup: Setup) -> list[Figure]:
    """Measure 2,000 due and 2,000 scheduled messages a second; then many that are due at once."""
    options = ClusterOptions(auto_restart=False, log_level="WARNING")
    async with LocalCluster(setup.folder / "cluster", options, start=start_program) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
        settings = ConsumerSettings(consume_from="first")
        async with (
            Producer(cluster.nameserver) as producer,
            Consumer(cluster.nameserver, "bench", {TOPIC: "*"}, settings) as consumer,
        ):
            setup.say("2,000 due messages a second")
            stored, received = await _steady(producer, consumer, setup.sized(20, 3))
            setup.say("many due at once")
            rate = await _burst(producer, consumer, setup.sized(40_000, 4_000))
    setup.say("memory")
    return [
        *(
            figure(
                f"lateness at 2,000 due messages/s, {where}, p99",
                quantiles(late, n=100)[98],
                "ms",
                Goal(value_max=200),
            )
            for where, late in (("written to the queue", stored), ("at the consumer", received))
        ),
        figure("due at once, at the consumer", rate, "messages/s", Goal(value_min=DUE_PER_S)),
        figure(
            "memory of a message that waits",
            _bytes_each(setup.sized(1_000_000, 100_000)),
            "bytes",
            Goal(value_max=24),
        ),
    ]


async def _steady(
    producer: Producer, consumer: Consumer, seconds: int
) -> tuple[list[int], list[int]]:
    """Return the lateness of each message in its queue and at the consumer, in milliseconds.

    The messages of the first second are left out.
    """
    clock = Clock()
    count = DUE_PER_S * seconds
    stored: list[int] = []
    received: list[int] = []

    async def send() -> None:
        now = asyncio.get_running_loop().time
        begin = now()
        for tick in range(TICKS_PER_S * seconds):
            for _ in range(DUE_PER_S // TICKS_PER_S):
                at = clock.unix_ms() + DELAY_MS
                await producer.submit(TOPIC, Message(b"%d" % at), deliver_at_unix_ms=at)
            await asyncio.sleep(max(0, begin + (tick + 1) / TICKS_PER_S - now()))

    async def receive() -> None:
        async for message in consumer:
            at = int(message.body)
            received.append(clock.unix_ms() - at)
            stored.append(message.store_unix_ms - at)
            if len(received) == count:
                return

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        tasks.create_task(receive())
    return stored[DUE_PER_S:], received[DUE_PER_S:]


async def _burst(producer: Producer, consumer: Consumer, count: int) -> float:
    """Return the messages per second from the due time until the consumer has the last one."""
    at = Clock().unix_ms() + 2_000 + count
    for _ in range(count):
        await producer.submit(TOPIC, Message(b"burst"), deliver_at_unix_ms=at)
    await producer.flush()
    left = at - Clock().unix_ms()
    assert left > 0, "the messages were due before all were scheduled"
    await asyncio.sleep(left / 1000)
    begin, got = perf_counter(), 0
    async for _ in consumer:
        got += 1
        if got == count:
            break
    return count / (perf_counter() - begin)


def _bytes_each(count: int) -> float:
    levels = DelayQueue()
    tracemalloc.start()
    try:
        for position in range(count):
            levels.add(DelayedBatch(DAY_MS + position * 7_919 % DAY_MS, position, position))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return used / count
