"""How fast a running cluster is: sending, receiving, and the way from one to the other.

With a rate the load is open: messages have times at which they are to leave, whatever happens to
those before them, and a latency counts from that time. A cluster that stalls is so charged for
every message that had to wait, not only for the few that were under way. Without a rate each
sender sends again when it has its receipt, and a latency counts from the call.

What is made here, topics and groups, is deleted in the end.
"""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from batonmq._connection.security import Security
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._producer.producer import Producer
from batonmq._producer.settings import ProducerSettings
from batonmq.admin.admin import Admin
from batonmq.errors import (
    BatonError,
    GroupNotFound,
    TopicExists,
    TopicNotFound,
    Unreachable,
)

_MARK = struct.Struct(">qd")
SIZE_BYTES_MIN = _MARK.size
"""A body has the number of its message and when it was to leave."""
_PERCENTILES = {"p50": 50, "p95": 95, "p99": 99, "p99.9": 99.9, "max": 100}
_SILENCE_S = 30.0
Told = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """What is sent.

    Attributes:
        size_bytes: Of each body.
        count: So many messages; None: for `seconds`.
        per_s: Messages a second in all; None for as many as go.
        producers: Producers in this process.
        senders: Messages under way at once, of all producers together.
    """

    size_bytes: int = 100
    count: int | None = None
    seconds: float = 10.0
    per_s: float | None = None
    producers: int = 1
    senders: int = 1_000
    settings: ProducerSettings = field(default_factory=ProducerSettings)


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What came out.

    Attributes:
        count: Messages that were stored, or received.
        seconds: From the first to the last.
        latency_ms: By p50, p95, p99, p99.9 and max; None where there is none to tell.
        failures: Messages without a receipt, by reason.
        missing_count: Stored and not received within 30 s after the last one; end to end only.
        repeated_count: Received more than once; end to end only.
    """

    count: int
    seconds: float
    size_bytes: int
    latency_ms: dict[str, float] | None = None
    failures: dict[str, int] = field(default_factory=dict)
    missing_count: int = 0
    repeated_count: int = 0

    @property
    def per_s(self) -> float:
        """Messages a second."""
        return self.count / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes of bodies a second."""
        return self.per_s * self.size_bytes


def percentiles_ms(latencies_s: Sequence[float]) -> dict[str, float] | None:
    """Latencies that so much of all do not exceed: each is one that was measured."""
    if not len(latencies_s):
        return None
    found = np.percentile(
        np.asarray(latencies_s) * 1000, list(_PERCENTILES.values()), method="higher"
    )
    return {name: round(float(value), 3) for name, value in zip(_PERCENTILES, found, strict=True)}


def departures(load: BenchLoad, now_s: Callable[[], float]) -> Iterator[float | None]:
    """When each message is to leave; None for at once."""
    begin_s = now_s()
    if load.per_s is None:
        number = 0
        while number < load.count if load.count is not None else now_s() - begin_s < load.seconds:
            yield None
            number += 1
        return
    for number in range(load.count or round(load.per_s * load.seconds)):
        yield begin_s + number / load.per_s


class Bench:
    """Measures one topic.

    Args:
        told: Called with the number of messages so far.
        security: How to use TLS; None for none.
    """

    def __init__(
        self,
        admin: Admin,
        nameserver: str,
        topic: str,
        told: Told,
        *,
        security: Security | None = None,
    ) -> None:
        self._admin, self._nameserver, self._topic, self._told = admin, nameserver, topic, told
        self._security = security

    async def produce(self, load: BenchLoad) -> BenchResult:
        """Send, and measure the time until the receipt. One message goes ahead, unmeasured."""
        sent = _Sent(load.size_bytes)
        async with self._producers(load) as producers:
            await sent.run(producers, self._topic, load, self._told)
        return sent.measured()

    async def consume(
        self, group: str, count: int, size_bytes: int, form: Literal["batch", "single"]
    ) -> BenchResult:
        """Receive `count` messages that are there, with a handler that does nothing.

        Time runs from the first queue that is granted. What the last call of the handler brings
        beyond `count` is not counted.
        """
        granted_s: list[float] = []
        got, end_s = 0, 0.0
        now_s = asyncio.get_running_loop().time
        async with self._consumer(group, lambda: granted_s.append(now_s())) as consumer:

            def note(number: int) -> None:
                nonlocal got, end_s
                if got == count:
                    return  # it was under way when the others were enough
                got, end_s = min(got + number, count), now_s()
                self._told(got)
                if got == count:
                    consumer.stop()

            async def one(_: ReceivedMessage) -> None:
                note(1)

            async def several(messages: list[ReceivedMessage]) -> None:
                note(len(messages))

            await (consumer.run_batches(several) if form == "batch" else consumer.run(one))
        return BenchResult(got, end_s - granted_s[0] if got else 0, size_bytes)

    async def end_to_end(self, group: str, load: BenchLoad) -> BenchResult:
        """Send and receive at once; a latency ends when the handler is called."""
        sent, received, granted = _Sent(load.size_bytes), _Received(), asyncio.Event()
        async with (
            self._consumer(group, granted.set) as consumer,
            self._producers(load) as producers,
        ):
            await self._dealt(consumer, granted)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(consumer.run_batches(received.take))
                await sent.run(producers, self._topic, load, self._told)
                await received.all_of(sent.stored)
                consumer.stop()
        numbers = received.numbers
        return BenchResult(
            count=len(numbers),
            seconds=received.last_s - sent.begin_s,
            size_bytes=load.size_bytes,
            latency_ms=percentiles_ms(received.latencies_s),
            failures=dict(sent.failures),
            missing_count=len(sent.stored - numbers.keys()),
            repeated_count=sum(times - 1 for times in numbers.values()),
        )

    async def _dealt(self, consumer: Consumer, granted: asyncio.Event) -> None:
        """Wait until the consumer has every queue; each one that it gets sets `granted`."""
        queues = set((await self._admin.describe_topic(self._topic)).topic.queues)
        try:
            async with asyncio.timeout(_SILENCE_S):
                while not queues <= set(consumer.assignment):
                    granted.clear()
                    await granted.wait()
        except TimeoutError:
            raise Unreachable(
                f"no member was given the queues of {self._topic} in {_SILENCE_S:g} s"
            ) from None

    @asynccontextmanager
    async def _producers(self, load: BenchLoad) -> AsyncIterator[list[Producer]]:
        settings = replace(load.settings, security=self._security)
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(Producer(self._nameserver, settings))
                for _ in range(load.producers)
            ]

    @asynccontextmanager
    async def _consumer(self, group: str, changed: Callable[[], None]) -> AsyncIterator[Consumer]:
        """One member of a group that is deleted in the end.

        Args:
            changed: Called when a queue comes or goes.
        """
        settings = ConsumerSettings(consume_from="first", send_back=False, security=self._security)
        member = Consumer(
            self._nameserver,
            group,
            {self._topic: "*"},
            settings,
            on_ownership=lambda _: changed(),
        )
        try:
            async with member:
                yield member
        finally:
            with suppress(GroupNotFound):  # it never came so far
                await self._admin.delete_group(group)


class _Sent:
    """Messages on their way, and how long each took."""

    def __init__(self, size_bytes: int) -> None:
        self._filler = bytes(max(size_bytes - SIZE_BYTES_MIN, 0))
        self._size_bytes = size_bytes
        self.latencies_s = array("d")
        self.stored: set[int] = set()
        self.failures: Counter[str] = Counter()
        self.begin_s = self._end_s = 0.0

    async def run(
        self, producers: Sequence[Producer], topic: str, load: BenchLoad, told: Told
    ) -> None:
        """Send everything."""
        now_s = asyncio.get_running_loop().time
        for producer in producers:
            await producer.send(topic, _MARK.pack(-1, now_s()))
        self.begin_s = now_s()
        turns = enumerate(departures(load, now_s))
        async with asyncio.TaskGroup() as tasks:
            for number in range(load.senders):
                producer = producers[number % len(producers)]
                tasks.create_task(self._send(producer, topic, turns, told))
        self._end_s = now_s()

    async def _send(
        self,
        producer: Producer,
        topic: str,
        turns: Iterator[tuple[int, float | None]],
        told: Told,
    ) -> None:
        now_s = asyncio.get_running_loop().time
        for number, planned_s in turns:
            if planned_s is not None and (early_s := planned_s - now_s()) > 0:
                await asyncio.sleep(early_s)
            begin_s = now_s() if planned_s is None else planned_s
            try:
                await producer.send(topic, _MARK.pack(number, begin_s) + self._filler)
            except BatonError as error:
                self.failures[error.reason] += 1
                continue
            self.latencies_s.append(now_s() - begin_s)
            self.stored.add(number)
            told(len(self.stored))

    def measured(self) -> BenchResult:
        """The sending as a result."""
        return BenchResult(
            count=len(self.stored),
            seconds=self._end_s - self.begin_s,
            size_bytes=self._size_bytes,
            latency_ms=percentiles_ms(self.latencies_s),
            failures=dict(self.failures),
        )


class _Received:
    """Messages that arrived, how often, and how long each was on its way."""

    def __init__(self) -> None:
        self.numbers: Counter[int] = Counter()
        self.latencies_s = array("d")
        self.last_s = 0.0
        self._came = asyncio.Event()

    async def take(self, messages: list[ReceivedMessage]) -> None:
        """Note what arrived."""
        self.last_s = asyncio.get_running_loop().time()
        for message in messages:
            number, planned_s = _MARK.unpack_from(message.body)
            if number >= 0:
                self.numbers[number] += 1
                self.latencies_s.append(self.last_s - planned_s)
        self._came.set()

    async def all_of(self, stored: set[int]) -> None:
        """Wait until everything stored was received, or nothing has come for a long time."""
        try:
            while not stored <= self.numbers.keys():
                self._came.clear()
                async with asyncio.timeout(_SILENCE_S):
                    await self._came.wait()
        except TimeoutError:
            return


@asynccontextmanager
async def own_topic(admin: Admin, name: str, queue_count: int, *, keep: bool) -> AsyncIterator[str]:
    """A topic that is new, and deleted in the end unless it is to be kept.

    Raises:
        TopicExists: somebody has one of this name.
    """
    try:
        await admin.create_topic(name, queue_count)
    except TopicExists:
        raise
    except BaseException:  # interrupted, or without an answer: it may be there
        with suppress(TopicNotFound):
            await admin.delete_topic(name)
        raise
    try:
        yield name
    finally:
        if not keep:
            await admin.delete_topic(name)
