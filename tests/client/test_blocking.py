"""The clients for programs without asyncio.

Goal: in plain threads they behave like the asyncio clients, and they leave no thread behind.
Method: a real cluster; the calls run in threads of the test.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from batonmq._blocking import BlockingConsumer, BlockingProducer, BlockingPuller
from batonmq._consumer.membership import SubscriptionVerdict
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.message_batch import MessageBatch
from batonmq._core.transactions import PendingTransaction, TransactionState
from batonmq._producer.send_buffer import ProducerClosed
from batonmq.admin.admin import Admin
from batonmq.errors import BadExpression, InvalidArgument, TopicNotFound, Unreachable
from tests.client.group import QUICK, Scene, scene

pytestmark = pytest.mark.e2e
NO_SERVER = "127.0.0.1:1"


@pytest.fixture
async def at(nameserver: str) -> Scene:
    async with scene(nameserver) as made:
        return made


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batonmq"]


def test_many_threads_send_and_one_thread_receives(at: Scene) -> None:
    with BlockingProducer(at.nameserver) as producer, ThreadPoolExecutor(8) as pool:
        assert our_threads()
        receipts = list(pool.map(lambda n: producer.send(at.topic, b"%d" % n), range(200)))
    assert len({(receipt.queue, receipt.offset) for receipt in receipts}) == 200
    seen: list[bytes] = []
    with BlockingConsumer(at.nameserver, at.group, {at.topic: "*"}, QUICK) as consumer:
        for message in consumer:
            seen.append(message.body)
            if len(seen) == 200:
                break
    assert Counter(seen) == Counter(b"%d" % n for n in range(200))
    assert not our_threads()


def test_handler_in_a_thread_replies_to_a_request_of_another_thread(at: Scene) -> None:
    with (
        BlockingProducer(at.nameserver) as producer,
        BlockingConsumer(at.nameserver, at.group, {at.topic: "*"}, QUICK) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        request = pool.submit(producer.request, at.topic, b"x", timeout_ms=60_000)
        for message in consumer:
            consumer.reply(message, message.body + b"!")
            break
        assert request.result().body == b"x!"


def test_last_message_before_a_break_is_redelivered(at: Scene) -> None:
    with BlockingProducer(at.nameserver) as producer:
        producer.send(at.topic, b"x")
    for expected in (False, True):
        with BlockingConsumer(at.nameserver, at.group, {at.topic: "*"}, QUICK) as consumer:
            message = next(iter(consumer))
            assert message.body == b"x"
            assert message.redelivered is expected


def test_stop_in_another_thread_ends_the_iteration(at: Scene) -> None:
    with BlockingConsumer(at.nameserver, at.group, {at.topic: "*"}, QUICK) as consumer:
        threading.Timer(0.05, consumer.stop).start()
        assert list(consumer) == []


def test_send_passes_the_options_of_a_message(at: Scene) -> None:
    with BlockingProducer(at.nameserver) as producer:
        producer.send(at.topic, b"no", tag="other")
        sent = producer.send(
            at.topic, b"yes", tag="t", keys=("k",), properties={"a": "b"}, ordering_key="o"
        )
        same = producer.send(at.topic, b"same queue", ordering_key="o")
        named = producer.send(at.topic, b"named", queue=sent.queue)
        producer.flush()
    assert sent.queue == same.queue == named.queue
    with BlockingConsumer(at.nameserver, at.group, {at.topic: "t"}, QUICK) as consumer:
        message = next(iter(consumer))
    assert (message.body, message.tag, message.keys) == (b"yes", "t", ("k",))
    assert message.properties == {"a": "b", "baton.ordering_key": "o"}
    assert message.ordering_key == "o"


def test_plain_function_handles_every_message_until_stop(at: Scene) -> None:
    with BlockingProducer(at.nameserver) as producer:
        for number in range(50):
            producer.send(at.topic, b"%d" % number)
    seen: Counter[bytes] = Counter()
    with BlockingConsumer(at.nameserver, at.group, {at.topic: "*"}, QUICK) as consumer:

        def handle(message: ReceivedMessage) -> None:
            seen[message.body] += 1
            if seen.total() == 50:
                consumer.stop()

        consumer.run(handle)
    assert seen == Counter(b"%d" % number for number in range(50))
    assert not our_threads()


@pytest.mark.parametrize("kind", ["inline", "coroutine"])
def test_handler_in_the_thread_of_the_client_stops_its_consumer(at: Scene, kind: str) -> None:
    with BlockingProducer(at.nameserver) as producer:
        producer.send(at.topic, b"")
    refused: list[Exception] = []
    with BlockingConsumer(at.nameserver, at.group, {at.topic: "*"}, QUICK) as consumer:

        def handle(message: ReceivedMessage) -> None:
            consumer.pause(message.queue)
            assert message.queue in consumer.assignment
            consumer.resume(message.queue)
            try:
                consumer.close(drain_ms=0)
            except InvalidArgument as error:  # it would wait for this handler
                refused.append(error)
            consumer.stop()

        async def handle_later(message: ReceivedMessage) -> None:
            handle(message)

        if kind == "inline":
            consumer.run(handle, inline=True)
        else:
            consumer.run(handle_later)
    assert len(refused) == 1
    assert not our_threads()


def test_error_that_ends_the_client_leaves_the_block(at: Scene) -> None:
    def delete_topic() -> None:
        async def delete() -> None:
            async with Admin(at.nameserver) as admin:
                await admin.delete_topic(at.topic)

        asyncio.run(delete())

    with (
        pytest.raises(TopicNotFound, match=at.topic),
        BlockingConsumer(at.nameserver, at.group, {at.topic: "*"}, QUICK) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        deleting = pool.submit(delete_topic)
        consumer.run(lambda _: None)
        deleting.result()
    assert not our_threads()


def test_consumer_handles_lists_pauses_queues_and_reports_its_state(at: Scene) -> None:
    with BlockingProducer(at.nameserver) as producer:
        for number in range(50):
            producer.send(at.topic, b"%d" % number)
    lists: list[Sequence[ReceivedMessage]] = []
    with BlockingConsumer(at.nameserver, at.group, {at.topic: "*"}, QUICK) as consumer:
        consumer.handle_timeout_ms = 20_000
        assert consumer.handle_timeout_ms == 20_000
        assert consumer.verdict == SubscriptionVerdict("accepted")
        states: set[object] = set()

        def handle(messages: MessageBatch) -> None:
            queue = messages[0].queue
            consumer.pause(queue)
            states.add((queue in consumer.assignment, consumer.flow.get(queue)))
            consumer.resume(queue)
            # This comes last: the last handler stops the consumer, and a stop clears `flow`.
            lists.append(messages)
            if sum(map(len, lists)) == 50:
                consumer.stop()

        consumer.run_batches(handle, messages_max=5)
        consumer.close(drain_ms=0)
        assert consumer.assignment == ()
    assert states == {(True, "paused")}
    assert max(map(len, lists)) <= 5
    assert len({(m.queue, m.offset) for each in lists for m in each}) == 50


async def test_puller_reads_seeks_and_commits(at: Scene) -> None:
    async with Admin(at.nameserver) as admin:
        await admin.update_group(at.group, ownership="off")

    def read() -> tuple[list[bytes], list[bytes], list[int | None]]:
        with BlockingProducer(at.nameserver) as producer:
            queue = producer.send(at.topic, b"0", ordering_key="o").queue
            for number in range(1, 10):
                producer.send(at.topic, b"%d" % number, ordering_key="o")
        with BlockingPuller(at.nameserver, at.group) as puller:
            assert queue in puller.queues(at.topic)
            puller.assign([queue])
            assert puller.assignment == (queue,)
            assert puller.seek(queue, "begin") == 0
            first = _polled(puller, 10)
            puller.seek(queue, 7)
            again = _polled(puller, 3)
            puller.pause(queue)
            assert puller.poll(50) == {}
            puller.resume(queue)
            assert (puller.position(queue), puller.lost_count(queue)) == (10, 0)
            before = puller.committed(queue)
            puller.commit()
            return first, again, [before, puller.committed(queue)]

    first, again, committed = await asyncio.to_thread(read)
    assert first == [b"%d" % number for number in range(10)]
    assert again == [b"7", b"8", b"9"]
    assert committed[-1] == 10
    assert committed[0] != 10
    assert not our_threads()


def _polled(puller: BlockingPuller, count: int) -> list[bytes]:
    bodies: list[bytes] = []
    while len(bodies) < count:
        for messages in puller.poll(count_max=count - len(bodies)).values():
            bodies += [message.body for message in messages]
    return bodies


# ---- errors


def test_refused_message_raises_in_the_sending_thread(at: Scene) -> None:
    with BlockingProducer(at.nameserver) as producer:
        with pytest.raises(TopicNotFound):
            producer.send("absent", b"")
        assert producer.send(at.topic, b"").offset == 0


def test_refused_consumer_leaves_no_thread(nameserver: str) -> None:
    with (
        pytest.raises(TopicNotFound),
        BlockingConsumer(nameserver, "g", {"absent": "*"}, QUICK),
    ):
        pass
    assert not our_threads()


def test_consumer_that_is_never_opened_leaves_no_thread() -> None:
    with pytest.raises(BadExpression):
        BlockingConsumer(NO_SERVER, "g", {"t": "a || "})
    BlockingConsumer(NO_SERVER, "g", {"t": "a"})


def test_closed_producer_refuses_messages(at: Scene) -> None:
    with BlockingProducer(at.nameserver) as producer:
        producer.send(at.topic, b"")
    with pytest.raises(Unreachable, match="not open"):
        producer.send(at.topic, b"")


def test_close_waits_for_submitted_messages_and_may_be_repeated(at: Scene) -> None:
    with BlockingProducer(at.nameserver) as producer:
        for number in range(50):
            producer.send_one_way(at.topic, b"%d" % number)
        producer.close()
        with BlockingConsumer(at.nameserver, at.group, {at.topic: "*"}, QUICK) as consumer:
            seen = {message.body for _, message in zip(range(50), consumer, strict=False)}
        assert seen == {b"%d" % number for number in range(50)}
        producer.close()
        with pytest.raises(ProducerClosed):
            producer.send_one_way(at.topic, b"")
    producer.close()
    assert not our_threads()


def test_error_in_the_block_reaches_the_caller(at: Scene) -> None:
    with pytest.raises(ValueError, match="on purpose"), BlockingProducer(at.nameserver) as producer:
        producer.send(at.topic, b"")
        raise ValueError("on purpose")
    assert not our_threads()


@pytest.mark.long
def test_transactions_end_with_their_blocks_and_a_function_answers_checks(at: Scene) -> None:
    asked: list[str] = []

    def check(pending: PendingTransaction) -> TransactionState:
        asked.append(pending.transaction_id)
        return TransactionState.COMMIT

    with BlockingProducer(at.nameserver, group="payments", transaction_checker=check) as producer:
        with producer.transaction(at.topic, b"committed") as committed:
            pass
        with pytest.raises(ZeroDivisionError), producer.transaction(at.topic, b"dropped"):
            raise ZeroDivisionError
        with producer.transaction(at.topic, b"checked") as checked:
            checked.leave_open()
        with producer.transaction(at.topic, b"by hand") as by_hand:
            by_hand.leave_open()
        assert producer.end_transaction(by_hand.transaction_id, TransactionState.ROLLBACK) is None
        assert committed.receipt is not None
        seen: list[bytes] = []
        with BlockingConsumer(at.nameserver, at.group, {at.topic: "*"}, QUICK) as consumer:
            for message in consumer:
                seen.append(message.body)
                if len(seen) == 2:
                    break
        assert sorted(seen) == [b"checked", b"committed"]
        assert asked == [checked.transaction_id]
    assert not our_threads()
