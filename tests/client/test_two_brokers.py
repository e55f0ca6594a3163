"""A producer with two brokers, one of which fails.

Goal: a message that certainly was not stored, and may go to any queue, is sent to the other broker
at once; a message that may have been stored, or has a queue or key, is retried on its own queue;
no message is lost or stored twice.
Method: two simulated storage nodes, one of which is unreachable, hangs, rejects batches or loses an
answer. A clock that stands still makes all answers equally fast; the test advances it by the time
for which a failed broker is avoided.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from batonmq._common.clock import Clock
from batonmq._connection.directory import ClientEnvironment
from batonmq._core.broker_health import FAILED_MS
from batonmq._core.queues import QueueRef
from batonmq._core.records import Header, Message
from batonmq._producer.broker_sender import NotSent
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.receipts import PendingReceipt, Receipt
from batonmq.errors import (
    BatonError,
    DiskFull,
    NotEnoughReplicas,
    NotServing,
    Throttled,
    Unreachable,
)
from tests.client.twins import (
    BROKER,
    NOWHERE,
    OTHER_BROKER,
    Gate,
    StorageTwin,
    Twins,
    failing,
    two_brokers,
)
from tests.support.conditions import until

ONE_EACH = ProducerSettings(batch_messages_max=1)


class StillClock(Clock):
    """A clock that only the test advances, so that every answer is equally fast."""

    def __init__(self) -> None:
        self._now_ms = super().monotonic_ms()

    def monotonic_ms(self) -> int:
        return self._now_ms

    def advance(self, ms: int) -> None:
        self._now_ms += ms


class FirstQueueFirst(Random):
    """Lets the rotation of a topic begin at its first queue."""

    def getrandbits(self, k: int, /) -> int:
        return 2**k - 1 if k == 16 else super().getrandbits(k)


@asynccontextmanager
async def producing(
    queue_count: int, settings: ProducerSettings = ONE_EACH, clock: Clock | None = None
) -> AsyncIterator[tuple[Twins, Producer]]:
    """Run two brokers with `queue_count` queues each, and a producer with one message per batch."""
    environment = ClientEnvironment(clock=clock or Clock(), random=FirstQueueFirst())
    async with (
        two_brokers(orders=queue_count) as at,
        Producer(at.address, settings, environment=environment) as producer,
    ):
        yield at, producer


async def submit(producer: Producer, count: int) -> list[PendingReceipt]:
    return [await producer.submit("orders", Message(b"%d" % number)) for number in range(count)]


async def receipts(pending: list[PendingReceipt]) -> list[Receipt]:
    return [await one for one in pending]


async def brokers_of(pending: list[PendingReceipt]) -> Counter[str]:
    """Wait for the receipts; return the number of messages by broker."""
    return Counter(receipt.queue.broker for receipt in await receipts(pending))


def reject_as_full(*nodes: StorageTwin) -> None:
    for storage in nodes:
        storage.refusal = lambda _: DiskFull("not a byte more")


def accept(*nodes: StorageTwin) -> None:
    for storage in nodes:
        storage.refusal = lambda _: None


def request_count(at: Twins) -> int:
    return len(at.storage.requests) + len(at.other.requests)


def assert_stored_once(at: Twins, count: int) -> None:
    """Assert that the numbers below `count` are stored once, on either broker."""
    assert Counter(at.storage.stored + at.other.stored) == Counter(b"%d" % n for n in range(count))


async def test_unreachable_broker_gets_no_messages_while_the_other_serves() -> None:
    async with producing(4) as (at, producer):
        at.nameserver.storage_address = NOWHERE
        assert await brokers_of(await submit(producer, 40)) == {OTHER_BROKER: 40}
        assert_stored_once(at, 40)


async def test_refused_message_goes_to_the_other_broker_and_is_stored_once() -> None:
    async with producing(2) as (at, producer):
        reject_as_full(at.storage)
        assert await brokers_of(await submit(producer, 40)) == {OTHER_BROKER: 40}
        assert_stored_once(at, 40)
        tries = len(at.storage.requests)
        await receipts(await submit(producer, 40))
        assert len(at.storage.requests) == tries, "the broker that refused got another request"


async def test_broker_with_too_few_replicas_is_replaced_by_another() -> None:
    async with producing(2) as (at, producer):
        at.storage.refusal = lambda _: NotEnoughReplicas("one is in sync")
        assert await brokers_of(await submit(producer, 8)) == {OTHER_BROKER: 8}


async def test_throttled_batch_waits_for_its_own_broker() -> None:
    """A quota must not be evaded with another broker."""
    wait_ms, loop = 700, asyncio.get_running_loop()
    async with producing(2) as (at, producer):
        await receipts(await submit(producer, 8))
        refused: list[int] = []

        def over_quota(header: Header) -> BatonError | None:
            refused.append(header.queue_id)
            accept(at.storage)
            return Throttled("quota", retry_after_ms=wait_ms)

        at.storage.refusal = over_quota
        begin = loop.time()
        queue = QueueRef("orders", BROKER, 0)
        receipt = await producer.send("orders", b"late", queue=queue)
        assert receipt.queue == queue
        assert loop.time() - begin >= wait_ms / 1000
        assert refused == [0]
        brokers = await brokers_of(await submit(producer, 8))
        assert brokers.keys() == {BROKER, OTHER_BROKER}, "the throttled broker is avoided"


async def test_avoided_broker_is_probed_and_used_again() -> None:
    clock = StillClock()
    async with producing(2, clock=clock) as (at, producer):
        reject_as_full(at.storage)
        await receipts(await submit(producer, 4))
        accept(at.storage)
        await receipts(await submit(producer, 8))
        assert at.storage.stored == []
        clock.advance(FAILED_MS + 1)
        assert (await producer.send("orders", b"probe")).queue.broker == BROKER
        assert await brokers_of(await submit(producer, 8)) == {BROKER: 4, OTHER_BROKER: 4}


async def test_failed_probe_costs_one_request_and_no_message() -> None:
    clock = StillClock()
    async with producing(2, clock=clock) as (at, producer):
        reject_as_full(at.storage)
        await receipts(await submit(producer, 4))
        tries = len(at.storage.requests)
        clock.advance(FAILED_MS + 1)
        assert await brokers_of(await submit(producer, 8)) == {OTHER_BROKER: 8}
        assert len(at.storage.requests) == tries + 1


async def test_message_that_may_be_stored_is_retried_on_its_own_queue() -> None:
    async with producing(1, ProducerSettings()) as (at, producer):
        at.storage.after = failing(Unreachable("killed before it answered"), times=2)
        first = await producer.send("orders", b"first")
        assert (first.queue.broker, first.duplicate) == (BROKER, True)
        assert (at.storage.stored, at.other.stored) == ([b"first"], [])


async def test_unsent_messages_do_not_wait_behind_one_that_may_be_stored() -> None:
    gate = Gate()
    settings = ProducerSettings(batch_messages_max=1, request_timeout_ms=2_000)
    async with producing(1, settings) as (at, producer):
        at.storage.before = gate  # takes requests and does not answer
        pending = await submit(producer, 20)
        await until(lambda: len(at.other.stored) == 19)
        gate.open()
        first, *others = await receipts(pending)
        assert first.queue.broker == BROKER
        assert {receipt.queue.broker for receipt in others} == {OTHER_BROKER}
        assert_stored_once(at, 20)


async def test_messages_with_a_key_or_a_queue_keep_their_queue_and_order() -> None:
    queue = QueueRef("orders", BROKER, 0)
    async with producing(1) as (at, producer):
        reject_as_full(at.storage, at.other)
        pending = [
            await producer.submit("orders", Message(b"q%d" % n), queue=queue) for n in range(5)
        ]
        keyed = [
            await producer.submit("orders", Message(b"k%d" % n), ordering_key="key")
            for n in range(5)
        ]
        await until(lambda: at.storage.requests and len(at.storage.requests) > 2)
        accept(at.storage, at.other)
        assert {r.queue for r in await receipts(pending)} == {queue}
        of_key = await receipts(keyed)
        assert len({receipt.queue for receipt in of_key}) == 1
        assert [r.offset for r in of_key] == sorted(r.offset for r in of_key)
        assert len(at.storage.stored) + len(at.other.stored) == 10


async def test_messages_in_a_batch_with_a_chosen_queue_keep_that_queue() -> None:
    gate, queue = Gate(), QueueRef("orders", BROKER, 0)
    async with producing(1, ProducerSettings()) as (at, producer):
        held = await producer.submit("orders", Message(b"0"), queue=queue)
        at.storage.before = gate
        await until(lambda: gate.arrived)
        reject_as_full(at.storage)
        mixed = [
            await producer.submit("orders", Message(b"with queue"), queue=queue),
            await producer.submit("orders", Message(b"without")),
        ]
        gate.open()
        await until(lambda: len(at.storage.requests) > 2)
        accept(at.storage)
        assert await brokers_of([held, *mixed]) == {BROKER: 3}
        assert at.storage.stored == [b"0", b"with queue", b"without"]


async def test_messages_that_all_brokers_refuse_are_retried_until_one_stores_them() -> None:
    async with producing(2) as (at, producer):
        reject_as_full(at.storage, at.other)
        pending = await submit(producer, 10)
        await until(lambda: request_count(at) > 6)
        accept(at.storage, at.other)
        await receipts(pending)
        assert_stored_once(at, 10)


async def test_waiting_messages_probe_the_avoided_brokers() -> None:
    """No further message is sent, and only the other broker recovers."""
    clock = StillClock()
    async with producing(1, clock=clock) as (at, producer):
        reject_as_full(at.storage, at.other)
        pending = await submit(producer, 6)
        await until(lambda: request_count(at) > 6)
        tries, tries_at_other = request_count(at), len(at.other.requests)
        await until(lambda: request_count(at) > tries + 2)
        waits_at_other = len(at.other.requests) > tries_at_other
        accept(at.storage if waits_at_other else at.other)
        clock.advance(FAILED_MS + 1)
        await receipts(pending)
        assert_stored_once(at, 6)


async def test_moved_message_does_not_outlive_its_delivery_timeout() -> None:
    clock, settings = Clock(), ProducerSettings(batch_messages_max=1, delivery_timeout_ms=3_000)
    async with producing(4, settings) as (at, producer):
        reject_as_full(at.storage, at.other)
        begin_ms = clock.monotonic_ms()
        for one in await submit(producer, 20):
            with pytest.raises(DiskFull):
                await one
        assert clock.monotonic_ms() - begin_ms < 12_000
        assert at.storage.stored == at.other.stored == []


async def error_of(producer: Producer) -> BatonError:
    with pytest.raises(BatonError) as failed:
        await producer.send("orders", b"")
    return failed.value


async def test_error_says_whether_the_message_may_be_stored() -> None:
    settings = ProducerSettings(delivery_timeout_ms=3_000, request_timeout_ms=1_000)
    async with producing(1, settings) as (at, producer):
        at.nameserver.storage_address = at.nameserver.other_address = NOWHERE
        never_sent = await error_of(producer)
    assert isinstance(never_sent, NotSent)
    assert "sending again is safe" in never_sent.remedy
    async with producing(1, settings) as (at, producer):
        at.storage.before = at.other.before = Gate()
        lost = await error_of(producer)
    assert isinstance(lost, Unreachable)
    assert not isinstance(lost, NotSent)
    assert "may have stored" in lost.remedy


async def test_batch_answered_with_not_serving_may_be_stored() -> None:
    """A disk that fails during a write causes this error, and recovery may find the write."""
    async with producing(1, ProducerSettings()) as (at, producer):
        at.storage.after = failing(NotServing("the log can't be written"))
        assert (await producer.send("orders", b"1")).duplicate
        assert (at.storage.stored, at.other.stored) == ([b"1"], [])
