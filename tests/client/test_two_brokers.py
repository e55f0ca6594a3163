"""A producer and a broker in trouble.

Goal: what certainly was not stored, and may go anywhere, goes to another broker at once; what may
have been stored, or has a queue of its own, is repeated there; nothing is stored twice or lost.
Method: two storage nodes of lists, one of which is away, hangs, refuses or loses an answer; time
stands still where a slow answer would be judged, and goes on where ten seconds would have to pass.
"""

from __future__ import annotations

import asyncio
from collections import Counter

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
    failing,
    two_brokers,
)
from tests.support.conditions import until

ONE_EACH = ProducerSettings(batch_messages_max=1)


class StillClock(Clock):
    """It stands still unless the test lets it go on: every answer is as quick as any other."""

    def __init__(self) -> None:
        self._now_ms = super().monotonic_ms()

    def monotonic_ms(self) -> int:
        return self._now_ms

    def go_on(self, ms: int) -> None:
        self._now_ms += ms


async def submit(producer: Producer, count: int) -> list[PendingReceipt]:
    return [await producer.submit("orders", Message(b"%d" % number)) for number in range(count)]


async def receipts(pending: list[PendingReceipt]) -> list[Receipt]:
    return [await one for one in pending]


def full(storage: StorageTwin) -> None:
    storage.refusal = lambda _: DiskFull("not a byte more")


async def test_broker_that_is_away_gets_nothing_as_long_as_there_is_another() -> None:
    async with two_brokers(orders=4) as at, Producer(at.address, ONE_EACH) as producer:
        at.nameserver.storage_address = NOWHERE
        found = await receipts(await submit(producer, 40))
        assert {receipt.queue.broker for receipt in found} == {OTHER_BROKER}
        assert Counter(at.other.stored) == Counter(b"%d" % n for n in range(40))


async def test_refused_message_goes_to_the_other_broker_and_is_stored_once() -> None:
    async with two_brokers(orders=2) as at, Producer(at.address, ONE_EACH) as producer:
        full(at.storage)
        found = await receipts(await submit(producer, 40))
        assert {receipt.queue.broker for receipt in found} == {OTHER_BROKER}
        assert Counter(at.other.stored) == Counter(b"%d" % n for n in range(40))
        tries = len(at.storage.requests)
        await receipts(await submit(producer, 40))
        assert len(at.storage.requests) == tries, "it is left alone"


async def test_broker_with_too_few_replicas_is_replaced_by_another() -> None:
    async with two_brokers(orders=2) as at, Producer(at.address, ONE_EACH) as producer:
        at.storage.refusal = lambda _: NotEnoughReplicas("one is in sync")
        found = await receipts(await submit(producer, 8))
        assert {receipt.queue.broker for receipt in found} == {OTHER_BROKER}


async def test_throttled_batch_waits_for_its_own_broker() -> None:
    """A quota must not be evaded with another broker."""
    wait_ms, loop = 700, asyncio.get_running_loop()
    async with two_brokers(orders=2) as at, Producer(at.address, ONE_EACH) as producer:
        await receipts(await submit(producer, 8))
        refused: list[int] = []

        def over_quota(header: Header) -> BatonError | None:
            refused.append(header.queue_id)
            at.storage.refusal = lambda _: None
            return Throttled("quota", retry_after_ms=wait_ms)

        at.storage.refusal = over_quota
        begin = loop.time()
        queue = QueueRef("orders", BROKER, 0)
        receipt = await producer.send("orders", b"late", queue=queue)
        assert receipt.queue == queue
        assert loop.time() - begin >= wait_ms / 1000
        assert refused == [0]
        found = await receipts(await submit(producer, 8))
        assert {one.queue.broker for one in found} == {BROKER, OTHER_BROKER}, "it is not avoided"


async def test_broker_that_was_avoided_is_probed_and_used_again() -> None:
    clock = StillClock()
    outside = ClientEnvironment(clock=clock)
    async with (
        two_brokers(orders=2) as at,
        Producer(at.address, ONE_EACH, environment=outside) as producer,
    ):
        full(at.storage)
        await receipts(await submit(producer, 4))
        at.storage.refusal = lambda _: None
        await receipts(await submit(producer, 8))
        assert at.storage.stored == []
        clock.go_on(FAILED_MS + 1)
        assert (await producer.send("orders", b"probe")).queue.broker == BROKER
        found = await receipts(await submit(producer, 8))
        assert Counter(r.queue.broker for r in found) == {BROKER: 4, OTHER_BROKER: 4}


async def test_probe_that_fails_costs_nothing_but_a_try() -> None:
    clock = StillClock()
    outside = ClientEnvironment(clock=clock)
    async with (
        two_brokers(orders=2) as at,
        Producer(at.address, ONE_EACH, environment=outside) as producer,
    ):
        full(at.storage)
        await receipts(await submit(producer, 4))
        tries = len(at.storage.requests)
        clock.go_on(FAILED_MS + 1)
        found = await receipts(await submit(producer, 8))
        assert {receipt.queue.broker for receipt in found} == {OTHER_BROKER}
        assert len(at.storage.requests) == tries + 1


async def test_message_that_may_be_stored_is_repeated_on_its_own_queue() -> None:
    async with two_brokers(orders=1) as at, Producer(at.address) as producer:
        at.storage.after = failing(Unreachable("killed before it answered"), times=2)
        first = await producer.send("orders", b"first")
        assert (first.queue.broker, first.duplicate) == (BROKER, True)
        assert (at.storage.stored, at.other.stored) == ([b"first"], [])


async def test_what_was_never_sent_does_not_wait_behind_what_may_be_stored() -> None:
    gate = Gate()
    settings = ProducerSettings(batch_messages_max=1, request_timeout_ms=2_000)
    async with two_brokers(orders=1) as at, Producer(at.address, settings) as producer:
        at.storage.before = gate  # takes requests and does not answer
        pending = await submit(producer, 20)
        await until(lambda: len(at.other.stored) == 19)
        gate.open()
        found = await receipts(pending)
        assert found[0].queue.broker == BROKER
        assert {receipt.queue.broker for receipt in found[1:]} == {OTHER_BROKER}
        stored = Counter(at.storage.stored + at.other.stored)
        assert stored == Counter(b"%d" % n for n in range(20))


async def test_messages_with_a_key_or_a_queue_stay_and_keep_their_order() -> None:
    queue = QueueRef("orders", BROKER, 0)
    async with two_brokers(orders=1) as at, Producer(at.address, ONE_EACH) as producer:
        at.storage.refusal = at.other.refusal = lambda _: DiskFull("not yet")
        pending = [
            await producer.submit("orders", Message(b"q%d" % n), queue=queue) for n in range(5)
        ]
        keyed = [
            await producer.submit("orders", Message(b"k%d" % n), ordering_key="key")
            for n in range(5)
        ]
        await until(lambda: at.storage.requests and len(at.storage.requests) > 2)
        at.storage.refusal = at.other.refusal = lambda _: None
        assert {r.queue for r in await receipts(pending)} == {queue}
        of_key = await receipts(keyed)
        assert len({receipt.queue for receipt in of_key}) == 1
        assert [r.offset for r in of_key] == sorted(r.offset for r in of_key)
        assert len(at.storage.stored) + len(at.other.stored) == 10


async def test_free_messages_that_share_a_batch_with_a_keyed_one_stay_with_it() -> None:
    gate = Gate()
    async with two_brokers(orders=1) as at, Producer(at.address) as producer:
        held = await producer.submit("orders", Message(b"0"), queue=QueueRef("orders", BROKER, 0))
        at.storage.before = gate
        await until(lambda: gate.arrived)
        full(at.storage)
        mixed = [
            await producer.submit("orders", Message(b"asks"), queue=QueueRef("orders", BROKER, 0)),
            await producer.submit("orders", Message(b"free")),
        ]
        gate.open()
        await until(lambda: len(at.storage.requests) > 2)
        at.storage.refusal = lambda _: None
        found = await receipts([held, *mixed])
        assert {receipt.queue.broker for receipt in found} == {BROKER}
        assert at.storage.stored == [b"0", b"asks", b"free"]


async def test_if_all_are_in_trouble_messages_are_repeated_till_one_takes_them() -> None:
    async with two_brokers(orders=2) as at, Producer(at.address, ONE_EACH) as producer:
        full(at.storage)
        full(at.other)
        pending = await submit(producer, 10)
        await until(lambda: len(at.storage.requests) + len(at.other.requests) > 6)
        at.storage.refusal = at.other.refusal = lambda _: None
        await receipts(pending)
        stored = Counter(at.storage.stored + at.other.stored)
        assert stored == Counter(b"%d" % n for n in range(10))


async def test_messages_that_wait_are_a_probe_too() -> None:
    """No further message is sent, and only the other broker comes back."""
    clock = StillClock()
    outside = ClientEnvironment(clock=clock)
    async with (
        two_brokers(orders=1) as at,
        Producer(at.address, ONE_EACH, environment=outside) as producer,
    ):
        full(at.storage)
        full(at.other)
        pending = await submit(producer, 6)
        await until(lambda: len(at.storage.requests) + len(at.other.requests) > 6)
        tries = len(at.storage.requests), len(at.other.requests)
        await until(lambda: len(at.storage.requests) + len(at.other.requests) > sum(tries) + 2)
        waits_at_other = len(at.other.requests) > tries[1]
        (at.storage if waits_at_other else at.other).refusal = lambda _: None
        clock.go_on(FAILED_MS + 1)
        await receipts(pending)
        stored = Counter(at.storage.stored + at.other.stored)
        assert stored == Counter(b"%d" % n for n in range(6))


async def test_message_that_is_moved_does_not_outlive_its_delivery_timeout() -> None:
    clock, settings = Clock(), ProducerSettings(batch_messages_max=1, delivery_timeout_ms=3_000)
    async with two_brokers(orders=4) as at, Producer(at.address, settings) as producer:
        full(at.storage)
        full(at.other)
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


async def test_error_tells_whether_the_message_may_be_stored() -> None:
    settings = ProducerSettings(delivery_timeout_ms=3_000, request_timeout_ms=1_000)
    async with two_brokers(orders=1) as at, Producer(at.address, settings) as producer:
        at.nameserver.storage_address = at.nameserver.other_address = NOWHERE
        never_left = await error_of(producer)
    assert isinstance(never_left, NotSent)
    assert "sending again is safe" in never_left.remedy
    async with two_brokers(orders=1) as at, Producer(at.address, settings) as producer:
        at.storage.before = at.other.before = Gate()
        lost = await error_of(producer)
    assert isinstance(lost, Unreachable)
    assert not isinstance(lost, NotSent)
    assert "may have stored" in lost.remedy


async def test_node_that_says_it_does_not_serve_may_have_stored() -> None:
    """A disk that fails under a write is told so, and the write may be found by recovery."""
    async with two_brokers(orders=1) as at, Producer(at.address) as producer:
        at.storage.after = failing(NotServing("the log can't be written"))
        assert (await producer.send("orders", b"1")).duplicate
        assert (at.storage.stored, at.other.stored) == ([b"1"], [])
