"""Producer and consumer for code without asyncio.

Goal: they do what the asynchronous ones do, from plain threads, and leave no thread behind.
Method: a real cluster; everything runs in threads of the test's own while it waits.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from batonmq.blocking import BlockingConsumer, BlockingProducer
from batonmq.common.errors import BadExpression, TopicNotFound, Unreachable
from tests.client.group import QUICK, Scene, scene

pytestmark = pytest.mark.e2e
NOBODY = "127.0.0.1:1"


@pytest.fixture
async def at(nameserver: str) -> Scene:
    async with scene(nameserver) as made:
        return made


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batonmq"]


def test_many_threads_send_and_one_receives(at: Scene) -> None:
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


def test_message_in_hand_at_the_break_comes_again(at: Scene) -> None:
    with BlockingProducer(at.nameserver) as producer:
        producer.send(at.topic, b"x")
    for expected in (False, True):
        with BlockingConsumer(at.nameserver, at.group, {at.topic: "*"}, QUICK) as consumer:
            message = next(iter(consumer))
            assert message.body == b"x"
            assert message.redelivered is expected


def test_stop_from_another_thread_ends_the_iteration(at: Scene) -> None:
    with BlockingConsumer(at.nameserver, at.group, {at.topic: "*"}, QUICK) as consumer:
        threading.Timer(0.05, consumer.stop).start()
        assert list(consumer) == []


def test_options_of_a_message_are_passed_on(at: Scene) -> None:
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
    assert message.properties == {"a": "b"}


# ---- errors


def test_refused_message_raises_where_it_was_sent(at: Scene) -> None:
    with BlockingProducer(at.nameserver) as producer:
        with pytest.raises(TopicNotFound):
            producer.send("absent", b"")
        assert producer.send(at.topic, b"").offset == 0


def test_consumer_that_is_refused_leaves_no_thread_behind(nameserver: str) -> None:
    with (
        pytest.raises(TopicNotFound),
        BlockingConsumer(nameserver, "g", {"absent": "*"}, QUICK),
    ):
        pass
    assert not our_threads()


def test_consumer_that_is_never_opened_is_no_trouble() -> None:
    with pytest.raises(BadExpression):
        BlockingConsumer(NOBODY, "g", {"t": "a || "})
    BlockingConsumer(NOBODY, "g", {"t": "a"})


def test_closed_producer_takes_nothing(at: Scene) -> None:
    with BlockingProducer(at.nameserver) as producer:
        producer.send(at.topic, b"")
    with pytest.raises(Unreachable, match="not open"):
        producer.send(at.topic, b"")


def test_error_in_the_block_passes_through(at: Scene) -> None:
    with pytest.raises(ValueError, match="on purpose"), BlockingProducer(at.nameserver) as producer:
        producer.send(at.topic, b"")
        raise ValueError("on purpose")
    assert not our_threads()
