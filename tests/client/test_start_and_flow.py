"""The start offset of a group, and the flow limits of a member.

Goal: a group without progress starts where `consume_from` says, by time too, on small topics; the
limits by count, span and bytes hold, are reported, and end when there is room.
Method: the start on a real cluster or the in-memory broker; the limits on simulated services, with
members that take no message until the test does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import pytest

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.queues import QueueRef
from batonmq._producer.producer import Producer
from batonmq.admin.admin import Admin
from batonmq_server.testing import MemoryBroker, run_virtual
from tests.client.group import QUICK, handle_all, scene
from tests.client.group_twins import GROUP, TOPIC, Twins, twins
from tests.support.conditions import until

# ---- the start


@pytest.mark.e2e
async def test_group_starts_at_the_first_message_stored_at_or_after_a_time(
    nameserver: str,
) -> None:
    async with scene(nameserver, queue_count=1) as at, Producer(nameserver) as producer:
        times = [(await producer.send(at.topic, b"0")).store_unix_ms]
        while times[-1] == times[0]:
            receipt = await producer.send(at.topic, b"%d" % len(times))
            times.append(receipt.store_unix_ms)
        settings = replace(QUICK, consume_from="timestamp", start_unix_ms=times[-1])
        async with handle_all(at, "a", settings=settings):
            await until(lambda: bool(at.handled))
            await producer.send(at.topic, b"new")
            await until(lambda: at.bodies["new"])
        assert at.by("a") == [str(len(times) - 1), "new"]
        async with Admin(nameserver) as admin:
            assert (await admin.describe_group(at.group)).consume_from == "timestamp"


@pytest.mark.e2e
async def test_timestamp_without_a_time_means_the_last_half_hour(nameserver: str) -> None:
    async with scene(nameserver) as at:
        await at.send([str(n) for n in range(8)])
        async with handle_all(at, "a", settings=replace(QUICK, consume_from="timestamp")):
            await until(lambda: len(at.handled) == 8)


@pytest.mark.parametrize("ownership", ["on", "off"])
def test_queues_added_while_the_group_was_down_are_read_from_their_first_message(
    ownership: Literal["on", "off"],
) -> None:
    async def run() -> list[bytes]:
        async with MemoryBroker() as broker, broker.producer() as producer:
            await broker.create_topic("orders", queues=1)
            async with Admin(broker.nameserver, environment=broker.environment) as admin:
                await admin.update_group("billing", ownership=ownership)
                await producer.send("orders", b"before the group")
                await consume_rest(broker)
                await admin.update_topic("orders", queue_count=4)
                for n in range(8):
                    queue = QueueRef("orders", "broker-0", n % 4)
                    await producer.send("orders", b"%d" % n, queue=queue)
            return await consume_rest(broker)

    async def consume_rest(broker: MemoryBroker) -> list[bytes]:
        bodies: list[bytes] = []

        async def handle(message: ReceivedMessage) -> None:
            bodies.append(message.body)

        settings = ConsumerSettings(consume_from="last")
        async with (
            broker.consumer("billing", {"orders": "*"}, settings) as consumer,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(consumer.run(handle))
            await broker.settled("billing")
            consumer.stop()
        return bodies

    assert sorted(run_virtual(run())) == [b"%d" % n for n in range(8)]


# ---- the flow limits


@asynccontextmanager
async def member(at: Twins, **settings: Any) -> AsyncIterator[Consumer]:
    """Run a member that has all queues and takes no message by itself."""
    quick = ConsumerSettings(
        **{"commit_interval_ms": 50, "drain_timeout_ms": 100, "send_back": False, **settings}
    )
    async with Consumer(at.address, GROUP, {TOPIC: "*"}, quick, client_id="a") as consumer:
        at.nameserver.assign("a", range(at.nameserver.queue_count))
        yield consumer


async def take(consumer: Consumer, count: int) -> list[bytes]:
    async with asyncio.timeout(40):
        return [(await anext(consumer)).body for _ in range(count)]


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        ("count", {"buffer_messages_max": 4, "pull_messages_max": 2}),
        ("count", {"span_max": 4}),
        ("bytes", {"buffer_bytes_max": 30, "pull_messages_max": 1}),
    ],
)
async def test_reached_limit_stops_pulls_until_messages_are_taken(
    reason: str, settings: dict[str, int]
) -> None:
    async with twins(1) as at:
        at.storage.send(0, *(f"message-{n:02}" for n in range(20)))  # 10 bytes each
        async with member(at, consume_from="first", **settings) as consumer:
            await until(lambda: list(consumer.flow.values()) == [reason])
            offset = at.storage.pulls[-1].offset + at.storage.pulls[-1].messages_max
            assert offset <= 4
            assert await take(consumer, 20) == [b"message-%02d" % n for n in range(20)]
            await until(lambda: not consumer.flow)


async def test_message_that_is_not_acknowledged_stops_pulls_at_the_span() -> None:
    gate = asyncio.Event()

    async def handle(message: ReceivedMessage) -> None:
        if message.offset == 0:
            await gate.wait()

    async with twins(1) as at, asyncio.TaskGroup() as tasks:
        at.storage.send(0, *map(str, range(20)))
        settings = {"consume_from": "first", "span_max": 4, "queue_concurrency": 2}
        async with member(at, **settings) as consumer:
            tasks.create_task(consumer.run(handle))
            await until(lambda: list(consumer.flow.values()) == ["span"])
            offset = at.storage.pulls[-1].offset + at.storage.pulls[-1].messages_max
            assert offset <= 4
            gate.set()
            await until(lambda: at.committed(0) == 20)
            consumer.stop()


async def test_bytes_of_one_queue_delay_others_but_do_not_starve_them() -> None:
    async with twins(2) as at:
        at.storage.send(0, *("x" * 10 for _ in range(10)))
        settings = {"buffer_bytes_max": 30, "pull_messages_max": 1, "consume_from": "first"}
        async with member(at, **settings) as consumer:
            await until(lambda: [q.queue_id for q in consumer.flow] == [0])
            at.storage.send(1, "y1", "y2")
            await until(lambda: [q.queue_id for q in consumer.flow] == [0, 1])
            assert set(consumer.flow.values()) == {"bytes"}
            assert at.storage.pulls_of(1)[-1].offset == 0, "a queue has one share of the bytes"
            taken = await take(consumer, 12)
            assert sorted(taken) == sorted([b"x" * 10] * 10 + [b"y1", b"y2"])
            await until(lambda: not consumer.flow)
