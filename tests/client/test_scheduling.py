"""Sending for later.

Goal: a message comes at its time, once, with all it had, or is taken back; also when the storage
node is killed meanwhile.
Method: a real cluster; the store time of a received message is compared with the time asked for.
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
    """The first `count` messages of a topic."""
    found: list[ReceivedMessage] = []
    async with Consumer(nameserver, f"g{topic}", {topic: "*"}, FROM_FIRST) as consumer:
        async for message in consumer:
            found.append(message)
            if len(found) == count:
                consumer.stop()
    return found


async def test_a_message_for_later_comes_at_its_time_with_all_it_had(nameserver: str) -> None:
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
    found = {one.body: one for one in await receive(nameserver, topic, 2)}
    now, later = found[b"now"], found[b"later"]
    assert (now.queue, now.store_unix_ms) == (plain.queue, plain.store_unix_ms)
    assert (later.tag, tuple(later.keys), dict(later.properties)) == (
        "paid", ("a", "b"), {"x": "y"},
    )  # fmt: skip
    assert later.queue == receipt.queue
    assert later.store_unix_ms >= receipt.deliver_unix_ms


async def test_levels_times_and_delays_are_the_same(nameserver: str) -> None:
    topic = await new_topic(nameserver)
    async with Producer(nameserver) as producer:
        now = Clock().unix_ms()
        past = await producer.send(topic, b"past", deliver_at_unix_ms=now - 1_000)
        assert past.deliver_unix_ms == now - 1_000
        (found,) = await receive(nameserver, topic, 1)
        assert found.body == b"past"
        now = Clock().unix_ms()
        level = await producer.send(topic, b"level", delay_level=1)
        at = await producer.send(topic, b"at", deliver_at_unix_ms=now + 1_000)
        assert 1_000 <= level.deliver_unix_ms - now < 31_000
        assert at.deliver_unix_ms == now + 1_000
    due = {b"level": level.deliver_unix_ms, b"at": at.deliver_unix_ms}
    later = await receive(nameserver, topic, 2)
    assert {one.body for one in later} == due.keys()
    assert all(one.store_unix_ms >= due[one.body] for one in later)


async def test_what_is_cancelled_does_not_come(nameserver: str) -> None:
    topic = await new_topic(nameserver, 1)
    async with Producer(nameserver) as producer:
        cancelled = await producer.send(topic, b"cancelled", delay_ms=5_000)
        await producer.send(topic, b"kept", delay_ms=5_100)
    async with Producer(nameserver) as other:
        await other.cancel(cancelled.schedule_id)
        with pytest.raises(NotScheduled):
            await other.cancel(cancelled.schedule_id)
        (found,) = await receive(nameserver, topic, 1)
        assert (found.body, found.offset) == (b"kept", 0)
        with pytest.raises(InvalidArgument):
            await other.cancel("nonsense")


async def test_an_id_of_a_broker_that_is_not_there_is_unreachable(nameserver: str) -> None:
    async with Producer(nameserver, ProducerSettings(delivery_timeout_ms=300)) as producer:
        with pytest.raises(Unreachable):
            await producer.cancel("elsewhere-5")


async def test_a_queue_and_an_ordering_key_are_kept(nameserver: str) -> None:
    topic = await new_topic(nameserver)
    async with Producer(nameserver) as producer:
        third = QueueRef(topic, BROKER, 2)
        receipt = await producer.send(topic, b"a", queue=third, delay_ms=10)
        plain = await producer.send(topic, b"b", ordering_key="k")
        later = await producer.send(topic, b"c", ordering_key="k", delay_ms=10)
        assert receipt.queue == third
        assert later.queue == plain.queue


async def test_refusals_come_before_anything_is_sent(nameserver: str) -> None:
    topic = await new_topic(nameserver)
    async with Producer(nameserver) as producer:
        with pytest.raises(LimitExceeded):
            await producer.send(topic, b"a", delay_ms=AHEAD_MS_MAX + 60_000)
        with pytest.raises(InvalidArgument):
            await producer.send(topic, b"a", delay_ms=5, delay_level=5)
        with pytest.raises(TopicNotFound):
            await producer.send("nobody", b"a", delay_ms=5)


async def test_many_share_requests_and_each_has_an_id_of_its_own(nameserver: str) -> None:
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


async def test_a_producer_that_closes_flushes_first(nameserver: str) -> None:
    topic = await new_topic(nameserver)
    async with Producer(nameserver) as producer:
        pending = [await producer.submit(topic, Message(b"a"), delay_ms=50) for _ in range(100)]
        await producer.close()
        with pytest.raises(ProducerClosed):
            await producer.submit(topic, Message(b"a"), delay_ms=50)
    assert len({(await one).schedule_id for one in pending}) == 100


class _Lost(schedule_grpc.ScheduleServiceServicer):
    """The first answer is lost; from then on the queue is gone."""

    def __init__(self) -> None:
        self.asked = 0

    async def Schedule(
        self, request: schedule_pb.ScheduleRequest, context: Context
    ) -> schedule_pb.ScheduleResponse:
        self.asked += 1
        if self.asked == 1:
            raise Unreachable("killed before it answered")
        gone = schedule_pb.ScheduleOutcome(error=error_to_pb(QueueNotFound("gone")))
        return schedule_pb.ScheduleResponse(outcomes=[gone] * len(request.items))


async def test_a_refusal_after_a_try_that_may_have_stored_it_says_so() -> None:
    lost = _Lost()  # type: ignore[abstract]
    add: Any = partial(schedule_grpc.add_ScheduleServiceServicer_to_server, lost)
    settings = ProducerSettings(delivery_timeout_ms=5_000)
    async with twins(orders=1) as at, serving_at(add) as at.nameserver.storage_address:
        producer = Producer(at.address, settings)
        with pytest.raises(Unreachable, match="gone; an earlier attempt may have stored"):
            async with producer:
                await producer.send("orders", b"a", delay_ms=600_000)
    assert lost.asked > 1


def test_code_without_asyncio_can_do_the_same(nameserver: str) -> None:
    topic = asyncio.run(new_topic(nameserver))
    with BlockingProducer(nameserver) as producer:
        receipt = producer.send(topic, b"a", delay_ms=600_000)
        producer.cancel(receipt.schedule_id)
        with pytest.raises(NotScheduled):
            producer.cancel(receipt.schedule_id)


@pytest.mark.e2e
@pytest.mark.timeout(120)
async def test_kill_9_of_the_storage_loses_and_doubles_no_message_for_later(tmp_path: Path) -> None:
    sent: dict[int, int] = {}
    found: list[ReceivedMessage] = []
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
                    found.append(message)  # noqa: PERF401  others look at it meanwhile

            producing = tasks.create_task(produce(cluster.nameserver))
            tasks.create_task(consume())
            for _ in range(2):
                goal = len(found) + 1_000
                await until(lambda goal=goal: len(found) >= goal, timeout_s=30)  # type: ignore[misc]
                await cluster.kill("storage")
                await cluster.serving("storage")
            goal = len(sent) + 1_000
            await until(lambda: len(sent) >= goal, timeout_s=30)
            stop.set()
            await producing
            await until(lambda: len({one.body for one in found}) >= len(sent), timeout_s=30)
            consumer.stop()
    numbers = [int(one.body) for one in found]
    assert set(numbers) == set(sent), "something is lost"
    assert len(numbers) == len(set(numbers)), "something came twice"
    assert all(one.store_unix_ms >= sent[int(one.body)] for one in found), "something came early"
