"""One-way messages, compression, and the order of a key while the queues of a topic change.

Goal: a one-way message is as safe as any other, and has no receipt; compression changes only the
bytes; the messages of a key keep their order when the number of queues changes.
Method: as in `test_producer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial
from typing import Literal

import pytest

from batonmq._blocking import BlockingProducer
from batonmq._common.topic_epochs import UNKNOWN_EPOCH
from batonmq._core.compression import Compression
from batonmq._core.keyed_queues import KeyedQueues
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq._producer.one_way_failures import LOG_INTERVAL_MS, OneWayFailures
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.send_buffer import ProducerClosed
from batonmq.errors import (
    BadBatch,
    InvalidArgument,
    LimitExceeded,
    NotWritable,
    Overloaded,
    TopicNotFound,
    Unreachable,
)
from tests.client.twins import BROKER, NOWHERE, Gate, twins
from tests.support.conditions import until

# ---- one way


async def test_one_way_send_does_not_wait_for_the_outcome() -> None:
    gate = Gate()
    async with twins(orders=1) as at, Producer(at.address) as producer:
        at.storage.before = gate
        for number in range(100):
            await producer.send_one_way("orders", b"%d" % number, tag="t", ordering_key="k")
        assert at.storage.stored == []
        gate.open()
        await producer.flush()
        assert at.storage.queues["orders", 0] == [b"%d" % n for n in range(100)]
        assert producer.one_way_failures == 0


async def test_close_loses_no_one_way_message() -> None:
    async with twins(orders=4) as at:
        async with Producer(at.address) as producer:
            for number in range(100):
                await producer.send_one_way("orders", b"%d" % number)
        assert Counter(at.storage.stored) == Counter(b"%d" % n for n in range(100))


async def test_one_way_message_waits_for_room() -> None:
    gate = Gate()
    settings = ProducerSettings(in_flight_bytes_max=10_000)
    async with twins(orders=1) as at, Producer(at.address, settings) as producer:
        await producer.send("orders", b"opens the topic")
        at.storage.before = gate
        await producer.send_one_way("orders", bytes(8_000))
        async with asyncio.TaskGroup() as tasks:
            second = tasks.create_task(producer.send_one_way("orders", bytes(8_000)))
            await until(lambda: gate.arrived)
            assert not second.done()
            gate.open()
        await producer.flush()
        assert len(at.storage.stored) == 3


async def test_failed_one_way_messages_are_counted_and_other_failures_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with twins(orders=4) as at, Producer(at.address) as producer:
        at.storage.refusal = lambda _: BadBatch("never")
        for _ in range(50):
            await producer.send_one_way("orders", b"")
        with pytest.raises(BadBatch):
            await producer.send("orders", b"")
        await producer.flush()
        assert producer.one_way_failures == 50
    log_lines = [record.message for record in caplog.records if "one-way" in record.message]
    assert len(log_lines) == 1
    assert "error=never" in log_lines[0]


async def test_blocking_producer_sends_one_way_messages() -> None:
    def work(address: str) -> int:
        with BlockingProducer(address) as producer:
            for number in range(20):
                producer.send_one_way("orders", b"%d" % number, tag="t", ordering_key="k")
            producer.flush()
            return producer.one_way_failures

    async with twins(orders=2) as at:
        assert await asyncio.to_thread(work, at.address) == 0
        assert at.storage.log == [b"%d" % n for n in range(20)]


async def test_one_way_messages_without_a_broker_are_counted_at_the_close() -> None:
    settings = ProducerSettings(delivery_timeout_ms=300)
    async with twins(orders=2) as at:
        at.nameserver.storage_address = NOWHERE
        async with Producer(at.address, settings) as producer:
            for _ in range(10):
                await producer.send_one_way("orders", b"")
        assert producer.one_way_failures == 10


async def test_invalid_one_way_message_is_refused() -> None:
    async with twins(orders=1) as at:
        async with Producer(at.address) as producer:
            with pytest.raises(TopicNotFound):
                await producer.send_one_way("order", b"")
            with pytest.raises(LimitExceeded):
                await producer.send_one_way("orders", bytes(4 * 1024 * 1024 + 1))
            await producer.send("orders", b"")
        with pytest.raises(ProducerClosed):
            await producer.send_one_way("orders", b"")
        assert producer.one_way_failures == 0


def test_losses_are_logged_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    losses = OneWayFailures()
    with caplog.at_level(logging.WARNING):
        losses.add(0, Unreachable("x"), 0)
        assert caplog.records == []
        for now_ms in range(0, LOG_INTERVAL_MS + 1, 100):
            losses.add(2, Unreachable("x"), now_ms)
    first, second = (record.message for record in caplog.records)
    assert first.startswith("one-way messages failed count=2 total=2 ")
    assert second.startswith("one-way messages failed count=200 total=202 ")
    assert losses.count == 202


# ---- compression


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
async def test_large_batch_is_compressed_by_the_setting(
    compression: Literal["lz4", "zstd"],
) -> None:
    settings = ProducerSettings(compression=compression)
    async with twins(orders=1) as at, Producer(at.address, settings) as producer:
        await producer.send("orders", b"abc" * 1_000)
        await producer.send("orders", b"abc" * 300)
    large, small = at.storage.headers
    assert large.compression is Compression[compression.upper()]
    assert large.length < 400
    assert small.compression is Compression.NONE, "a batch of less than 1,024 bytes was compressed"
    assert at.storage.queues["orders", 0] == [b"abc" * 1_000, b"abc" * 300]


async def test_nothing_is_compressed_by_default() -> None:
    async with twins(orders=1) as at, Producer(at.address) as producer:
        await producer.send("orders", b"abc" * 1_000)
    assert at.storage.headers[0].compression is Compression.NONE


async def test_limit_of_a_compressed_batch_is_its_uncompressed_size() -> None:
    """`batch_bytes_max` limits the size that a consumer has to decompress."""
    settings = ProducerSettings(compression="lz4", batch_bytes_max=10_000)
    gate = Gate()
    async with twins(orders=1) as at, Producer(at.address, settings) as producer:
        at.storage.before = gate
        for _ in range(10):
            await producer.send_one_way("orders", bytes(4_000))
        gate.open()
        await producer.flush()
        assert max(header.count for header in at.storage.headers) == 2


async def test_batches_stay_within_the_limits_of_storage_whatever_the_settings_say() -> None:
    settings = ProducerSettings(batch_bytes_max=1 << 30, batch_messages_max=1_000_000)
    gate = Gate()
    async with twins(orders=1) as at, Producer(at.address, settings) as producer:
        at.storage.before = gate
        for _ in range(12):
            await producer.send_one_way("orders", bytes(1_000_000))
        gate.open()
        await producer.flush()
        assert producer.one_way_failures == 0
        ranges = await producer.send_many("orders", [b"x"] * 70_000)
        assert sum(one.message_count for one in ranges) == 70_000
        assert max(header.count for header in at.storage.headers) == 65_535


def test_unknown_compression_is_refused() -> None:
    settings = ProducerSettings(compression="gzip")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="gzip") as refused:
        Producer("127.0.0.1:1", settings)
    assert refused.value.remedy == "Use none, lz4 or zstd."


# ---- a queue that was closed and opened again


async def test_refused_batch_is_repeated_in_the_epoch_of_the_newest_route() -> None:
    async with twins(orders=1) as at, Producer(at.address) as producer:
        at.storage.refusal = lambda _: (
            NotWritable("opened again") if at.storage.topic_epochs[-1] == [0] else None
        )
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(producer.send("orders", b"a"))
            await until(lambda: len(at.storage.topic_epochs) > 1)
            assert not sending.done()
            at.nameserver.epoch, at.nameserver.generation = 2, -10  # of another nameserver
            at.nameserver.set_topic("orders", 1)
        assert at.storage.topic_epochs[-1] == [2]
        assert at.storage.stored == [b"a"]
        assert len({batch for request in at.storage.requests for batch in request}) == 1


async def test_no_attempt_names_a_lower_epoch_than_one_before() -> None:
    async with twins(orders=1) as at:
        at.nameserver.epoch = 2
        async with Producer(at.address) as producer:
            at.storage.refusal = lambda _: (
                Overloaded("busy") if len(at.storage.topic_epochs) < 3 else None
            )
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(producer.send("orders", b"a"))
                await until(lambda: at.storage.topic_epochs)
                at.nameserver.epoch = 1  # a nameserver that has not heard of the newest change
                at.nameserver.set_topic("orders", 1)
            assert at.storage.topic_epochs == [[2]] * len(at.storage.topic_epochs)
            await producer.send("orders", b"b")
            assert at.storage.topic_epochs[-1] == [1]


async def test_epoch_that_the_route_does_not_say_is_not_known() -> None:
    async with twins(orders=1) as at:
        at.nameserver.epoch = None
        async with Producer(at.address) as producer:
            await producer.send("orders", b"a")
        assert at.storage.topic_epochs == [[UNKNOWN_EPOCH]]


# ---- order of a key while the queues change


def queues(count: int) -> tuple[QueueRef, ...]:
    return tuple(QueueRef("orders", BROKER, number) for number in range(count))


def keys_that(*, move: bool, count: int = 5) -> list[str]:
    """Return keys that change their queue, or keep it, when two queues become four."""
    before, after = KeyedQueues(queues(2)), KeyedQueues(queues(4))
    keys = [f"key-{number}" for number in range(100)]
    return [key for key in keys if (before.of(key) != after.of(key)) is move][:count]


async def until_known(producer: Producer, queue: QueueRef) -> None:
    """Wait until the producer knows the queue."""

    async def known() -> bool:
        try:
            await producer.submit("orders", Message(b"look"), queue=queue)
        except BaseException as error:
            if "is not a queue" in str(error):
                return False
            raise
        return True

    await until(known)


async def test_key_that_changes_its_queue_waits_for_its_messages_in_flight() -> None:
    gate = Gate()
    (key, *_), (other, *_) = keys_that(move=True), keys_that(move=False)
    old, new = KeyedQueues(queues(2)).of(key), KeyedQueues(queues(4)).of(key)
    async with twins(orders=2) as at, Producer(at.address) as producer:
        at.storage.before = gate
        first = await producer.submit("orders", Message(b"1"), ordering_key=key)
        await until(lambda: gate.arrived)
        second = await producer.submit("orders", Message(b"2"), ordering_key=key)
        at.nameserver.set_topic("orders", 4)
        await until_known(producer, queues(4)[3])
        async with asyncio.TaskGroup() as tasks:
            third = tasks.create_task(producer.send("orders", b"3", ordering_key=key))
            one_way = tasks.create_task(producer.send_one_way("orders", b"4", ordering_key=key))
            unmoved = await producer.submit("orders", Message(b"stays"), ordering_key=other)
            assert not third.done()
            assert not one_way.done()
            gate.open()
        await producer.flush()
        assert (await first).queue == (await second).queue == old
        assert third.result().queue == new
        assert (await unmoved).queue == KeyedQueues(queues(4)).of(other)
        assert at.storage.queues["orders", new.queue_id][-2:] == [b"3", b"4"]


async def test_key_without_messages_in_flight_changes_its_queue_at_once() -> None:
    gate = Gate()
    moving = keys_that(move=True)
    async with twins(orders=2) as at, Producer(at.address) as producer:
        for key in moving:
            await producer.send("orders", b"", ordering_key=key)
        at.storage.before = gate
        at.nameserver.set_topic("orders", 4)
        await until_known(producer, queues(4)[3])
        pending = [
            await producer.submit("orders", Message(b""), ordering_key=key) for key in moving
        ]
        gate.open()
        receipt_queues = [(await one).queue for one in pending]
        assert receipt_queues == [KeyedQueues(queues(4)).of(key) for key in moving]


async def test_messages_of_a_key_are_stored_in_order_while_queues_are_added() -> None:
    """The order of storing counts, over all queues."""
    keys = [f"key-{number}" for number in range(20)]
    settings = ProducerSettings(batch_messages_max=5, in_flight_bytes_max=2_000)
    async with twins(orders=1) as at:
        async with Producer(at.address, settings) as producer, asyncio.TaskGroup() as tasks:

            async def send(key: str) -> None:
                for number in range(100):
                    await producer.send_one_way(
                        "orders", f"{key} {number}".encode(), ordering_key=key
                    )
                    await asyncio.sleep(0)

            for key in keys:
                tasks.create_task(send(key))
            for count in (2, 3, 5, 8):
                await until(partial(at.storage.has, len(at.storage.log) + 100))
                at.nameserver.set_topic("orders", count)
        assert producer.one_way_failures == 0
        for key in keys:
            numbers = [n for name, n in map(_split, at.storage.log) if name == key]
            assert numbers == list(range(100)), key
        assert len(at.storage.queues) == 8


def _split(body: bytes) -> tuple[str, int]:
    key, number = body.decode().split()
    return key, int(number)
