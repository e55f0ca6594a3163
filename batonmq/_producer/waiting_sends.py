"""Messages that can't be put into a batch yet, in the order in which they were sent.

A message waits for one of three things, in this order:

1. the route of its topic, if the topic is not open;
2. earlier messages with its ordering key, if the key has moved to another queue;
3. room below the limit of bytes in flight.

What a message waits for does not delay messages that wait for something else, and when it happens,
all messages that can go on are put into batches in one step. So a producer of an open topic with
room has no waiting messages, and its sends do not come here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from batonmq._producer.topic_queues import TopicQueues
from batonmq.errors import BatonError

Placed = TypeVar("Placed")


class Buffer(Protocol):
    """The state of the batches that decides whether messages wait; see `SendBuffer`.

    Attributes:
        topics: The open topics, by name.
        free_bytes: Bytes of messages that may still be added before the limit.
    """

    topics: dict[str, TopicQueues]
    free_bytes: int


@dataclass(eq=False, slots=True)
class WaitingSend(Generic[Placed]):
    """A message, or several that are put into one batch together.

    Attributes:
        size: Bytes of the encoded records.
        deadline_ms: Monotonic time until which the route of the topic is waited for.
        place: Puts the messages into a batch of the open topic.
        placed: The result of `place`.
    """

    topic: str
    ordering_key: str | None
    size: int
    deadline_ms: int
    place: Callable[[TopicQueues], Placed]
    placed: asyncio.Future[Placed] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class WaitingSends:
    """The waiting messages of a producer.

    Args:
        bytes_max: Limit of bytes in flight. A larger message is sent when no other is in flight.
        open_topic: Starts to wait for the route of a topic; ends with a call of `topic_opened`, or
            of `fail_topic` until `deadline_ms` is None.
    """

    def __init__(self, buffer: Buffer, bytes_max: int, open_topic: Callable[[str], object]) -> None:
        self._buffer, self._bytes_max, self._open_topic = buffer, bytes_max, open_topic
        self._for_route: dict[str, deque[WaitingSend[Any]]] = {}
        self._for_key: dict[tuple[str, str], deque[WaitingSend[Any]]] = {}
        self._for_room: deque[WaitingSend[Any]] = deque()
        self._going_on = False

    def __len__(self) -> int:
        return sum(map(len, self._queues()))

    def delays(self, known: TopicQueues, topic: str, key: str | None, size: int) -> bool:
        """Return whether a message of an open topic has to wait: for its key, or for room."""
        return (
            bool(self._for_room)
            or not self._fits(size)
            or (key is not None and self._waits_for_key(known, topic, key))
        )

    def add(self, send: WaitingSend[Any]) -> None:
        """Add a message; it is put into a batch at once if it does not have to wait."""
        known = self._buffer.topics.get(send.topic)
        if known is not None:
            self._enter(known, send)
        elif (waiting := self._for_route.get(send.topic)) is not None:
            waiting.append(send)
        else:
            self._for_route[send.topic] = deque([send])
            self._open_topic(send.topic)

    def deadline_ms(self, topic: str) -> int | None:
        """Return the earliest deadline of the waits for a route; None if no message waits."""
        waiting = self._for_route.get(topic)
        if waiting is None:
            return None
        while waiting and waiting[0].placed.done():
            waiting.popleft()
        if not waiting:
            del self._for_route[topic]
            return None
        return waiting[0].deadline_ms

    def topic_opened(self, topic: str) -> None:
        """Put the messages that wait for the route of `topic` into batches, or let them wait on."""
        for send in self._for_route.pop(topic, ()):
            self._enter(self._buffer.topics[topic], send)

    def fail_topic(self, topic: str, error: BatonError, deadline_ms_max: int) -> None:
        """Fail the messages that wait for the route of `topic` until `deadline_ms_max` at most."""
        waiting = self._for_route.get(topic, deque())
        while waiting and waiting[0].deadline_ms <= deadline_ms_max:
            _fail(waiting.popleft(), error)

    def fail_all(self, error: BatonError) -> None:
        """Fail every waiting message."""
        queues = self._queues()
        self._for_route, self._for_key, self._for_room = {}, {}, deque()
        for send in chain.from_iterable(queues):
            _fail(send, error)

    def batch_settled(self) -> None:
        """Let messages go on soon: bytes became free, and a key may not have to wait any more."""
        if (self._for_room or self._for_key) and not self._going_on:
            self._going_on = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._going_on = False
        for (topic, key), sends in list(self._for_key.items()):
            known = self._buffer.topics.get(topic)
            if known is None or not known.must_wait(key):
                del self._for_key[topic, key]
                self._for_room.extendleft(reversed(sends))  # later ones of the key may wait there
        while self._for_room and self._fits(self._for_room[0].size):
            send = self._for_room.popleft()
            known = self._buffer.topics.get(send.topic)
            if known is None:  # the watch of its route ended
                self.add(send)
            else:
                self._place(known, send)

    def _enter(self, known: TopicQueues, send: WaitingSend[Any]) -> None:
        if self._for_room or not self._fits(send.size):
            self._for_room.append(send)
        else:
            self._place(known, send)

    def _place(self, known: TopicQueues, send: WaitingSend[Any]) -> None:
        if send.placed.done():  # cancelled
            return
        key = send.ordering_key
        if key is not None and self._waits_for_key(known, send.topic, key):
            self._for_key.setdefault((send.topic, key), deque()).append(send)
            return
        try:
            send.placed.set_result(send.place(known))
        except Exception as error:  # noqa: BLE001  also a wrong argument fails this send only
            send.placed.set_exception(error)

    def _waits_for_key(self, known: TopicQueues, topic: str, key: str) -> bool:
        return (topic, key) in self._for_key or known.must_wait(key)

    def _fits(self, size: int) -> bool:
        free_bytes = self._buffer.free_bytes
        return size <= free_bytes or free_bytes >= self._bytes_max

    def _queues(self) -> list[deque[WaitingSend[Any]]]:
        return [*self._for_route.values(), *self._for_key.values(), self._for_room]


def _fail(send: WaitingSend[Any], error: BatonError) -> None:
    if not send.placed.done():
        send.placed.set_exception(error)
