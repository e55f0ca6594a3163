"""Request-reply: time of a request against a send plus a delivery, by turns in one run."""

from __future__ import annotations

import asyncio
from statistics import median
from time import perf_counter

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from bench.figures import Figure, Goal, figure
from bench.setup import TOPIC, Setup

QUEUES = 8
BODY = b"x" * 100
WARM_UP_COUNT = 200


async def requests(setup: Setup) -> list[Figure]:
    """Measure one request at a time, and by turns one send and its delivery to the handler."""
    options = ClusterOptions(auto_restart=False, log_level="WARNING")
    handled = asyncio.Event()

    async def handle(message: ReceivedMessage) -> bytes | None:
        if message.is_request:
            return message.body
        handled.set()
        return None

    delivered_ms: list[float] = []
    replied_ms: list[float] = []
    count = setup.sized(3_000, 300)
    async with LocalCluster(setup.folder / "cluster", options, start=start_program) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
        settings = ConsumerSettings(consume_from="first")
        async with (
            Producer(cluster.nameserver) as producer,
            Consumer(cluster.nameserver, "bench", {TOPIC: "*"}, settings) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(consumer.run(handle))
            setup.say("requests, and sends with their delivery, by turns")
            for number in range(WARM_UP_COUNT + count):
                handled.clear()
                begin_s = perf_counter()
                await producer.send(TOPIC, BODY)
                await handled.wait()
                middle_s = perf_counter()
                await producer.request(TOPIC, BODY, timeout_ms=30_000)
                end_s = perf_counter()
                if number >= WARM_UP_COUNT:
                    delivered_ms.append(1_000 * (middle_s - begin_s))
                    replied_ms.append(1_000 * (end_s - middle_s))
            consumer.stop()
    return [
        figure(
            "request-reply p50 against send plus delivery",
            median(replied_ms),
            "ms",
            Goal(ratio_max=2.5),
            reference=median(delivered_ms),
        )
    ]
