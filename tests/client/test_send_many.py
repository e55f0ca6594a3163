"""Many messages in one call.

Goal: the batches are those that single sends would make; every message has exactly one outcome,
also if a batch fails or moves to another queue; a message that is not valid sends nothing.
Method: as in `test_producer`; columns against single messages by property tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq import FailedRange, PartlySent, ReceiptRange
from batonmq._blocking import BlockingProducer
from batonmq._core.queues import QueueRef
from batonmq._core.records import BatchBuilder, Header, Message, encode_bodies, encode_record
from batonmq._producer.message_columns import MessageColumns
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.send_buffer import ProducerClosed
from batonmq.errors import (
    BadBatch,
    BatonError,
    InvalidArgument,
    LimitExceeded,
    NotServing,
    NotWritable,
    TopicNotFound,
)
from tests.client.twins import BROKER, Gate, failing, twins
from tests.support.conditions import until

TAGS = st.text("abcäß", max_size=4)
KEYS = st.text("xyzö", max_size=3)


class Column:
    """A column of Arrow, as far as `send_many` uses it."""

    def __init__(self, values: Sequence[object]) -> None:
        self._values = values

    def to_pylist(self) -> list[object]:
        return list(self._values)


@given(st.lists(st.tuples(st.binary(max_size=20), KEYS), min_size=1), TAGS, st.booleans())
def test_columns_make_the_batch_that_single_messages_make(
    messages: list[tuple[bytes, str]], tag: str, with_keys: bool
) -> None:
    single, many = BatchBuilder(), BatchBuilder()
    for body, key in messages:
        message = Message(body, tag, (key,) if key and with_keys else ())
        single.add(message, encode_record(message))
    keys = [key for _, key in messages] if with_keys else []
    bodies = [body for body, _ in messages]
    assert many.add_many(encode_bodies(bodies, tag, keys), tag, keys) == 0
    assert many.encode(topic="t", queue_id=1) == single.encode(topic="t", queue_id=1)
    assert many.bytes_count == single.bytes_count


@given(
    st.lists(st.binary(max_size=50), min_size=1, max_size=40),
    st.integers(1, 300),
    st.integers(1, 10),
)
def test_pieces_have_all_messages_in_order_and_fit_into_batches(
    bodies: list[bytes], bytes_max: int, count_max: int
) -> None:
    columns, records = MessageColumns(bodies), list[bytes]()
    while len(records) < len(bodies):
        piece = columns.piece(len(records), bytes_max, count_max)
        assert 1 <= len(piece.records) <= count_max
        assert piece.size <= bytes_max or len(piece.records) == 1
        records += piece.records
    assert records == encode_bodies(bodies)


async def test_receipts_name_every_message_once_and_in_order() -> None:
    settings = ProducerSettings(batch_messages_max=100)
    bodies = [b"%d" % number for number in range(1_050)]
    async with twins(orders=4) as at, Producer(at.address, settings) as producer:
        ranges = await producer.send_many("orders", bodies, tag="a", keys=["k"] * len(bodies))
        assert [one.first_index for one in ranges] == list(range(0, 1_050, 100))
        assert sum(one.message_count for one in ranges) == 1_050
        receipts = [receipt for one in ranges for receipt in one.receipts()]
        for body, receipt in zip(bodies, receipts, strict=True):
            stored = at.storage.queues["orders", receipt.queue.queue_id]
            assert stored[receipt.offset] == body
        assert len({one.queue for one in ranges}) == 4


@pytest.mark.parametrize(
    "options", [{"ordering_key": "k"}, {"queue": QueueRef("orders", BROKER, 2)}]
)
async def test_messages_of_one_queue_keep_their_order(options: dict[str, object]) -> None:
    settings = ProducerSettings(batch_messages_max=10)
    bodies = [b"%d" % number for number in range(95)]
    async with twins(orders=4) as at, Producer(at.address, settings) as producer:
        at.storage.before = failing(NotServing("not yet"), times=2)
        ranges = await producer.send_many("orders", bodies, **options)  # type: ignore[arg-type]
        (queue,) = {one.queue for one in ranges}
        assert at.storage.queues["orders", queue.queue_id] == bodies


async def test_no_messages_have_no_receipts() -> None:
    async with twins(orders=1) as at, Producer(at.address) as producer:
        assert await producer.send_many("orders", []) == []
        assert not at.storage.requests


async def test_columns_of_arrow_are_sent() -> None:
    async with twins(orders=1) as at, Producer(at.address) as producer:
        await producer.send_many("orders", Column([b"1", b"2"]), keys=Column(["a", ""]))
        await producer.send_many("orders", Column(["ä"]))
        assert at.storage.queues["orders", 0] == [b"1", b"2", "ä".encode()]


@pytest.mark.parametrize(
    ("bodies", "options", "error"),
    [
        ([b"1", "text"], {}, InvalidArgument),
        ([b"1", None], {}, InvalidArgument),
        ([b"1", bytes(4 * 1024 * 1024 + 1)], {}, LimitExceeded),
        ([b"1"], {"tag": "a b"}, BadBatch),
        ([b"1"], {"keys": ["a", "b"]}, InvalidArgument),
        ([b"1", b"2"], {"keys": ["a", None]}, InvalidArgument),
        ([b"1", b"2"], {"keys": ["a", "b c"]}, BadBatch),
        ([b"1", b"2"], {"keys": ["a", " "]}, BadBatch),
        ([b"1", b"2"], {"keys": ["a", "\ud800"]}, BadBatch),
        ([b"1", b"2"], {"keys": ["a", "k" * 1_025]}, LimitExceeded),
    ],
)
async def test_one_invalid_message_sends_nothing(
    bodies: list[bytes], options: dict[str, object], error: type[BatonError]
) -> None:
    async with twins(orders=1) as at, Producer(at.address) as producer:
        with pytest.raises(error):
            await producer.send_many("orders", bodies, **options)  # type: ignore[arg-type]
        await producer.flush()
        assert not at.storage.requests


async def test_call_for_an_unknown_topic_raises_its_error() -> None:
    async with twins(orders=1) as at, Producer(at.address) as producer:
        with pytest.raises(TopicNotFound):
            await producer.send_many("unknown", [b"1", b"2"])


async def test_batch_that_fails_fails_its_own_messages_only() -> None:
    def refuse_queue_1(header: Header) -> BatonError | None:
        return BadBatch("not this one") if header.queue_id == 1 else None

    settings = ProducerSettings(batch_messages_max=10)
    async with twins(orders=2) as at, Producer(at.address, settings) as producer:
        at.storage.refusal = refuse_queue_1
        with pytest.raises(PartlySent, match="20 messages have failed, 20 are stored") as caught:
            await producer.send_many("orders", [b"%d" % number for number in range(40)])
        indexes = {
            index
            for ranges in (caught.value.stored, caught.value.failed)
            for one in ranges
            for index in range(one.first_index, one.first_index + one.message_count)
        }
        assert indexes == set(range(40))
        assert all(isinstance(one.error, BadBatch) for one in caught.value.failed)
        assert len(at.storage.stored) == 20


async def test_messages_whose_batch_moves_to_another_queue_have_receipts_of_that_queue() -> None:
    def refuse_queue_1(header: Header) -> BatonError | None:
        return NotWritable("closed for writes") if header.queue_id == 1 else None

    gate = Gate()
    settings = ProducerSettings(batch_messages_max=10)
    async with (
        twins(orders=2) as at,
        Producer(at.address, settings) as producer,
        asyncio.TaskGroup() as tasks,
    ):
        await producer.send("orders", b"opens the topic", queue=QueueRef("orders", BROKER, 0))
        at.storage.before, at.storage.refusal = gate, refuse_queue_1
        bodies = [b"%d" % number for number in range(40)]
        sending = tasks.create_task(producer.send_many("orders", bodies))
        await until(lambda: gate.arrived)
        at.nameserver.set_topic("orders", 1)
        known = producer._buffer.topics["orders"]
        await until(lambda: len(known.queues) == 1)
        gate.open()
        ranges = await sending
        assert {one.queue.queue_id for one in ranges} == {0}
        receipts = [receipt for one in ranges for receipt in one.receipts()]
        stored = at.storage.queues["orders", 0]
        assert [stored[receipt.offset] for receipt in receipts] == bodies


async def test_call_without_room_waits_and_the_close_ends_it() -> None:
    gate = Gate()
    settings = ProducerSettings(in_flight_bytes_max=2_000, batch_messages_max=10)
    async with (
        twins(orders=1) as at,
        Producer(at.address, settings) as producer,
        asyncio.TaskGroup() as tasks,
    ):
        at.storage.before = gate
        errors = list[PartlySent]()

        async def send() -> None:
            with pytest.raises(PartlySent) as error:
                await producer.send_many("orders", [bytes(100)] * 100)
            errors.append(error.value)

        tasks.create_task(send())
        await until(lambda: gate.arrived and len(producer._waiting))
        closing = tasks.create_task(producer.close())
        await asyncio.sleep(0)
        gate.open()
        await closing
        await until(lambda: errors)
        assert sum(one.message_count for one in errors[0].stored) == len(at.storage.stored) == 10
        (failed,) = errors[0].failed
        assert isinstance(failed, FailedRange)
        assert isinstance(failed.error, ProducerClosed)
        assert (failed.first_index, failed.message_count) == (10, 90)


async def test_blocking_producer_sends_many() -> None:
    async with twins(orders=1) as at:

        def send() -> list[ReceiptRange]:
            with BlockingProducer(at.address) as producer:
                return producer.send_many("orders", [b"1", b"2"])

        (receipt,) = await asyncio.to_thread(send)
        assert (receipt.message_count, receipt.first_offset) == (2, 0)
