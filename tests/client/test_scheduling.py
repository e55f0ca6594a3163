"""Scheduled messages.

Goal: a scheduled message is delivered when due, once, with all its fields, or is cancelled, even if
the storage node is killed.
Method: a real cluster; the store time of a received message is compared with its due time.
"""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from baton.storage.v1 import schedule_service_pb2_grpc as schedule_grpc
from batonmq._blocking import BlockingProducer
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_to_pb
from batonmq._connection.directory import ClientEnvironment
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.delays import AHEAD_MS_MAX
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.send_buffer import ProducerClosed
from batonmq.admin.admin import Admin
from batonmq.errors import (
    InvalidArgument,
    LimitExceeded,
    NotScheduled,
    QueueNotFound,
    TopicNotFound,
    Unreachable,
)
from tests.client.twins import Context, twins
from tests.support.clock import WrongClock
from tests.support.cluster import local_cluster
from tests.support.conditions import until
from tests.support.grpc_server import serving_at

BROKER = "broker-0"
FROM_FIRST = ConsumerSettings(consume_from="first")


async def new_topic(nameserver: str, queue_count: int = 4) -> str:
    name = f"t{secrets.token_hex(6)}"
    async with Admin(nameserver) as admin:
        await admin.create_topic(name, queue_count)
    return name


async def receive(nameserver: str, topic: str, count: int) -> list[ReceivedMessage]:
    """Return the first `count` messages of a topic."""
    messages: list[ReceivedMessage] = []
    async with Consumer(nameserver, f"g{topic}", {topic: "*"}, FROM_FIRST) as consumer:
        async for message in consumer:
            messages.append(message)
            if len(messages) == count:
                consumer.stop()
    return messages


async def test_scheduled_message_is_delivered_when_due_with_all_its_fields(nameserver: str) -> None:
    topic = await new_topic(nameserver)
    async with Producer(nameserver) as producer:
        before = Clock().unix_ms()
        receipt = await producer.send(
            topic, b"later", tag="paid", keys=["a", "b"], properties={"x": "y"}, delay_ms=700
        )
        plain = await producer.send(topic, b"now")
        assert before + 700 <= receipt.deliver_unix_ms <= Clock().unix_ms() + 700
        assert receipt.queue.topic == plain.queue.topic == topic
        assert not receipt.duplicate
    by_body = {one.body: one for one in await receive(nameserver, topic, 2)}
    now, later = by_body[b"now"], by_body[b"later"]
    assert (now.queue, now.store_unix_ms) == (plain.queue, plain.store_unix_ms)
    assert (later.tag, tuple(later.keys), dict(later.properties)) == (
        "paid", ("a", "b"), {"x": "y"},
    )  # fmt: skip
    assert later.queue == receipt.queue
    assert later.store_unix_ms >= receipt.deliver_unix_ms


async def test_delay_level_and_due_time_determine_the_delivery(nameserver: str) -> None:
    topic = await new_topic(nameserver)
    async with Producer(nameserver) as producer:
        now = Clock().unix_ms()
        past = await producer.send(topic, b"past", deliver_at_unix_ms=now - 1_000)
        assert past.deliver_unix_ms == now - 1_000
        (message,) = await receive(nameserver, topic, 1)
        assert message.body == b"past"
        now = Clock().unix_ms()
        level = await producer.send(topic, b"level", delay_level=1)
        exact = await producer.send(topic, b"at", deliver_at_unix_ms=now + 1_000)
        assert 1_000 <= level.deliver_unix_ms - now < 31_000
        assert exact.deliver_unix_ms == now + 1_000
    due = {b"level": level.deliver_unix_ms, b"at": exact.deliver_unix_ms}
    later = await receive(nameserver, topic, 2)
    assert {one.body for one in later} == due.keys()
    assert all(one.store_unix_ms >= due[one.body] for one in later)


@pytest.mark.parametrize("behind_ms", [600_000, -600_000])
async def test_delay_does_not_depend_on_the_wall_clock_of_the_sender(
    nameserver: str, behind_ms: int
) -> None:
    topic = await new_topic(nameserver)
    environment = ClientEnvironment(clock=WrongClock(behind_ms))
    async with Producer(nameserver, environment=environment) as producer:
        before = Clock().unix_ms()
        delay = await producer.send(topic, b"delay", delay_ms=60_000)
        level = await producer.send(topic, b"level", delay_level=5)
        after = Clock().unix_ms()
        for receipt in (delay, level):
            assert before + 60_000 <= receipt.deliver_unix_ms <= after + 60_000
        at = await producer.send(topic, b"at", deliver_at_unix_ms=before + 30_000)
        assert at.deliver_unix_ms == before + 30_000


async def test_cancelled_message_is_not_delivered(nameserver: str) -> None:
    topic = await new_topic(nameserver, 1)
    async with Producer(nameserver) as producer:
        cancelled = await producer.send(topic, b"cancelled", delay_ms=5_000)
        await producer.send(topic, b"kept", delay_ms=5_100)
    async with Producer(nameserver) as other:
        await other.cancel(cancelled.schedule_id)
        with pytest.raises(NotScheduled):
            await other.cancel(cancelled.schedule_id)
        (message,) = await receive(nameserver, topic, 1)
        assert (message.body, message.offset) == (b"kept", 0)
        with pytest.raises(InvalidArgument):
            await other.cancel("nonsense")


async def test_cancel_at_an_unknown_broker_is_unreachable(nameserver: str) -> None:
    async with Producer(nameserver, ProducerSettings(delivery_timeout_ms=300)) as producer:
        with pytest.raises(Unreachable):
            await producer.cancel("elsewhere-5")


async def test_scheduled_message_keeps_its_queue_and_its_ordering_key(nameserver: str) -> None:
    topic = await new_topic(nameserver)
    async with Producer(nameserver) as producer:
        third = QueueRef(topic, BROKER, 2)
        receipt = await producer.send(topic, b"a", queue=third, delay_ms=10)
        plain = await producer.send(topic, b"b", ordering_key="k")
        later = await producer.send(topic, b"c", ordering_key="k", delay_ms=10)
        assert receipt.queue == third
        assert later.queue == plain.queue


async def test_invalid_scheduled_message_is_refused_before_it_is_sent(nameserver: str) -> None:
    topic = await new_topic(nameserver)
    async with Producer(nameserver) as producer:
        with pytest.raises(LimitExceeded):
            await producer.send(topic, b"a", delay_ms=AHEAD_MS_MAX + 60_000)
        with pytest.raises(InvalidArgument):
            await producer.send(topic, b"a", delay_ms=5, delay_level=5)
        with pytest.raises(TopicNotFound):
            await producer.send("unknown", b"a", delay_ms=5)


async def test_many_scheduled_messages_have_distinct_ids(nameserver: str) -> None:
    topic = await new_topic(nameserver)
    async with Producer(nameserver) as producer:
        pending = [
            await producer.submit(topic, Message(b"%d" % n), delay_ms=600_000) for n in range(3_000)
        ]
        receipts = [await one for one in pending]
        assert len({one.schedule_id for one in receipts}) == 3_000
        assert len({one.queue for one in receipts}) == 4
        for receipt in receipts[::1_000]:
            await producer.cancel(receipt.schedule_id)


async def test_close_stores_all_scheduled_messages(nameserver: str) -> None:
    topic = await new_topic(nameserver)
    async with Producer(nameserver) as producer:
        pending = [await producer.submit(topic, Message(b"a"), delay_ms=50) for _ in range(100)]
        await producer.close()
        with pytest.raises(ProducerClosed):
            await producer.submit(topic, Message(b"a"), delay_ms=50)
    assert len({(await one).schedule_id for one in pending}) == 100


class _Lost(schedule_grpc.ScheduleServiceServicer):
    """A storage node that loses its first answer, and then has no queue any more."""

    def __init__(self) -> None:
        self.call_count = 0

    async def Schedule(
        self, request: schedule_pb.ScheduleRequest, context: Context
    ) -> schedule_pb.ScheduleResponse:
        self.call_count += 1
        if self.call_count == 1:
            raise Unreachable("killed before it answered")
        gone = schedule_pb.ScheduleOutcome(error=error_to_pb(QueueNotFound("gone")))
        return schedule_pb.ScheduleResponse(outcomes=[gone] * len(request.items))


async def test_error_says_that_an_earlier_attempt_may_have_stored_the_scheduled_message() -> None:
    lost = _Lost()  # type: ignore[abstract]
    add: Any = partial(schedule_grpc.add_ScheduleServiceServicer_to_server, lost)
    settings = ProducerSettings(delivery_timeout_ms=5_000)
    async with twins(orders=1) as at, serving_at(add) as at.nameserver.storage_address:
        producer = Producer(at.address, settings)
        with pytest.raises(Unreachable, match="gone; an earlier attempt may have stored"):
            async with producer:
                await producer.send("orders", b"a", delay_ms=600_000)
    assert lost.call_count > 1


def test_blocking_producer_schedules_and_cancels(nameserver: str) -> None:
    topic = asyncio.run(new_topic(nameserver))
    with BlockingProducer(nameserver) as producer:
        receipt = producer.send(topic, b"a", delay_ms=600_000)
        producer.cancel(receipt.schedule_id)
        with pytest.raises(NotScheduled):
            producer.cancel(receipt.schedule_id)


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(120)
async def test_kill_9_of_storage_loses_and_duplicates_no_scheduled_message(tmp_path: Path) -> None:
    sent: dict[int, int] = {}
    received: list[ReceivedMessage] = []
    stop = asyncio.Event()

    async def produce(nameserver: str) -> None:
        async with Producer(nameserver) as producer:
            while not stop.is_set():
                begin = len(sent)
                pending = [
                    await producer.submit("later", Message(b"%d" % n), delay_ms=300 + n % 1_000)
                    for n in range(begin, begin + 50)
                ]
                for number, one in enumerate(pending, start=begin):
                    sent[number] = (await one).deliver_unix_ms

    storage = {"segment_bytes": 16 * 1024 * 1024}
    async with local_cluster(tmp_path, storage=storage) as cluster:
        async with Admin(cluster.nameserver) as admin:
            await admin.create_topic("later", 4)
        async with (
            Consumer(cluster.nameserver, "g", {"later": "*"}, FROM_FIRST) as consumer,
            asyncio.TaskGroup() as tasks,
        ):

            async def consume() -> None:
                async for message in consumer:
                    received.append(message)  # noqa: PERF401  the test reads the list meanwhile

            producing = tasks.create_task(produce(cluster.nameserver))
            tasks.create_task(consume())
            for _ in range(2):
                goal = len(received) + 1_000
                await until(lambda goal=goal: len(received) >= goal, timeout_s=30)  # type: ignore[misc]
                await cluster.kill("storage")
                await cluster.serving("storage")
            goal = len(sent) + 1_000
            await until(lambda: len(sent) >= goal, timeout_s=30)
            stop.set()
            await producing
            await until(lambda: len({one.body for one in received}) >= len(sent), timeout_s=30)
            consumer.stop()
    numbers = [int(one.body) for one in received]
    assert set(numbers) == set(sent), "a message was lost"
    assert len(numbers) == len(set(numbers)), "a message was delivered twice"
    assert all(one.store_unix_ms >= sent[int(one.body)] for one in received), (
        "a message was delivered too early"
    )
