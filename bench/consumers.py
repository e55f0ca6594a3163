"""Throughput of one consumer, and the CPU time of its process per message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import count
from time import process_time

from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._connection.channels import connect
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.message_batch import MessageBatch
from batonmq.admin.admin import Admin
from batonmq_server.local.child_process import start_program
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from bench.bench_cluster import TIMEOUT_S
from bench.figures import Figure, Goal, figure, interleaved
from bench.setup import TOPIC, Setup, batch

QUEUES = 8
RECORD_BYTES, BATCH_RECORDS = 100, 1_000
_groups = count()


async def consumers(setup: Setup) -> list[Figure]:
    """Measure a backlog of 100 B messages with handlers of both forms that do nothing.

    The reference iterates over the same backlog. Figures are messages per second of CPU time of
    this process, without the services, so that other load of the machine has little effect.
    """
    total = QUEUES * BATCH_RECORDS * setup.sized(50, 5)
    options = ClusterOptions(auto_restart=False, log_level="WARNING")
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            LocalCluster(setup.folder / "cluster", options, start=start_program)
        )
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic(TOPIC, QUEUES)
        channel = await stack.enter_async_context(connect(cluster.addresses["storage"]))
        setup.say("filling")
        await _fill(storage_grpc.StorageServiceStub(channel), total)
        setup.say("consuming")

        async def rate(use: Callable[[Consumer, int], object]) -> float:
            settings = ConsumerSettings(consume_from="first")
            group = f"bench-{next(_groups)}"
            async with Consumer(cluster.nameserver, group, {TOPIC: "*"}, settings) as consumer:
                begin = process_time()
                await use(consumer, total)  # type: ignore[misc]
                return total / (process_time() - begin)

        rates = await interleaved(
            {
                "iterated": lambda: rate(iterate),
                "one": lambda: rate(handle_one_by_one),
                "batches": lambda: rate(handle_batches),
            },
            setup.sized(7, 1),
        )
    return [
        figure(
            f"consumer, {name}, 100 B messages per second of CPU",
            rates[form],
            "messages/s",
            Goal(value_min=goal),
            reference=rates["iterated"],
        )
        for form, name, goal in (
            ("batches", "batch handler", 100_000),
            ("one", "handler of one message", 30_000),
        )
    ]


async def iterate(consumer: Consumer, total: int) -> None:
    """Iterate over `count` messages."""
    handled = 0
    async for _ in consumer:
        handled += 1
        if handled == total:
            consumer.stop()


async def handle_one_by_one(consumer: Consumer, total: int) -> None:
    """Handle `count` messages with a coroutine function."""
    handled = 0

    async def handle(_: ReceivedMessage) -> None:
        nonlocal handled
        handled += 1
        if handled == total:
            consumer.stop()

    await consumer.run(handle)


async def handle_batches(consumer: Consumer, total: int) -> None:
    """Handle `count` messages with a coroutine function that takes lists."""
    handled = 0

    async def handle(messages: MessageBatch) -> None:
        nonlocal handled
        handled += len(messages)
        if handled == total:
            consumer.stop()

    await consumer.run_batches(handle)


async def _fill(storage: storage_grpc.StorageServiceAsyncStub, total: int) -> None:
    async def fill(queue_id: int) -> None:
        raw = batch(RECORD_BYTES, queue_id=queue_id, count=BATCH_RECORDS)
        request = pb.AppendRequest(batches=[raw], durability=pb.DURABILITY_FSYNCED)
        for _ in range(total // QUEUES // BATCH_RECORDS):
            answer = await storage.Append(request, timeout=TIMEOUT_S)
            assert answer.outcomes[0].HasField("receipt"), answer

    async with asyncio.TaskGroup() as tasks:
        for queue_id in range(QUEUES):
            tasks.create_task(fill(queue_id))
