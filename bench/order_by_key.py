"""Throughput of a consumer that handles messages in order, if a few of them take long."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import count
from random import Random

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings, MessageOrder
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from bench.figures import Figure, Goal, figure, interleaved
from bench.setup import TOPIC, Setup

QUEUES, KEYS = 4, 10_000
SLOW, SLOW_S = 0.01, 1.0
_SLOW_BODY, _BODY = b"slow" * 25, b"fast" * 25
_groups = count()


async def order_by_key(setup: Setup) -> list[Figure]:
    """Measure a backlog of messages of 10,000 ordering keys, of which 1 % take a second each.

    The others take no time. The reference handles all messages of a queue one after the other.
    Both have the default limit of offsets beyond a message that is not acknowledged, and twenty
    times the reference is about what that limit allows.
    """
    options = ClusterOptions(auto_restart=False, log_level="WARNING")
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            LocalCluster(setup.folder / "cluster", options, start=start_program)
        )
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
        setup.say("filling")
        await _fill(cluster.nameserver, setup.sized(400_000, 20_000))
        warm_s, window_s = (5.0, 15.0) if not setup.quick else (1.0, 2.0)
        setup.say("consuming")

        async def rate(order: MessageOrder, span_max: int) -> float:
            settings = ConsumerSettings(
                consume_from="first",
                order=order,
                queue_concurrency=500,
                concurrency=QUEUES * 500,
                span_max=span_max,
                buffer_messages_max=span_max,
            )
            return await _rate(cluster.nameserver, settings, warm_s, window_s)

        default = ConsumerSettings().span_max
        rates = await interleaved(
            {
                "queue": lambda: rate("queue", default),
                "key": lambda: rate("key", default),
                "key, span": lambda: rate("key", 5 * default),
            },
            setup.sized(3, 1),
        )
    what = f"order by key, {KEYS:,} keys, {SLOW:.0%} of the messages take {SLOW_S:g} s"
    return [
        figure(
            f"{what}, {name}",
            rates[subject],
            "messages/s",
            Goal(value_min=20 * rates["queue"]),
            reference=rates["queue"],
        )
        for subject, name in (("key", "default span"), ("key, span", "5 times the span"))
    ]


async def _fill(nameserver: str, total: int) -> None:
    random = Random(1)
    async with Producer(nameserver) as producer:
        for _ in range(total):
            body = _SLOW_BODY if random.random() < SLOW else _BODY
            key = f"account-{random.randrange(KEYS)}"
            await producer.submit(TOPIC, Message(body), ordering_key=key)


async def _rate(
    nameserver: str, settings: ConsumerSettings, warm_s: float, window_s: float
) -> float:
    """Return the messages per second that one consumer handles, after `warm_s`."""
    handled = 0

    async def handle(message: ReceivedMessage) -> None:
        nonlocal handled
        if message.body == _SLOW_BODY:
            await asyncio.sleep(SLOW_S)
        handled += 1

    group = f"bench-{next(_groups)}"
    async with (
        Consumer(nameserver, group, {TOPIC: "*"}, settings) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.run(handle))
        await asyncio.sleep(warm_s)
        before = handled
        await asyncio.sleep(window_s)
        found = (handled - before) / window_s
        consumer.stop()
    return found
