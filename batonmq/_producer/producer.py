"""The producer: sends messages in batches, with idempotent retries."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from batonmq._common.aio import KeyedLocks, only_error, unless
from batonmq._connection.directory import ClientEnvironment, Directory
from batonmq._connection.routes import follow_route, wait_for_route
from batonmq._core.delays import deliver_time
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message, encode_record
from batonmq._producer.producer_settings import METRICS_PRODUCER, ProducerSettings
from batonmq._producer.receipts import ANY_QUEUE, PendingReceipt, Receipt, SendOptions
from batonmq._producer.scheduled_sender import PendingSchedule, ScheduledSender, ScheduleReceipt
from batonmq._producer.send_buffer import ProducerClosed, SendBuffer
from batonmq._producer.topic_queues import TopicQueues
from batonmq._telemetry.client_metrics import ClientMetrics
from batonmq.errors import BatonError, Unreachable

if TYPE_CHECKING:
    from batonmq._telemetry.client_stream import ClientStream
    from batonmq._telemetry.event_counters import ProducerEventCounter

log = logging.getLogger(__name__)


class Producer:
    """Sends messages to topics. Use it as an async context manager; share one per process.

    Args:
        nameserver: host:port of a nameserver, or several separated by commas.
        settings: Settings; None for the defaults.
        client_id: Name of this producer in the metrics stream; by default the host and a random
            part.
        metrics: Prometheus metrics; None for none.
        environment: Clock, random numbers and transport, for tests.

    Every send is idempotent: a batch that is retried is stored once, and the receipt is that of
    the first attempt, also if the storage node was killed in between.

    The end of the block calls `close`. If the block ends with an error, the producer does not wait:
    messages without an outcome fail, and may be stored or not.
    """

    def __init__(
        self,
        nameserver: str,
        settings: ProducerSettings | None = None,
        *,
        client_id: str = "",
        metrics: ClientMetrics | None = None,
        environment: ClientEnvironment | None = None,
    ) -> None:
        self._settings = settings or ProducerSettings()
        secured = (environment or ClientEnvironment()).secured(self._settings.security)
        self._metrics = None if metrics is None else metrics.of_producer()
        self._clock = secured.clock
        self._directory = Directory(nameserver, secured.random, secured.connect)
        self._tasks = asyncio.TaskGroup()
        self._loops: list[asyncio.Task[None]] = []
        self._send_order, self._closing = KeyedLocks(), asyncio.Event()
        self._stream: ClientStream | None = None
        event_counter: ProducerEventCounter | None = None
        if self._settings.metrics_stream:
            from batonmq._telemetry.event_counters import ProducerEventCounter  # noqa: PLC0415

            name = client_id or f"{socket.gethostname()}-{secured.random.getrandbits(64):016x}"
            self._stream = stream_of(name, nameserver, secured)
            event_counter = ProducerEventCounter(self._stream.hub, name)
        self._buffer = SendBuffer(
            self._settings,
            self._directory,
            secured,
            self._start,
            metrics=self._metrics,
            event_counter=event_counter,
        )
        self._scheduled = ScheduledSender(
            self._directory, self._clock, secured.random, self._tasks, self._settings
        )

    async def __aenter__(self) -> Producer:
        await self._tasks.__aenter__()
        if self._metrics is not None:
            bound = self._settings.in_flight_bytes_max
            self._metrics.watch(lambda: bound - self._buffer.free_bytes)
        if self._stream is not None:
            self._loops.append(self._stream.start(self._tasks))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                await self.close()
                if self._stream is not None:
                    await self._stream.close()
        finally:
            self._closing.set()
            self._scheduled.close()
            for task in self._loops:
                task.cancel()
            try:
                await self._tasks.__aexit__(kind, error, trace)
            except BaseExceptionGroup as group:
                if (only := only_error(group)) is not error:
                    raise only from None
            finally:
                self._buffer.fail_all()
                if self._metrics is not None:
                    self._metrics.unwatch()
                await self._directory.close()

    @overload
    async def send(
        self,
        topic: str,
        body: bytes,
        *,
        tag: str = ...,
        keys: Sequence[str] = ...,
        properties: Mapping[str, str] | None = ...,
        ordering_key: str | None = ...,
        queue: QueueRef | None = ...,
    ) -> Receipt: ...

    @overload
    async def send(
        self,
        topic: str,
        body: bytes,
        *,
        tag: str = ...,
        keys: Sequence[str] = ...,
        properties: Mapping[str, str] | None = ...,
        ordering_key: str | None = ...,
        queue: QueueRef | None = ...,
        deliver_at_unix_ms: int | None = ...,
        delay_ms: int | None = ...,
        delay_level: int | None = ...,
    ) -> ScheduleReceipt: ...

    async def send(  # noqa: PLR0913  keyword-only, each with a default
        self,
        topic: str,
        body: bytes,
        *,
        tag: str = "",
        keys: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        ordering_key: str | None = None,
        queue: QueueRef | None = None,
        deliver_at_unix_ms: int | None = None,
        delay_ms: int | None = None,
        delay_level: int | None = None,
    ) -> Receipt | ScheduleReceipt:
        """Send one message and return its receipt when it has the durability of the settings.

        With `deliver_at_unix_ms`, `delay_ms` or `delay_level` the message is a scheduled message:
        it is stored durably now and delivered later. The receipt is a `ScheduleReceipt`; until the
        delivery, `cancel` cancels the message.

        Args:
            topic: The topic.
            body: At most 4 MiB.
            tag: Tag for filters; at most 127 bytes, without white space and `|`.
            keys: Keys by which the message can be found.
            properties: At most 32 KiB.
            ordering_key: Messages with the same key go to the same queue, in the order in which
                they were passed to this producer. If queues are added, a few keys move to a new
                queue; a message of such a key is sent when the earlier messages of the key have an
                outcome.
            queue: Send to this queue.
            deliver_at_unix_ms: Time of delivery, at most 40 days ahead; a time in the past means
                at once.
            delay_ms: Delay of the delivery, from now by the clock of this machine.
            delay_level: 1 to 18 for 1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h.

        Raises:
            TopicNotFound: The topic does not exist.
            LimitExceeded: The message is too large, or its delivery is too far ahead.
            Unreachable: No outcome within the delivery timeout; the message may be stored or not.
            ProducerClosed: The producer is closed.
            BatonError: Storage rejected the message.
        """
        message = Message(body, tag, tuple(keys), properties or {})
        if not (deliver_at_unix_ms is delay_ms is delay_level is None):
            when = (deliver_at_unix_ms, delay_ms, delay_level)
            return await (
                await self._schedule(topic, message, when, SendOptions(ordering_key, queue))
            )
        record = encode_record(message)
        known = self._ready(topic, record, ordering_key) or await self._admitted(
            topic, record, ordering_key
        )
        options = (
            ANY_QUEUE
            if ordering_key is None and queue is None
            else SendOptions(ordering_key, queue)
        )
        outcome, index = self._buffer.place(known, options, message, record)
        return await outcome.wait(index)

    @overload
    async def submit(
        self,
        topic: str,
        message: Message,
        *,
        ordering_key: str | None = ...,
        queue: QueueRef | None = ...,
    ) -> PendingReceipt: ...

    @overload
    async def submit(
        self,
        topic: str,
        message: Message,
        *,
        ordering_key: str | None = ...,
        queue: QueueRef | None = ...,
        deliver_at_unix_ms: int | None = ...,
        delay_ms: int | None = ...,
        delay_level: int | None = ...,
    ) -> PendingSchedule: ...

    async def submit(  # noqa: PLR0913  keyword-only, each with a default
        self,
        topic: str,
        message: Message,
        *,
        ordering_key: str | None = None,
        queue: QueueRef | None = None,
        deliver_at_unix_ms: int | None = None,
        delay_ms: int | None = None,
        delay_level: int | None = None,
    ) -> PendingReceipt | PendingSchedule:
        """Start to send a message; wait only while too many bytes are in flight.

        The other arguments are those of `send`. Scheduled messages with the same time are delivered
        in the order in which they were stored: if that order matters, await each receipt before the
        next `submit`.

        Returns:
            An awaitable that returns the receipt, or raises the error of the send.

        Raises:
            TopicNotFound, LimitExceeded: As for `send`.
            ProducerClosed: The producer is closed.
        """
        if not (deliver_at_unix_ms is delay_ms is delay_level is None):
            when = (deliver_at_unix_ms, delay_ms, delay_level)
            return await self._schedule(topic, message, when, SendOptions(ordering_key, queue))
        record = encode_record(message)
        known = self._ready(topic, record, ordering_key) or await self._admitted(
            topic, record, ordering_key
        )
        options = (
            ANY_QUEUE
            if ordering_key is None and queue is None
            else SendOptions(ordering_key, queue)
        )
        return PendingReceipt(*self._buffer.place(known, options, message, record))

    async def send_one_way(  # noqa: PLR0913  keyword-only, each with a default
        self,
        topic: str,
        body: bytes,
        *,
        tag: str = "",
        keys: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        ordering_key: str | None = None,
        queue: QueueRef | None = None,
    ) -> None:
        """Start to send a message without a receipt; wait only as `submit` does.

        The message is retried and stored once, like any other. If it fails, it is counted in
        `one_way_failures`, and a warning is logged at most every 10 s. `flush` and `close` wait for
        its outcome. The arguments are those of `send`.

        Raises:
            TopicNotFound, LimitExceeded: As for `send`.
            ProducerClosed: The producer is closed.
        """
        message = Message(body, tag, tuple(keys), properties or {})
        record = encode_record(message)
        known = self._ready(topic, record, ordering_key) or await self._admitted(
            topic, record, ordering_key
        )
        self._buffer.place(known, SendOptions(ordering_key, queue, one_way=True), message, record)

    @property
    def one_way_failures(self) -> int:
        """Number of messages of `send_one_way` that have failed since the producer was created."""
        return self._buffer.one_way_failures.count

    async def cancel(self, schedule_id: str) -> None:
        """Cancel a scheduled message.

        Args:
            schedule_id: Id from the receipt; the message may come from another producer.

        Raises:
            NotScheduled: The message is already delivered or cancelled. An earlier attempt of this
                call may have cancelled it, if the response was lost and the call was retried.
            Unreachable: No outcome within the delivery timeout; the message may be cancelled.
        """
        await self._scheduled.cancel(schedule_id)

    async def flush(self) -> None:
        """Wait until every submitted message is stored or has failed."""
        await self._scheduled.flush()
        await self._buffer.flush()

    async def close(self) -> None:
        """Accept no more messages, and wait until every submitted message has an outcome.

        This includes messages of `send_one_way` and scheduled messages. A later send, and a send
        that still waits for the byte limit or for its topic, raises `ProducerClosed`. A second call
        does nothing more. The end of the block calls this method.
        """
        self._closing.set()
        await self.flush()

    def _ready(self, topic: str, record: bytes, ordering_key: str | None) -> TopicQueues | None:
        """Return the topic if the record can be added at once, else None."""
        known = self._buffer.topics.get(topic)
        waits = (
            known is None
            or self._closing.is_set()
            or len(record) > self._buffer.free_bytes
            or (self._send_order.count and (topic, ordering_key) in self._send_order)
            or (ordering_key is not None and known.must_wait(ordering_key))
        )
        return None if waits else known

    async def _admitted(self, topic: str, record: bytes, ordering_key: str | None) -> TopicQueues:
        """Return the topic when the record may be added; records of a key keep their order."""
        begin_ms = self._clock.monotonic_ms()
        async with self._send_order.acquire((topic, ordering_key)):
            known = self._buffer.topics.get(topic)
            if known is None:
                known = await self._open_topic(topic, self._clock.monotonic_ms() - begin_ms)
            self._refuse_if_closing()
            await self._buffer.admit(known, record, ordering_key)
            self._refuse_if_closing()
            return known

    def _refuse_if_closing(self) -> None:
        if self._closing.is_set():
            raise ProducerClosed(
                "the producer is closed", remedy="Open another Producer; this message was not sent."
            )

    async def _schedule(
        self,
        topic: str,
        message: Message,
        when: tuple[int | None, int | None, int | None],
        options: SendOptions,
    ) -> PendingSchedule:
        at_unix_ms, delay_ms, level = when
        deliver_unix_ms = deliver_time(
            self._clock.unix_ms(),
            deliver_at_unix_ms=at_unix_ms,
            delay_ms=delay_ms,
            delay_level=level,
        )
        record = encode_record(message)
        known = self._buffer.topics.get(topic) or await self._open_topic(topic)

        def choose() -> QueueRef:
            queue = known.choose(options, self._clock.monotonic_ms())
            known.next_turn()
            return queue

        await self._scheduled.admit(record)
        self._refuse_if_closing()
        return self._scheduled.submit(message, record, deliver_unix_ms, choose)

    async def _open_topic(self, topic: str, waited_ms: int = 0) -> TopicQueues:
        """Wait for the route of a topic and return the topic.

        Raises:
            TopicNotFound: The topic does not exist.
            Unreachable: No nameserver returned the route in time.
            ProducerClosed: The producer was closed meanwhile.
        """
        timeout_ms = self._settings.delivery_timeout_ms - waited_ms
        if timeout_ms <= 0:
            raise Unreachable(f"timed out waiting for the route of topic {topic}")
        route = await unless(self._closing, wait_for_route(self._directory, topic, timeout_ms))
        self._refuse_if_closing()
        assert route is not None
        topics = self._buffer.topics
        known = topics.get(topic)
        if known is None:
            known = topics[topic] = TopicQueues(route, self._buffer.broker_health)
            self._start(self._follow(topic, known))
        return known

    async def _follow(self, topic: str, known: TopicQueues) -> None:
        try:
            await follow_route(
                self._directory,
                topic,
                lambda route: known.change(route, self._buffer.last(known)),
            )
        except BatonError as error:
            log.warning("topic is no longer available topic=%s error=%s", topic, error)
            self._buffer.topics.pop(topic, None)

    def _start(self, loop: Coroutine[Any, Any, None]) -> None:
        self._loops.append(self._tasks.create_task(loop))


def stream_of(client_id: str, nameserver: str, environment: ClientEnvironment) -> ClientStream:
    """Return the metrics stream of a client, with its own producer."""
    from batonmq._telemetry.client_stream import ClientStream  # noqa: PLC0415

    return ClientStream(
        client_id,
        environment,
        lambda: Producer(nameserver, METRICS_PRODUCER, environment=environment),
    )
