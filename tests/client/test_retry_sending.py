"""The retry sender alone.

Goal: a message is sent again until it is stored or its queue is lost; a message that returns from
the retry topic has the fields of the first delivery.
Method: the sender with a nameserver and a storage node in this process that fail on purpose.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any

import grpc.aio
import pytest

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2_grpc as nameserver_grpc
from baton.storage.v1 import schedule_service_pb2 as pb
from baton.storage.v1 import schedule_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_to_pb
from batonmq._connection.directory import Directory
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.retry_sender import RetryRequest, RetrySender, restore_original
from batonmq._consumer.session import Session
from batonmq._core.queues import QueueRef
from batonmq._core.records import (
    BatchBuilder,
    Header,
    Message,
    Record,
    check_batch,
    decode_records,
    encode_record,
    read_header,
)
from batonmq._core.retries import HandlingFailure
from batonmq.errors import BatonError, DiskFull, NotServing, QueueNotFound
from tests.client.twins import BROKER, NameserverTwin
from tests.support.clock import MovableClock
from tests.support.grpc_server import serving_at

Context = grpc.aio.ServicerContext[Any, Any]
SCHEDULED_PLACE = QueueRef("t", BROKER, 3)


class ScheduleTwin(pb_grpc.ScheduleServiceServicer):
    """A storage node that records the scheduled items.

    Attributes:
        failures: Errors that the next calls raise, one each.
        refusals: Refusals of the next items, one each.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.items: list[pb.ScheduleItem] = []
        self.failures: list[BatonError] = []
        self.refusals: list[BatonError] = []

    async def Schedule(self, request: pb.ScheduleRequest, context: Context) -> pb.ScheduleResponse:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return pb.ScheduleResponse(outcomes=[self._outcome(item) for item in request.items])

    def _outcome(self, item: pb.ScheduleItem) -> pb.ScheduleOutcome:
        if self.refusals:
            return pb.ScheduleOutcome(error=error_to_pb(self.refusals.pop(0)))
        self.items.append(item)
        return pb.ScheduleOutcome(receipt=pb.ScheduleReceipt(schedule_id="s"))


@asynccontextmanager
async def sending() -> AsyncIterator[tuple[ScheduleTwin, RetrySender]]:
    """Run a storage node and the retry sender of group g."""
    storage, nameserver = ScheduleTwin(), NameserverTwin()  # type: ignore[abstract]
    nameserver.set_topic("%RETRY%g", 1)
    nameserver.set_topic("%DLQ%g", 1)
    add_storage: Any = partial(pb_grpc.add_ScheduleServiceServicer_to_server, storage)
    add_nameserver: Any = partial(
        nameserver_grpc.add_NameserverServiceServicer_to_server, nameserver
    )
    async with (
        serving_at(add_storage) as nameserver.storage_address,
        serving_at(add_nameserver) as address,
        asyncio.TaskGroup() as tasks,
    ):
        directory, loops = Directory(address, Random(1)), list[asyncio.Task[None]]()
        session = Session(
            group="g",
            incarnation=queue_pb2.Incarnation(client_id="c", incarnation_id=1),
            settings=ConsumerSettings(send_back=True),
            directory=directory,
            clock=Clock(),
            random=Random(1),
            on_ownership=lambda _: None,
        )
        yield storage, RetrySender(session, lambda loop: loops.append(tasks.create_task(loop)))
        for loop in loops:
            loop.cancel()
        await directory.close()


def message(
    offset: int = 0,
    body: bytes = b"body",
    *,
    queue: QueueRef = SCHEDULED_PLACE,
    record: Record | None = None,
) -> ReceivedMessage:
    """Return a message that was delivered for the first time."""
    builder = BatchBuilder()
    builder.add(Message(b""), encode_record(Message(b"")))
    header: Header = read_header(builder.encode(topic=queue.topic, queue_id=queue.queue_id))
    given = record or Record(offset, "tag", ("k",), {"a": "1"}, body)
    received = ReceivedMessage(queue, 1, header, given, redelivered=False)
    received.attempts = 1
    return received


def request_for(
    one: ReceivedMessage, delay_ms: int | None = 10_000, lives: int = 100
) -> RetryRequest:
    """Return a request whose queue counts as lost after `lives` checks."""
    left = [True] * lives
    failure = HandlingFailure("failed", "ValueError")
    return RetryRequest(one, 0, failure, delay_ms, lambda: bool(left) and left.pop())


def stored(item: pb.ScheduleItem) -> tuple[Header, Record]:
    header = check_batch(item.batch, stamped=False)
    (record,) = decode_records(item.batch, header, [0])
    return header, record


@pytest.mark.parametrize("error", [NotServing("starts"), DiskFull("full")])
async def test_message_is_sent_again_until_storage_has_stored_it(error: BatonError) -> None:
    async with sending() as (storage, returns):
        storage.failures = [error, error]
        storage.refusals = [QueueNotFound("not yet")]
        assert await returns.send(request_for(message()))
        assert (storage.calls, len(storage.items)) == (4, 1)


async def test_message_of_a_lost_queue_is_not_sent_again() -> None:
    async with sending() as (storage, returns):
        storage.failures = [NotServing("starts")] * 9
        assert not await returns.send(request_for(message(), lives=2))
        assert (storage.calls, storage.items) == (2, [])


async def test_sender_of_a_consumer_that_has_ended_cancels_its_callers() -> None:
    """They may be tasks of others, as in a gateway: an error would end these."""

    def refuse(loop: Coroutine[object, object, None]) -> None:
        loop.close()
        raise RuntimeError("the task group is shutting down")

    async with sending() as (storage, returns):
        returns._spawn = refuse
        for _ in range(2):
            with pytest.raises(asyncio.CancelledError):
                await returns.send(request_for(message()))
        assert storage.items == []


async def test_messages_that_fail_together_share_requests() -> None:
    async with sending() as (storage, returns):
        async with asyncio.TaskGroup() as tasks:
            for offset in range(100):
                tasks.create_task(returns.send(request_for(message(offset))))
        assert len(storage.items) == 100
        assert storage.calls < 20
        assert len({stored(item)[0].producer_id for item in storage.items}) == 100


async def test_requests_stay_below_their_size_limit() -> None:
    async with sending() as (storage, returns):
        async with asyncio.TaskGroup() as tasks:
            for offset in range(12):
                tasks.create_task(
                    returns.send(request_for(message(offset, bytes(4 * 1024 * 1024))))
                )
        assert len(storage.items) == 12


async def test_returned_message_has_its_first_fields_and_its_attempts() -> None:
    first = message(7)
    first.attempts = 3
    async with sending() as (storage, returns):
        await returns.send(request_for(first))
        header, record = stored(storage.items[0])
    again = message(queue=QueueRef(header.topic, BROKER, header.queue_id), record=record)
    again.attempts = 1
    restore_original(again, "g")
    assert again.topic == "t"
    assert (again.tag, again.keys, again.body) == (first.tag, first.keys, first.body)
    assert (again.properties, again.origin) == ({"a": "1"}, first.origin)
    assert again.attempts == 4


async def test_second_retry_names_the_first_origin_under_a_new_id() -> None:
    async with sending() as (storage, returns):
        await returns.send(request_for(message(7)))
        header, record = stored(storage.items[0])
        again = message(queue=QueueRef(header.topic, BROKER, header.queue_id), record=record)
        restore_original(again, "g")
        await returns.send(request_for(again, None))
        last_header, last = stored(storage.items[1])
    assert last_header.topic == "%DLQ%g"
    assert last_header.producer_id != header.producer_id
    assert last.properties["baton.origin"] == record.properties["baton.origin"] == "t/broker-a/3/7"
    assert last.properties["baton.attempts"] == "2"


def test_messages_of_other_topics_or_without_origin_are_not_changed() -> None:
    of_other_group = message(queue=QueueRef("%RETRY%h", BROKER, 0))
    by_hand = message(queue=QueueRef("%RETRY%g", BROKER, 0))
    for one in (of_other_group, by_hand):
        restore_original(one, "g")
        assert (one.attempts, one.properties, one.topic) == (1, {"a": "1"}, one.queue.topic)


async def test_repeated_attempt_has_what_is_left_of_the_delay() -> None:
    async with sending() as (storage, sender):
        clock = MovableClock()
        sender._session.clock = clock

        class SlowRefusals(list[BatonError]):
            def pop(self, *_: Any) -> BatonError:
                clock.ahead_ms += 4_000
                return super().pop(0)

        storage.refusals = SlowRefusals([DiskFull("full", retry_after_ms=1)] * 2)
        assert await sender.send(request_for(message(), 10_000))
        (item,) = storage.items
        assert 0 < item.delay_ms <= 2_001
        assert await sender.send(request_for(message(1), None))
        assert storage.items[1].HasField("delay_ms")
        assert storage.items[1].delay_ms == 0
