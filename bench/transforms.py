"""The rate of a transformer against consuming and producing apart, by turns in one run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from time import perf_counter

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.outputs import Output
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from bench.consumers import handle_one_by_one
from bench.figures import Figure, Goal, figure, interleaved
from bench.setup import TOPIC, Setup

QUEUES = 8
BODY = b"x" * 100
OUTPUTS, KEYED = "bench-outputs", "bench-keyed"
SETTINGS = ConsumerSettings(consume_from="first", send_back=False)
BY_KEY = replace(SETTINGS, order="key", queue_concurrency=64)
KEYS = 1_000
_groups = count()


async def transforms(setup: Setup) -> list[Figure]:
    """Measure one output of 100 B for each message of a backlog.

    The reference is the rate of a program that first consumes the messages, and then sends as many:
    the time of both together. Sends are the fastest form, without a task for each message.
    """
    total = setup.sized(40_000, 16_000)
    options = ClusterOptions(auto_restart=False, log_level="WARNING")
    async with LocalCluster(setup.folder / "cluster", options, start=start_program) as cluster:
        async with Admin(cluster.nameserver) as admin:
            for topic in (TOPIC, KEYED, OUTPUTS):
                await admin.create_topic(topic, QUEUES)
        setup.say("filling")
        await _send(cluster.nameserver, TOPIC, total)
        await _send(cluster.nameserver, KEYED, total, KEYS)

        async def consume(
            use: Callable[[Consumer], Awaitable[object]],
            topic: str = TOPIC,
            settings: ConsumerSettings = SETTINGS,
        ) -> float:
            group = f"bench-{next(_groups)}"
            async with Consumer(cluster.nameserver, group, {topic: "*"}, settings) as consumer:
                begin_s = perf_counter()
                await use(consumer)
                return perf_counter() - begin_s

        setup.say("transforming, consuming and sending, by turns")
        seconds = await interleaved(
            {
                "transform": lambda: consume(lambda consumer: _transform(consumer, total)),
                "keyed": lambda: consume(
                    lambda consumer: _transform(consumer, total), KEYED, BY_KEY
                ),
                "consume": lambda: consume(lambda consumer: handle_one_by_one(consumer, total)),
                "send": lambda: _send(cluster.nameserver, OUTPUTS, total),
            },
            rounds=setup.sized(5, 2),
        )
    apart = seconds["consume"] + seconds["send"]
    return [
        figure(
            "transformer, one output of 100 B, against consuming and producing apart",
            total / seconds["transform"],
            "msg/s",
            Goal(ratio_min=0.6),
            reference=total / apart,
        ),
        figure(
            "the same in the order of 1,000 keys, against any order",
            total / seconds["keyed"],
            "msg/s",
            Goal(ratio_min=0.2),
            reference=total / seconds["transform"],
        ),
    ]


async def _transform(consumer: Consumer, total: int) -> None:
    """Transform all messages; return when their outputs are stored."""
    handled = 0

    async def handle(message: ReceivedMessage) -> Output:
        nonlocal handled
        handled += 1
        if handled == total:
            consumer.stop()
        return Output(message.body)

    await consumer.transform(handle, to=OUTPUTS)
    transformer = consumer._transformer
    assert transformer is not None
    while transformer.pending_count:  # noqa: ASYNC110  nothing tells its end
        await asyncio.sleep(0.001)


async def _send(nameserver: str, topic: str, total: int, keys: int = 0) -> float:
    """Send messages, with so many ordering keys; return the seconds until all are stored."""
    async with Producer(nameserver) as producer:
        begin_s = perf_counter()
        for number in range(total):
            key = f"key-{number % keys}" if keys else None
            await producer.submit(topic, Message(BODY), ordering_key=key)
        await producer.flush()
        return perf_counter() - begin_s
