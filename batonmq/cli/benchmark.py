"""Measurements of a running cluster: sending, receiving, and the time from one to the other.

With a rate the load is open: each message has a time when it is due, whatever happens to the
messages before it, and its latency counts from that time. So a stall of the cluster counts for
every message that had to wait, not only for the few that were being sent. Without a rate each
sender sends its next message after the receipt of the last, and a latency counts from the call.

Topics and groups that a measurement creates are deleted at its end.
"""

from __future__ import annotations

import asyncio
import math
import struct
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from batonmq._common import timeouts
from batonmq._connection.security import Security
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.message_batch import MessageBatch
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
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
"""A body begins with the number of its message and the time when it was due."""
_PERCENTILES = {"p50": 50, "p95": 95, "p99": 99, "p99.9": 99.9, "max": 100}
_STALL_S = 30.0
ReportProgress = Callable[[int], None]
"""Takes the number of messages so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """The messages to send.

    Attributes:
        size_bytes: Size of each body.
        count: Number of messages; None to send for `seconds`.
        per_s: Messages per second in total; None for as many as possible.
        producers: Number of producers in this process.
        senders: Maximum number of messages that wait for a receipt, of all producers together.
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
    """The result of a measurement.

    Attributes:
        count: Messages that were stored, or received.
        seconds: Time from the first message to the last.
        latency_ms: Latency by p50, p95, p99, p99.9 and max; None if none was measured.
        failures: Number of messages without a receipt, by reason.
        missing_count: Messages stored but not received within 30 s after the last received one;
            end to end only.
        repeated_count: Deliveries beyond the first of a message; end to end only.
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
        """Messages per second."""
        return self.count / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes of bodies per second."""
        return self.per_s * self.size_bytes


def percentiles_ms(latencies_s: Sequence[float]) -> dict[str, float] | None:
    """Return percentiles of the latencies; each is a latency that was measured, rounded up.

    None if there are no latencies.
    """
    if not len(latencies_s):
        return None
    ordered = sorted(latencies_s)
    last = len(ordered) - 1
    return {
        name: round(ordered[math.ceil(percent / 100 * last)] * 1000, 3)
        for name, percent in _PERCENTILES.items()
    }


def due_times(load: BenchLoad, now_s: Callable[[], float]) -> Iterator[float | None]:
    """Yield the time when each message is due; None for at once."""
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
        report: Called with the number of messages so far.
        security: TLS and credentials; None for a connection without TLS.
    """

    def __init__(
        self,
        admin: Admin,
        nameserver: str,
        topic: str,
        report: ReportProgress,
        *,
        security: Security | None = None,
    ) -> None:
        self._admin, self._nameserver, self._topic, self._report = admin, nameserver, topic, report
        self._security = security

    async def produce(self, load: BenchLoad) -> BenchResult:
        """Send, and measure the time until the receipt. A first message is not measured."""
        sent = _LoadSender(load.size_bytes)
        async with self._producers(load) as producers:
            await sent.run(producers, self._topic, load, self._report)
        return sent.measured()

    async def consume(
        self, group: str, count: int, size_bytes: int, handler: Literal["batch", "single"]
    ) -> BenchResult:
        """Receive `count` stored messages, with a handler that does nothing.

        The time counts from the grant of the first queue. Messages beyond `count` in the last call
        of the handler are not counted.
        """
        granted_s: list[float] = []
        got, end_s = 0, 0.0
        now_s = asyncio.get_running_loop().time
        async with self._consumer(group, lambda: granted_s.append(now_s())) as consumer:

            def note(number: int) -> None:
                nonlocal got, end_s
                if got == count:
                    return  # it was in flight when the count was reached
                got, end_s = min(got + number, count), now_s()
                self._report(got)
                if got == count:
                    consumer.stop()

            async def one(_: ReceivedMessage) -> None:
                note(1)

            async def several(messages: MessageBatch) -> None:
                note(len(messages))

            await (consumer.run_batches(several) if handler == "batch" else consumer.run(one))
        return BenchResult(got, end_s - granted_s[0] if got else 0, size_bytes)

    async def end_to_end(self, group: str, load: BenchLoad) -> BenchResult:
        """Send and receive at the same time; a latency ends when the handler is called."""
        sent, received, granted = _LoadSender(load.size_bytes), _LoadReceiver(), asyncio.Event()
        async with (
            self._consumer(group, granted.set) as consumer,
            self._producers(load) as producers,
        ):
            await self._wait_for_queues(consumer, granted)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(consumer.run_batches(received.take))
                await sent.run(producers, self._topic, load, self._report)
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

    async def _wait_for_queues(self, consumer: Consumer, granted: asyncio.Event) -> None:
        """Wait until the consumer owns every queue; each grant sets `granted`.

        Raises:
            Unreachable: it does not own them after 30 s.
        """
        queues = set((await self._admin.describe_topic(self._topic)).topic.queues)
        try:
            async with timeouts.timeout(_STALL_S):
                while not queues <= set(consumer.assignment):
                    granted.clear()
                    await granted.wait()
        except TimeoutError:
            raise Unreachable(
                f"timed out after {_STALL_S:g} s waiting to own all queues of {self._topic}"
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
        """Yield the only member of a group; the group is deleted at the end.

        Args:
            changed: Called when the ownership of a queue changes.
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
            with suppress(GroupNotFound):  # the group was never created
                await self._admin.delete_group(group)


class _LoadSender:
    """Sends messages, and measures how long each takes."""

    def __init__(self, size_bytes: int) -> None:
        self._filler = bytes(max(size_bytes - SIZE_BYTES_MIN, 0))
        self._size_bytes = size_bytes
        self.latencies_s = array("d")
        self.stored: set[int] = set()
        self.failures: Counter[str] = Counter()
        self.begin_s = self._end_s = 0.0

    async def run(
        self, producers: Sequence[Producer], topic: str, load: BenchLoad, report: ReportProgress
    ) -> None:
        """Send all messages."""
        now_s = asyncio.get_running_loop().time
        for producer in producers:
            await producer.send(topic, _MARK.pack(-1, now_s()))
        self.begin_s = now_s()
        due = enumerate(due_times(load, now_s))
        async with asyncio.TaskGroup() as tasks:
            for number in range(load.senders):
                producer = producers[number % len(producers)]
                tasks.create_task(self._send(producer, topic, due, report))
        self._end_s = now_s()

    async def _send(
        self,
        producer: Producer,
        topic: str,
        due: Iterator[tuple[int, float | None]],
        report: ReportProgress,
    ) -> None:
        now_s = asyncio.get_running_loop().time
        for number, planned_s in due:
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
            report(len(self.stored))

    def measured(self) -> BenchResult:
        """Return the result of the sending."""
        return BenchResult(
            count=len(self.stored),
            seconds=self._end_s - self.begin_s,
            size_bytes=self._size_bytes,
            latency_ms=percentiles_ms(self.latencies_s),
            failures=dict(self.failures),
        )


class _LoadReceiver:
    """Counts the deliveries of each message, and measures how long each took."""

    def __init__(self) -> None:
        self.numbers: Counter[int] = Counter()
        self.latencies_s = array("d")
        self.last_s = 0.0
        self._arrived = asyncio.Event()

    async def take(self, messages: MessageBatch) -> None:
        """Count messages that arrived."""
        self.last_s = asyncio.get_running_loop().time()
        for message in messages:
            number, planned_s = _MARK.unpack_from(message.body)
            if number >= 0:
                self.numbers[number] += 1
                self.latencies_s.append(self.last_s - planned_s)
        self._arrived.set()

    async def all_of(self, stored: set[int]) -> None:
        """Wait until all stored messages are received, or none has arrived for 30 s."""
        try:
            while not stored <= self.numbers.keys():
                self._arrived.clear()
                async with timeouts.timeout(_STALL_S):
                    await self._arrived.wait()
        except TimeoutError:
            return


@asynccontextmanager
async def temporary_topic(
    admin: Admin, name: str, queue_count: int, *, keep: bool
) -> AsyncIterator[str]:
    """Create a topic, and delete it at the end of the block unless `keep` is set.

    Raises:
        TopicExists: there is a topic of this name already.
    """
    try:
        await admin.create_topic(name, queue_count)
    except TopicExists:
        raise
    except BaseException:  # interrupted, or no answer: the topic may exist
        with suppress(TopicNotFound):
            await admin.delete_topic(name)
        raise
    try:
        yield name
    finally:
        if not keep:
            await admin.delete_topic(name)
