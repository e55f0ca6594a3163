"""Compacted topics as programs see them: keys are demanded, groups pass over the holes.

Goal: a group that reads a compacted topic gets the newest message of each key, its lag counts
messages, and it is never stuck at a removed one.
Method: the in-memory broker in virtual time, with the real services and their intervals.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from batonmq import Consumer, ConsumerSettings, Producer, ReceivedMessage
from batonmq._core.queues import QueueRef
from batonmq.admin import Admin, Compaction, TopicStats
from batonmq.errors import BadBatch, InvalidArgument
from batonmq_server.testing import MemoryBroker, run_virtual

TOPIC, GROUP, KEYS = "prices", "tables", 5
QUEUE = QueueRef(TOPIC, "broker-0", 0)


@asynccontextmanager
async def scene() -> AsyncIterator[tuple[MemoryBroker, Admin, Producer]]:
    """Yield a broker with a compacted topic of one queue."""
    async with MemoryBroker() as broker:
        address, environment = broker.nameserver, broker.environment
        async with (
            Admin(address, environment=environment) as admin,
            Producer(address, environment=environment) as producer,
        ):
            await admin.create_topic(TOPIC, 1, compaction=Compaction(dirty_percent=1))
            yield broker, admin, producer


async def send(producer: Producer, *numbers: int) -> None:
    for number in numbers:
        await producer.send(TOPIC, b"%d" % number, ordering_key=f"key-{number % KEYS}")


async def wait_for_count(admin: Admin, count: int, offset: int = 0) -> None:
    async with asyncio.timeout(600):
        while (await admin.message_counts({QUEUE: offset}))[QUEUE] != count:  # noqa: ASYNC110
            await asyncio.sleep(1)


async def consume(broker: MemoryBroker, count: int) -> list[tuple[int, bytes]]:
    """Consume this number of messages as a member of the group; return offsets and bodies."""
    found: list[tuple[int, bytes]] = []
    consumer = Consumer(
        broker.nameserver,
        GROUP,
        {TOPIC: "*"},
        ConsumerSettings(consume_from="first"),
        environment=broker.environment,
    )

    async def handle(message: ReceivedMessage) -> None:
        found.append((message.offset, message.body))
        if len(found) == count:
            consumer.stop()

    async with consumer, asyncio.timeout(600):
        await consumer.run(handle)
    return found


async def lag(admin: Admin) -> tuple[int | None, str]:
    (queue,) = [one for one in await admin.why_stuck(GROUP) if one.topic == TOPIC]
    (row,) = [one for one in (await admin.group_progress(GROUP)).queues if one.topic == TOPIC]
    assert row.lag == queue.lag
    return queue.lag, queue.reason


def test_group_gets_the_newest_messages_and_its_lag_counts_messages() -> None:
    async def run() -> None:
        async with scene() as (broker, admin, producer):
            await send(producer, *range(100))
            await wait_for_count(admin, KEYS)
            found = await consume(broker, KEYS)
            assert found == [(number, b"%d" % number) for number in range(95, 100)]
            assert (await lag(admin))[0] == 0, "the removed messages are no work"
            (extent,) = (await admin.describe_topic(TOPIC)).queues
            assert (extent.first_offset, extent.next_offset, extent.count) == (0, 100, KEYS)
            ((stats,), problems) = await TopicStats(admin, TOPIC).look()
            assert (stats.count, problems) == (KEYS, ())
            assert stats.stored_bytes is not None and stats.stored_bytes < KEYS * 300
            await send(producer, *range(100, 200))
            await wait_for_count(admin, KEYS)
            assert (await lag(admin))[0] == KEYS
            assert len(await consume(broker, KEYS)) == KEYS
            assert (await lag(admin))[0] == 0

    run_virtual(run())


def test_committed_offset_passes_over_a_hole_at_the_end() -> None:
    """The newest messages of the queue are tombstones, which are removed before a group comes."""

    async def run() -> None:
        async with scene() as (broker, admin, producer):
            settings = Compaction(tombstone_retention_ms=1_000, dirty_percent=1)
            await admin.update_topic(TOPIC, compaction=settings)
            await send(producer, 0, 1)
            await producer.send(TOPIC, b"", ordering_key="key-1")
            await wait_for_count(admin, 1)
            assert await consume(broker, 1) == [(0, b"0")]
            async with asyncio.timeout(600):
                while await lag(admin) != (0, "IDLE"):
                    await consume_nothing(broker)

    run_virtual(run())


async def consume_nothing(broker: MemoryBroker) -> None:
    """Be a member of the group for a few seconds."""
    settings = ConsumerSettings(consume_from="first")
    async with (
        Consumer(
            broker.nameserver, GROUP, {TOPIC: "*"}, settings, environment=broker.environment
        ) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.run(_unexpected))
        await asyncio.sleep(5)
        consumer.stop()


async def _unexpected(message: ReceivedMessage) -> None:
    raise AssertionError(message)


def test_producer_refuses_a_message_that_a_compacted_topic_can_not_take() -> None:
    async def run() -> None:
        async with scene() as (_, admin, producer):
            with pytest.raises(BadBatch, match="no ordering key") as refused:
                await producer.send(TOPIC, b"1")
            assert "ordering_key" in refused.value.remedy
            await admin.create_topic("two", 2, compaction=Compaction())
            first, second = (QueueRef("two", "broker-0", number) for number in (0, 1))
            done = await producer.send("two", b"1", ordering_key="k")
            other = second if done.queue == first else first
            with pytest.raises(InvalidArgument, match="not that of the ordering key"):
                await producer.send("two", b"2", ordering_key="k", queue=other)
            assert (
                await producer.send("two", b"2", ordering_key="k", queue=done.queue)
            ).offset == 1

    run_virtual(run())
