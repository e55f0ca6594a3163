"""Messages that wait for the route of their topic, for their ordering key, or for room.

Goal: a message waits only for what it needs, messages keep their order, and a wait that ends leaves
no line behind in which later messages would have to wait.
Method: `WaitingSends` with batches that count bytes and record the order of the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from batonmq._producer.topic_queues import TopicQueues
from batonmq._producer.waiting_sends import WaitingSend, WaitingSends
from batonmq.errors import NotWritable, TopicNotFound, Unreachable

BYTES_MAX = 100


class Topic(TopicQueues):
    """A topic; the test sets the keys that have to wait."""

    def __init__(self) -> None:
        self.moving: set[str] = set()

    def must_wait(self, ordering_key: str | None) -> bool:
        return ordering_key in self.moving


class Batches:
    """Batches that count bytes in flight and record the messages in their order."""

    def __init__(self) -> None:
        self.topics: dict[str, TopicQueues] = {}
        self.free_bytes = BYTES_MAX
        self.placed: list[bytes] = []
        self.refused: set[bytes] = set()

    def place(self, body: bytes, size: int) -> int:
        if body in self.refused:
            raise NotWritable("the topic has no writable queue")
        self.free_bytes -= size
        self.placed.append(body)
        return len(self.placed) - 1


class Scene:
    """Waiting messages of one producer."""

    def __init__(self, topics: Sequence[str] = ()) -> None:
        self.batches, self.opened = Batches(), list[str]()
        self.topic = Topic()
        self.batches.topics = dict.fromkeys(topics, self.topic)
        self.waiting = WaitingSends(self.batches, BYTES_MAX, self.opened.append)

    def send(
        self, body: bytes, size: int = 1, key: str | None = None, deadline_ms: int = 1_000
    ) -> WaitingSend[int]:
        send = WaitingSend(
            "t", key, size, deadline_ms, lambda known: self.batches.place(body, size)
        )
        self.waiting.add(send)
        return send

    def open(self) -> None:
        self.batches.topics["t"] = self.topic
        self.waiting.topic_opened("t")

    async def settle(self, size: int) -> None:
        """Free `size` bytes, and let the messages that wait go on."""
        self.batches.free_bytes += size
        self.waiting.batch_settled()
        await asyncio.sleep(0)  # one iteration of the event loop: `batch_settled` needs no more

    def delays(self, key: str | None = None, size: int = 1) -> bool:
        return self.waiting.delays(self.topic, "t", key, size)


async def test_messages_of_an_unknown_topic_wait_for_one_route_and_keep_their_order() -> None:
    scene = Scene()
    sends = [scene.send(b"%d" % index) for index in range(10)]
    assert scene.opened == ["t"]
    assert not scene.batches.placed
    scene.open()
    assert scene.batches.placed == [b"%d" % index for index in range(10)]
    assert [send.placed.result() for send in sends] == list(range(10))


async def test_no_message_waits_behind_others_when_the_topic_is_open() -> None:
    scene = Scene()
    sends = [scene.send(b"%d" % index) for index in range(10)]
    scene.open()  # the senders of `sends` have not run since
    assert all(send.placed.done() for send in sends)
    assert not scene.delays()
    assert not scene.delays("key")
    assert len(scene.waiting) == 0


async def test_messages_without_room_go_on_together_in_order() -> None:
    scene = Scene(["t"])
    scene.send(b"first", BYTES_MAX)
    for index in range(10):
        scene.send(b"%d" % index, 10)
    assert scene.delays()
    await scene.settle(50)
    assert scene.batches.placed == [b"first", b"0", b"1", b"2", b"3", b"4"]
    await scene.settle(50)
    assert len(scene.batches.placed) == 11
    assert not scene.delays(size=0)


async def test_small_message_does_not_overtake_a_large_one_without_room() -> None:
    scene = Scene(["t"])
    scene.send(b"first", BYTES_MAX - 10)
    scene.send(b"large", 50)
    scene.send(b"small", 1)
    assert scene.batches.placed == [b"first"]
    await scene.settle(BYTES_MAX - 10)
    assert scene.batches.placed == [b"first", b"large", b"small"]


async def test_message_above_the_limit_is_sent_when_no_other_is_in_flight() -> None:
    scene = Scene(["t"])
    scene.send(b"first", 1)
    scene.send(b"huge", 10 * BYTES_MAX)
    assert scene.batches.placed == [b"first"]
    await scene.settle(1)
    assert scene.batches.placed == [b"first", b"huge"]


async def test_key_that_moves_delays_its_own_messages_only() -> None:
    scene = Scene(["t"])
    scene.topic.moving = {"a"}
    scene.send(b"a1", key="a")
    scene.send(b"b1", key="b")
    scene.send(b"-")
    scene.send(b"a2", key="a")
    assert scene.delays("a")
    assert not scene.delays("b")
    assert scene.batches.placed == [b"b1", b"-"]
    scene.topic.moving = set()
    assert scene.delays("a"), "an earlier message of the key still waits"
    await scene.settle(0)
    assert scene.batches.placed == [b"b1", b"-", b"a1", b"a2"]
    assert not scene.delays("a")


async def test_key_that_moves_again_while_its_messages_wait_for_room_keeps_its_order() -> None:
    scene = Scene(["t"])
    scene.topic.moving = {"a"}
    sends = [scene.send(b"a%d" % index, key="a") for index in range(3)]
    scene.send(b"full", BYTES_MAX)
    scene.topic.moving = set()
    await scene.settle(0)  # the key may go on, without room
    assert scene.batches.placed == [b"full"]
    scene.topic.moving = {"a"}
    await scene.settle(BYTES_MAX)
    assert scene.batches.placed == [b"full"]
    scene.topic.moving = set()
    await scene.settle(0)
    assert scene.batches.placed == [b"full", b"a0", b"a1", b"a2"]
    assert all(send.placed.done() for send in sends)


async def test_message_that_waits_for_room_does_not_overtake_earlier_ones_of_its_key() -> None:
    scene = Scene(["t"])
    scene.topic.moving = {"a"}
    scene.send(b"a0", key="a")
    scene.send(b"full", BYTES_MAX)
    scene.send(b"large", BYTES_MAX)
    scene.send(b"a1", key="a")
    scene.topic.moving = set()
    await scene.settle(BYTES_MAX)
    await scene.settle(BYTES_MAX)
    await scene.settle(BYTES_MAX)
    assert [body for body in scene.batches.placed if body.startswith(b"a")] == [b"a0", b"a1"]


async def test_cancelled_message_is_not_sent_and_delays_no_other() -> None:
    scene = Scene()
    first, second = scene.send(b"1"), scene.send(b"2")
    first.placed.cancel()
    scene.open()
    assert scene.batches.placed == [b"2"]
    assert second.placed.done()
    scene.send(b"full", BYTES_MAX)
    third = scene.send(b"3")
    third.placed.cancel()
    await scene.settle(BYTES_MAX)
    assert not scene.delays()


async def test_refused_message_fails_its_sender_only() -> None:
    scene = Scene()
    scene.batches.refused = {b"1"}
    sends = [scene.send(b"%d" % index) for index in range(3)]
    scene.open()
    assert isinstance(sends[1].placed.exception(), NotWritable)
    assert scene.batches.placed == [b"0", b"2"]


@pytest.mark.parametrize("wait", ["route", "room"])
async def test_send_with_a_wrong_argument_fails_alone(wait: str) -> None:
    scene = Scene([] if wait == "route" else ["t"])

    def place(_: TopicQueues) -> int:
        raise TypeError("unhashable type: 'list'")

    if wait == "room":
        scene.send(b"full", BYTES_MAX)
    wrong = WaitingSend("t", None, 1, 1_000, place)
    scene.waiting.add(wrong)
    following = scene.send(b"1")
    if wait == "route":
        scene.open()
    else:
        await scene.settle(BYTES_MAX)
    assert isinstance(wrong.placed.exception(), TypeError)
    assert following.placed.done()
    assert not scene.delays()


async def test_messages_fail_at_their_own_deadline() -> None:
    scene = Scene()
    early, late = scene.send(b"1", deadline_ms=10), scene.send(b"2", deadline_ms=20)
    assert scene.waiting.deadline_ms("t") == 10
    scene.waiting.fail_topic("t", Unreachable("no nameserver"), 10)
    assert isinstance(early.placed.exception(), Unreachable)
    assert not late.placed.done()
    assert scene.waiting.deadline_ms("t") == 20
    late.placed.cancel()
    assert scene.waiting.deadline_ms("t") is None
    scene.send(b"3")
    assert scene.opened == ["t", "t"]


async def test_message_whose_topic_closes_while_it_waits_for_room_waits_for_the_route() -> None:
    scene = Scene(["t"])
    scene.send(b"first", BYTES_MAX)
    send = scene.send(b"second")
    scene.batches.topics.clear()
    await scene.settle(BYTES_MAX)
    assert scene.opened == ["t"]
    assert not send.placed.done()
    scene.open()
    assert scene.batches.placed == [b"first", b"second"]


@pytest.mark.parametrize("wait", ["route", "key", "room"])
async def test_every_waiting_message_fails_at_the_close(wait: str) -> None:
    scene = Scene([] if wait == "route" else ["t"])
    if wait == "key":
        scene.topic.moving = {"a"}
    if wait == "room":
        scene.send(b"first", BYTES_MAX)
    send = scene.send(b"1", key="a")
    scene.waiting.fail_all(TopicNotFound("closed"))
    assert isinstance(send.placed.exception(), TopicNotFound)
    assert len(scene.waiting) == 0
