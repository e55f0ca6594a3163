"""The producer.

Goal: many sends share few batches; a retried batch is the same batch; an error reaches only the
senders of its messages; flushing or closing loses no submitted message, and every wait ends.
Method: a simulated nameserver and storage node behind real servers (`tests.client.twins`); a gate
holds requests while the test does something else.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from batonmq._common.clock import Clock
from batonmq._core.keyed_queues import KeyedQueues
from batonmq._core.queues import QueueRef
from batonmq._core.records import Header, Message
from batonmq._producer import broker_sender
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import Durability, ProducerSettings
from batonmq._producer.receipts import BatchOutcome, PendingReceipt, Receipt
from batonmq._producer.send_buffer import ProducerClosed
from batonmq._producer.waiting_sends import WaitingSend, WaitingSends
from batonmq.errors import (
    BadBatch,
    BatonError,
    Internal,
    LimitExceeded,
    NotServing,
    NotWritable,
    Overloaded,
    QueueNotFound,
    TopicNotFound,
    Unreachable,
)
from tests.client.twins import BROKER, NOWHERE, Gate, bodies, failing, twins
from tests.support.conditions import until


def queue(queue_id: int, topic: str = "orders") -> QueueRef:
    return QueueRef(topic, BROKER, queue_id)


async def submit(
    producer: Producer, *numbers: int, queue_id: int | None = None
) -> list[PendingReceipt]:
    chosen = None if queue_id is None else queue(queue_id)
    return [
        await producer.submit("orders", Message(b"%d" % number), queue=chosen) for number in numbers
    ]


async def outcomes(pending: list[PendingReceipt]) -> list[Receipt | BatonError]:
    async def outcome(one: PendingReceipt) -> Receipt | BatonError:
        try:
            return await one
        except BatonError as error:
            return error

    return [await outcome(one) for one in pending]


# ---- receipts


async def test_receipt_has_queue_offset_and_message_id() -> None:
    async with twins(orders=4) as at, Producer(at.address) as producer:
        await producer.send("orders", b"first", queue=queue(2))
        second, third = await outcomes(await submit(producer, 2, 3, queue_id=2))
    assert isinstance(second, Receipt)
    assert isinstance(third, Receipt)
    assert (second.queue, second.offset, third.offset) == (queue(2), 1, 2)
    assert second.message_id == "broker-a-1000-0", (
        "broker, position of the batch, index in the batch"
    )
    assert third.message_id == "broker-a-1000-1"
    assert second.store_unix_ms == 1_700_000_000_000
    assert not second.duplicate


@pytest.mark.parametrize("durability", Durability)
async def test_receipt_has_the_requested_durability(durability: Durability) -> None:
    settings = ProducerSettings(durability=durability)
    async with twins(orders=1) as at, Producer(at.address, settings) as producer:
        receipt = await producer.send("orders", b"")
        assert at.storage.durabilities == [durability.value]
    assert receipt.durability is durability


async def test_receipt_can_be_awaited_late_and_more_than_once() -> None:
    async with twins(orders=1) as at, Producer(at.address) as producer:
        (pending,) = await submit(producer, 1)
        await producer.flush()
        assert await pending == await pending


# ---- batches


async def test_concurrent_messages_share_few_batches() -> None:
    gate = Gate()
    async with twins(orders=8) as at, Producer(at.address) as producer:
        at.storage.before = gate
        pending = await submit(producer, *range(2_000))
        gate.open()
        receipts = await outcomes(pending)
        assert sum(map(len, at.storage.requests)) <= 2 * 8
        assert Counter(at.storage.stored) == Counter(b"%d" % n for n in range(2_000))
    assert len({(r.queue, r.offset) for r in receipts if isinstance(r, Receipt)}) == 2_000


async def test_many_concurrent_sends_share_batches_and_query_no_further_route() -> None:
    async with twins(orders=8) as at, Producer(at.address) as producer:
        await producer.send("orders", b"opens the topic")
        query_count = len(at.nameserver.route_queries)
        async with asyncio.TaskGroup() as tasks:
            for number in range(500):
                tasks.create_task(producer.send("orders", b"%d" % number))
        assert len(at.nameserver.route_queries) == query_count
        assert sum(map(len, at.storage.requests)) <= 50
        assert len(at.storage.stored) == 501


async def test_only_the_first_sends_of_a_new_producer_wait_for_the_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited = 0

    def add(waiting: WaitingSends, send: WaitingSend[Any]) -> None:
        nonlocal waited
        waited += 1
        original(waiting, send)

    original = WaitingSends.add
    monkeypatch.setattr(WaitingSends, "add", add)
    async with twins(orders=8) as at, Producer(at.address) as producer:

        async def send() -> None:
            for number in range(5):
                await producer.send("orders", b"%d" % number)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(500):
                tasks.create_task(send())
        assert waited == 500
        assert len(at.nameserver.route_queries) == 1
        assert len(at.storage.stored) == 2_500


async def test_one_queue_has_one_batch_in_flight() -> None:
    gate = Gate()
    settings = ProducerSettings(batch_messages_max=1)
    async with twins(orders=1) as at, Producer(at.address, settings) as producer:
        at.storage.before = gate
        pending = await submit(producer, *range(3))
        await until(lambda: gate.arrived)
        assert [len(request) for request in at.storage.requests] == [1]
        gate.open()
        await outcomes(pending)
        assert at.storage.queues["orders", 0] == [b"0", b"1", b"2"]


async def test_linger_waits_for_more_messages() -> None:
    settings = ProducerSettings(linger_ms=4_000)
    async with twins(orders=1, more=1) as at, Producer(at.address, settings) as producer:
        await submit(producer, 1)
        await producer.submit("more", Message(b"after a call to the nameserver"))
        await submit(producer, 2)
        await producer.flush()
        (request,) = at.storage.requests
        assert bodies(request[0]) == [b"1", b"2"]


async def test_small_request_waits_for_the_answer_to_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_sender, "HOLD_S", 60)
    gate = Gate()
    async with twins(orders=8, more=1) as at, Producer(at.address) as producer:
        at.storage.before = gate
        pending = await submit(producer, 1)
        await until(lambda: gate.arrived)
        pending += await submit(producer, 2, 3)
        pending.append(await producer.submit("more", Message(b"after a call to the nameserver")))
        assert len(at.storage.requests) == 1
        gate.open()
        await outcomes(pending)
        assert [sorted(map(bodies, request)) for request in at.storage.requests] == [
            [[b"1"]],
            [[b"2", b"3"], [b"after a call to the nameserver"]],
        ]


@pytest.mark.parametrize(("hold_s", "small_bytes"), [(0.002, 1_000), (60, 1)])
async def test_request_does_not_wait_for_long_and_a_large_one_not_at_all(
    monkeypatch: pytest.MonkeyPatch, hold_s: float, small_bytes: int
) -> None:
    monkeypatch.setattr(broker_sender, "HOLD_S", hold_s)
    monkeypatch.setattr(broker_sender, "SMALL_BYTES", small_bytes)
    gate = Gate()
    async with twins(orders=8) as at, Producer(at.address) as producer:
        at.storage.before = gate
        pending = await submit(producer, 1)
        await until(lambda: gate.arrived)
        pending += await submit(producer, 2)
        await until(lambda: len(at.storage.requests) == 2)
        gate.open()
        await outcomes(pending)


async def test_request_holds_no_more_batches_than_storage_takes() -> None:
    gate = Gate()
    settings = ProducerSettings(in_flight_requests_max=1)
    async with twins(orders=1_024, more=1_024) as at, Producer(at.address, settings) as producer:
        at.storage.before = gate
        await producer.submit("orders", Message(b"holds the only slot"))
        await until(lambda: gate.arrived)
        pending = [
            await producer.submit(topic, Message(b""), queue=queue(queue_id, topic))
            for topic in ("orders", "more")
            for queue_id in range(1, 1_024)
        ]
        gate.open()
        assert all(isinstance(one, Receipt) for one in await outcomes(pending))
        assert [len(request) for request in at.storage.requests] == [1, 1_024, 1_022]


# ---- queues


async def test_ordering_key_keeps_its_queue_and_its_order_through_failures() -> None:
    settings = ProducerSettings(batch_messages_max=3)
    async with twins(orders=8) as at, Producer(at.address, settings) as producer:
        at.storage.before = failing(NotServing("not yet"), times=5)
        pending = [
            await producer.submit("orders", Message(b"%d" % n), ordering_key=f"key-{n % 5}")
            for n in range(100)
        ]
        receipts = await outcomes(pending)
        for key in range(5):
            of_key = [r for r in receipts[key::5] if isinstance(r, Receipt)]
            queues = tuple(queue(queue_id) for queue_id in range(8))
            assert {r.queue for r in of_key} == {KeyedQueues(queues).of(f"key-{key}")}
            assert len(of_key) == 20
            assert [r.offset for r in of_key] == sorted(r.offset for r in of_key)


@pytest.mark.parametrize("in_flight_bytes_max", [2_000, 1_000_000])
async def test_messages_of_a_key_sent_at_once_keep_their_order(in_flight_bytes_max: int) -> None:
    """The topic may not be open yet; small messages do not overtake large ones."""
    settings = ProducerSettings(in_flight_bytes_max=in_flight_bytes_max)
    async with twins(orders=4) as at, Producer(at.address, settings) as producer:
        async with asyncio.TaskGroup() as tasks:
            for n in range(200):
                body = b"%d " % n + bytes(1_500 if n % 7 == 0 else 0)
                tasks.create_task(producer.send("orders", body, ordering_key=f"key-{n % 3}"))
        numbers = [int(body.split()[0]) for body in at.storage.log]
    for key in range(3):
        of_key = [number for number in numbers if number % 3 == key]
        assert of_key == list(range(key, 200, 3))


async def test_messages_without_key_use_all_queues() -> None:
    settings = ProducerSettings(batch_messages_max=1)
    async with twins(orders=4) as at, Producer(at.address, settings) as producer:
        await outcomes(await submit(producer, *range(8)))
        assert {key: len(queue) for key, queue in at.storage.queues.items()} == {
            ("orders", queue_id): 2 for queue_id in range(4)
        }


async def test_messages_fill_the_batch_of_one_queue_until_it_is_sent() -> None:
    gate = Gate()
    async with twins(orders=4) as at, Producer(at.address) as producer:
        at.storage.before = gate
        pending = await submit(producer, 0)
        await until(lambda: gate.arrived)
        pending += await submit(producer, *range(1, 10))
        gate.open()
        receipts = [r for r in await outcomes(pending) if isinstance(r, Receipt)]
        first, *others = [receipt.queue.queue_id for receipt in receipts]
        assert others == 9 * [(first + 1) % 4]


async def test_unknown_queue_is_refused() -> None:
    async with twins(orders=2) as at, Producer(at.address) as producer:
        with pytest.raises(QueueNotFound):
            await producer.send("orders", b"", queue=queue(2))
        assert at.storage.requests == []


async def test_unknown_topic_is_refused_at_once() -> None:
    async with twins(orders=2) as at, Producer(at.address) as producer:
        with pytest.raises(TopicNotFound):
            await producer.send("order", b"")
        assert at.nameserver.route_queries == ["order"]


async def test_added_queue_is_used() -> None:
    async with twins(orders=1) as at, Producer(at.address) as producer:
        await producer.send("orders", b"")
        at.nameserver.set_topic("orders", 2)

        async def added_queue_is_used() -> bool:
            return (await producer.send("orders", b"")).queue == queue(1)

        await until(added_queue_is_used)


async def test_deleted_topic_is_refused() -> None:
    async with twins(orders=1) as at, Producer(at.address) as producer:
        await producer.send("orders", b"")
        at.nameserver.set_topic("orders", 0)

        async def refused() -> bool:
            try:
                await producer.send("orders", b"")
            except TopicNotFound:
                return True
            return False

        await until(refused)


async def test_broker_with_a_new_address_is_found() -> None:
    async with twins(orders=1) as at, Producer(at.address) as producer:
        new_address, at.nameserver.storage_address = at.nameserver.storage_address, NOWHERE
        (pending,) = await submit(producer, 1)
        await until(lambda: at.nameserver.route_queries)
        at.nameserver.storage_address = new_address
        assert (await pending).offset == 0


# ---- failures


async def test_repeated_batch_is_the_same_to_the_byte() -> None:
    async with twins(orders=1) as at, Producer(at.address) as producer:
        at.storage.before = failing(NotServing("starting"), times=3)
        first = await submit(producer, 1)
        await until(lambda: at.storage.requests)
        await submit(producer, 2)
        await outcomes(first)
        await producer.flush()
        assert len({batch for request in at.storage.requests[:4] for batch in request}) == 1
        assert at.storage.queues["orders", 0] == [b"1", b"2"]


async def test_batch_whose_answer_was_lost_is_stored_once() -> None:
    async with twins(orders=1) as at, Producer(at.address) as producer:
        at.storage.after = failing(NotServing("killed before it answered"))
        first = await producer.send("orders", b"first")
        second = await producer.send("orders", b"second")
        assert at.storage.queues["orders", 0] == [b"first", b"second"]
    assert (first.offset, first.duplicate) == (0, True)
    assert (second.offset, second.duplicate) == (1, False)


async def test_refused_batch_fails_its_senders_only() -> None:
    def refuse_queue_1(header: Header) -> BatonError | None:
        return BadBatch("not this one") if header.queue_id == 1 else None

    gate = Gate()
    async with twins(orders=3) as at, Producer(at.address) as producer:
        at.storage.before, at.storage.refusal = gate, refuse_queue_1
        pending = [
            (queue_id, one)
            for queue_id in (0, 1, 2)
            for one in await submit(producer, 1, 2, queue_id=queue_id)
        ]
        gate.open()
        for queue_id, one in pending:
            if queue_id == 1:
                with pytest.raises(BadBatch, match="not this one"):
                    await one
            else:
                await one
        at.storage.refusal = lambda _: None
        assert (await producer.send("orders", b"", queue=queue(1))).offset == 0
        assert len(at.storage.stored) == 5


async def test_sequence_of_a_batch_that_may_be_stored_is_not_used_again() -> None:
    """Otherwise storage would take the next batch for a retry: it would be lost with a receipt."""
    async with twins(orders=1) as at, Producer(at.address) as producer:
        at.storage.after = failing(Internal("a bug, after the write"))
        with pytest.raises(Internal):
            await producer.send("orders", b"first")
        second = await producer.send("orders", b"second")
        assert at.storage.queues["orders", 0] == [b"first", b"second"]
    assert (second.offset, second.duplicate) == (1, False)


async def test_timed_out_batch_of_a_queue_does_not_affect_other_queues() -> None:
    """A new producer epoch on one queue must not end the epoch of other queues."""

    def queue_0_is_full(header: Header) -> BatonError | None:
        return Overloaded("wait") if header.queue_id == 0 else None

    settings = ProducerSettings(delivery_timeout_ms=3_000)
    async with twins(orders=2) as at, Producer(at.address, settings) as producer:
        await producer.send("orders", b"1", queue=queue(1))
        at.storage.refusal = queue_0_is_full
        with pytest.raises(Overloaded):
            await producer.send("orders", b"lost", queue=queue(0))
        at.storage.refusal = lambda _: None
        await producer.send("orders", b"0", queue=queue(0))
        await producer.send("orders", b"2", queue=queue(1))
        assert at.storage.queues == {("orders", 0): [b"0"], ("orders", 1): [b"1", b"2"]}


async def test_too_large_message_is_refused_and_never_sent() -> None:
    async with twins(orders=1) as at, Producer(at.address) as producer:
        with pytest.raises(LimitExceeded) as refused:
            await producer.send("orders", bytes(4 * 1024 * 1024 + 1))
        assert at.storage.requests == []
    assert refused.value.facts["field"] == "body"


async def test_cancelled_wait_for_a_receipt_does_not_affect_other_messages() -> None:
    gate = Gate()
    async with twins(orders=1) as at, Producer(at.address) as producer:
        at.storage.before = gate
        await producer.submit("orders", Message(b"opens the topic"))
        await until(lambda: gate.arrived)
        waiting: list[int] = []

        async def wait_for(number: int, pending: PendingReceipt) -> Receipt:
            waiting.append(number)
            return await pending

        first, second = await submit(producer, 1, 2)
        async with asyncio.TaskGroup() as tasks:
            cancelled = tasks.create_task(wait_for(1, first))
            kept = tasks.create_task(wait_for(2, second))
            await until(lambda: len(waiting) == 2)
            cancelled.cancel()
            await until(cancelled.done)
            gate.open()
        assert kept.result().offset == 2
        assert at.storage.queues["orders", 0] == [b"opens the topic", b"1", b"2"]


# ---- bounds


async def test_no_more_bytes_are_in_flight_than_allowed() -> None:
    gate = Gate()
    settings = ProducerSettings(in_flight_bytes_max=10_000)
    async with twins(orders=1) as at, Producer(at.address, settings) as producer:
        await producer.send("orders", b"opens the topic")
        at.storage.before = gate
        async with asyncio.TaskGroup() as tasks:
            done = list[int]()

            async def send(number: int) -> None:
                await producer.submit("orders", Message(bytes(4_000)))
                done.append(number)

            for number in range(6):
                tasks.create_task(send(number))
            await until(lambda: gate.arrived and done)
            assert len(done) == 2, "a third message exceeds the limit"
            gate.open()
        await producer.flush()
        assert len(done) == 6
        assert len(at.storage.stored) == 7


async def test_message_larger_than_the_limit_is_sent_when_no_other_is_in_flight() -> None:
    settings = ProducerSettings(in_flight_bytes_max=1_000)
    async with twins(orders=1) as at, Producer(at.address, settings) as producer:
        assert (await producer.send("orders", bytes(5_000))).offset == 0
        assert (await producer.send("orders", bytes(5_000))).offset == 1


async def test_producer_forgets_the_queues_of_deleted_topics() -> None:
    async with twins(orders=1) as at, Producer(at.address) as producer:
        for number in range(5):
            topic = f"t-{number}"
            at.nameserver.set_topic(topic, 4)
            for _ in range(8):
                await producer.send(topic, b"")
            at.nameserver.set_topic(topic, 0)
            await until(lambda: not producer._buffer.topics)
        await producer.send("orders", b"")
        assert {queue.topic for queue in producer._buffer._senders} == {"orders"}


# ---- flush and close


async def test_flush_waits_for_every_outcome() -> None:
    async with twins(orders=4) as at, Producer(at.address) as producer:
        at.storage.before = failing(NotServing("not yet"), times=3)
        await submit(producer, *range(200))
        await producer.flush()
        assert len(at.storage.stored) == 200


async def test_flush_does_not_wait_for_messages_that_are_sent_meanwhile() -> None:
    async with twins(orders=1) as at, Producer(at.address) as producer:

        async def send_on() -> None:
            while True:
                await producer.send("orders", b"later")

        await submit(producer, *range(3))
        async with asyncio.TaskGroup() as tasks:
            senders = [tasks.create_task(send_on()) for _ in range(8)]
            await until(lambda: b"later" in at.storage.stored)
            await asyncio.wait_for(producer.flush(), 10)
            for sender in senders:
                sender.cancel()


async def test_flush_waits_for_messages_that_moved_to_other_batches() -> None:
    first, second = (BatchOutcome(QueueRef("orders", BROKER, number)) for number in range(2))
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(first.wait_for_all())
        await asyncio.sleep(0)
        first.move([PendingReceipt(second, 0), PendingReceipt(second, 1)])
        await asyncio.wait({waiting}, timeout=0.1)
        assert not waiting.done()
        second.settle(NotWritable("the topic has no writable queue"))
        await asyncio.wait_for(waiting, 10)


async def test_close_loses_no_message() -> None:
    async with twins(orders=4) as at:
        at.storage.before = failing(NotServing("not yet"), times=3)
        async with Producer(at.address) as producer:
            pending = await submit(producer, *range(200))
        assert Counter(at.storage.stored) == Counter(b"%d" % n for n in range(200))
        assert all(isinstance(one, Receipt) for one in await outcomes(pending))


async def test_close_without_a_broker_ends_within_the_delivery_timeout() -> None:
    clock, settings = Clock(), ProducerSettings(delivery_timeout_ms=1_000, batch_messages_max=1)
    async with twins(orders=2) as at:
        at.nameserver.storage_address = NOWHERE
        async with Producer(at.address, settings) as producer:
            pending = await submit(producer, *range(20))
            begin_ms = clock.monotonic_ms()
        spent_ms = clock.monotonic_ms() - begin_ms
        assert all(isinstance(one, Unreachable) for one in await outcomes(pending))
    assert spent_ms < 9_000, "the batches of a queue waited for their timeout one after the other"


async def test_unsent_batches_behind_a_hanging_request_time_out_together() -> None:
    gate = Gate()
    settings = ProducerSettings(
        delivery_timeout_ms=3_000, request_timeout_ms=4_000, batch_messages_max=1
    )
    async with twins(orders=1) as at, Producer(at.address, settings) as producer:
        at.storage.before = gate  # takes requests and never answers
        pending = await submit(producer, *range(20))
        assert all(isinstance(one, Unreachable) for one in await outcomes(pending))
        assert len(at.storage.requests) == 1


async def test_error_in_the_block_closes_the_producer_without_waiting() -> None:
    gate = Gate()
    async with twins(orders=1) as at:
        at.storage.before = gate
        with pytest.raises(ValueError, match="on purpose"):
            async with Producer(at.address) as producer:
                (pending,) = await submit(producer, 1)
                await until(lambda: gate.arrived)
                raise ValueError("on purpose")
        with pytest.raises(Unreachable):
            await pending


async def test_closed_producer_refuses_messages() -> None:
    async with twins(orders=1) as at:
        async with Producer(at.address) as producer:
            await producer.send("orders", b"")
        with pytest.raises(Unreachable, match="closed"):
            await producer.send("orders", b"")


async def test_close_waits_for_every_outcome_and_refuses_later_messages() -> None:
    gate = Gate()
    async with twins(orders=1) as at, Producer(at.address) as producer:
        at.storage.before = gate
        (pending,) = await submit(producer, 1)
        await producer.send_one_way("orders", b"2")
        await until(lambda: gate.arrived)
        async with asyncio.TaskGroup() as tasks:
            closing = [tasks.create_task(producer.close()) for _ in range(2)]
            await asyncio.sleep(0)  # each has begun
            refused = await _refusal(producer)
            assert isinstance(refused, ProducerClosed)
            assert "not sent" in refused.remedy
            with pytest.raises(ProducerClosed):
                await producer.send_one_way("orders", b"later")
            with pytest.raises(ProducerClosed):
                await producer.send("orders", b"later", delay_ms=1)
            assert not any(one.done() for one in closing)
            gate.open()
        assert isinstance(await pending, Receipt)
        assert sorted(at.storage.stored) == [b"1", b"2"]
        await producer.close()
    await producer.close()


async def test_send_that_waits_for_room_is_refused_by_the_close() -> None:
    gate, settings = Gate(), ProducerSettings(in_flight_bytes_max=100)
    async with twins(orders=1) as at, Producer(at.address, settings) as producer:
        at.storage.before = gate
        pending = await producer.submit("orders", Message(bytes(90)))
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(_refusal_of(producer, bytes(90)))
            await until(lambda: gate.arrived)
            closing = tasks.create_task(producer.close())
            await asyncio.sleep(0)  # it has begun
            assert not waiting.done()
            gate.open()
            await closing
        assert isinstance(waiting.result(), ProducerClosed)
        assert isinstance(await pending, Receipt)
        assert at.storage.stored == [bytes(90)]


async def test_batch_that_is_moved_while_the_producer_closes_is_stored() -> None:
    gate = Gate()
    async with twins(orders=2) as at, Producer(at.address) as producer:
        await producer.send("orders", b"open")
        at.storage.before = gate
        at.storage.refusal = lambda header: QueueNotFound("gone") if header.queue_id == 1 else None
        pending = await submit(producer, *range(200))
        await until(lambda: gate.arrived)
        at.nameserver.set_topic("orders", 1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(producer.close())
            gate.open()
        results = await outcomes(pending)
        assert {type(one) for one in results} == {Receipt}
        assert {one.queue.queue_id for one in results if isinstance(one, Receipt)} == {0}


async def test_error_says_that_an_earlier_attempt_may_have_stored_the_message() -> None:
    async with twins(orders=2) as at, Producer(at.address) as producer:

        async def fail_after_storing(_: Sequence[bytes]) -> None:
            """Make the next attempt find the queue deleted."""
            at.storage.refusal = lambda _: QueueNotFound("gone")
            at.storage.before = failing(QueueNotFound("gone"), times=99)
            at.nameserver.set_topic("orders", 1)
            raise Unreachable("killed before it answered")

        at.storage.after = fail_after_storing
        (pending,) = await submit(producer, 1, queue_id=1)
        with pytest.raises(
            Unreachable, match="gone; an earlier attempt may have stored"
        ) as refused:
            await pending
        assert "Check whether it is stored" in refused.value.remedy


async def _refusal_of(producer: Producer, body: bytes) -> BatonError:
    with pytest.raises(BatonError) as refused:
        await producer.send("orders", body)
    return refused.value


async def _refusal(producer: Producer) -> BatonError:
    with pytest.raises(BatonError) as refused:
        await producer.send("orders", b"")
    return refused.value


async def test_sends_that_wait_for_their_route_fail_at_the_close() -> None:
    async with asyncio.TaskGroup() as tasks, Producer(NOWHERE) as producer:
        sending = [tasks.create_task(_refusal(producer)) for _ in range(3)]
        await asyncio.sleep(0)  # each has begun
    assert {type(one.result()) for one in sending} == {ProducerClosed}


async def test_sends_without_a_nameserver_fail_together() -> None:
    clock, settings = Clock(), ProducerSettings(delivery_timeout_ms=500)
    async with Producer(NOWHERE, settings) as producer, asyncio.TaskGroup() as tasks:
        begin_ms = clock.monotonic_ms()
        sending = [tasks.create_task(_refusal(producer)) for _ in range(20)]
        await asyncio.wait(sending)
    assert {type(one.result()) for one in sending} == {Unreachable}
    assert clock.monotonic_ms() - begin_ms < 9_000, (
        "the sends waited for their timeout one after the other"
    )


async def test_receipt_with_an_error_need_not_be_awaited() -> None:
    async with twins(orders=1) as at:
        at.storage.refusal = lambda _: BadBatch("never")
        async with Producer(at.address) as producer:
            await submit(producer, 1, 2, 3)
