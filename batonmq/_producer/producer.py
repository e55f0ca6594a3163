"""The producer: sends messages in batches, with idempotent retries."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from batonmq._common.aio import begin_task, only_error, unless
from batonmq._common.client_block import ClientBlock
from batonmq._connection.directory import ClientEnvironment, Directory
from batonmq._connection.routes import follow_route, wait_for_route
from batonmq._core.delays import DelayLeft, deliver_time
from batonmq._core.names import check_group
from batonmq._core.ordering_key import with_ordering_key
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message, checked_keys, encode_record
from batonmq._core.requests import Reply
from batonmq._core.transactions import CommitReceipt, TransactionChecker, TransactionState
from batonmq._producer.check_responder import CheckResponder
from batonmq._producer.message_columns import Bodies, Keys, MessageColumns, MessagePiece
from batonmq._producer.producer_settings import METRICS_PRODUCER, ProducerSettings
from batonmq._producer.receipts import (
    ANY_QUEUE,
    BatchOutcome,
    FailedRange,
    PartlySent,
    PendingReceipt,
    Receipt,
    ReceiptRange,
    SendOptions,
)
from batonmq._producer.requester import Requester
from batonmq._producer.scheduled_sender import PendingSchedule, ScheduledSender, ScheduleReceipt
from batonmq._producer.send_buffer import ProducerClosed, SendBuffer
from batonmq._producer.topic_queues import TopicQueues
from batonmq._producer.traced_sends import TracedSends
from batonmq._producer.transaction import Transaction, TransactionBlock
from batonmq._producer.transaction_sender import (
    TransactionSender,
    checked_after_ms,
    needs_group,
)
from batonmq._producer.waiting_sends import WaitingSend, WaitingSends
from batonmq._telemetry.client_metrics import ClientMetrics, ProducerMetrics
from batonmq.errors import BatonError, InvalidArgument, Unreachable

if TYPE_CHECKING:
    from batonmq._telemetry.client_stream import ClientStream
    from batonmq._telemetry.event_counters import ProducerEventCounter
    from batonmq._telemetry.open_telemetry import OpenTelemetry

log = logging.getLogger(__name__)

Placed = TypeVar("Placed")


class Producer:
    """Sends messages to topics. Use it as an async context manager; share one per process.

    Args:
        nameserver: host:port of a nameserver, or several separated by commas.
        settings: Settings; None for the defaults.
        client_id: Name of this producer in the metrics stream; by default the host and a random
            part.
        group: Producer group, for transactions: a broker may ask any producer of the group for the
            outcome of a transaction of another one. 1 to 127 characters of A-Z a-z 0-9 _ % -.
        transaction_checker: Returns the outcome of a transaction when a broker asks; needs a group.
            It is called in the event loop, and may be a coroutine function.
        metrics: Prometheus metrics; None for none.
        telemetry: Spans and metrics of OpenTelemetry; None for none.
        environment: Clock, random numbers and transport, for tests.

    Every send is idempotent: a batch that is retried is stored once, and the receipt is that of
    the first attempt, also if the storage node was killed in between.

    The end of the block calls `close`. If the block ends with an error, the producer does not wait:
    messages without an outcome fail, and may be stored or not.
    """

    def __init__(  # noqa: PLR0913  keyword-only, each with a default
        self,
        nameserver: str,
        settings: ProducerSettings | None = None,
        *,
        client_id: str = "",
        group: str = "",
        transaction_checker: TransactionChecker | None = None,
        metrics: ClientMetrics | None = None,
        telemetry: OpenTelemetry | None = None,
        environment: ClientEnvironment | None = None,
    ) -> None:
        self._group = check_group(group) if group else ""
        self._checker = transaction_checker
        if transaction_checker is not None:
            needs_group(group)
        self._settings = settings or ProducerSettings()
        secured = (environment or ClientEnvironment()).secured(self._settings.security)
        self._metrics = None if metrics is None else ProducerMetrics(metrics)
        self._traced = None if telemetry is None else TracedSends(telemetry, self._start)
        self._clock = secured.clock
        self._directory = Directory(nameserver, secured.random, secured.connect)
        self._block, self._tasks = ClientBlock("Producer"), asyncio.TaskGroup()
        self._loops: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
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
        self._waiting = WaitingSends(
            self._buffer,
            self._settings.in_flight_bytes_max,
            lambda topic: self._start(self._open_for_waiting(topic)),
        )
        self._buffer.on_settled = self._waiting.batch_settled
        self._scheduled = ScheduledSender(
            self._directory, self._clock, secured.random, self._tasks, self._settings
        )
        self._transactions = TransactionSender(
            self._directory, self._clock, secured.random, self._start, self._settings
        )
        self._requester = Requester(
            self._directory, secured.random, self.submit, self._start, self._metrics
        )

    async def __aenter__(self) -> Producer:
        self._block.enter()
        await self._tasks.__aenter__()
        if self._metrics is not None:
            bound = self._settings.in_flight_bytes_max
            self._metrics.watch(lambda: bound - self._buffer.free_bytes)
        if self._stream is not None:
            self._loops.add(self._stream.start(self._tasks))
        if self._checker is not None:
            responder = CheckResponder(
                self._directory, self._transactions, self._start, self._group, self._checker
            )
            self._start(responder.run())
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
            self._requester.close(_closed())
            self._transactions.close(_closed())
            self._waiting.fail_all(_closed())
            for task in list(self._loops):
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
                they were passed to this producer. Consumers with `order="key"` handle them in that
                order. At most 1,024 bytes of UTF-8; it is stored as a property. If queues are
                added, a few keys move to a new queue; a message of such a key is sent when the
                earlier messages of the key have an outcome.
            queue: Send to this queue.
            deliver_at_unix_ms: Time of delivery by the clock of the storage node, at most 40 days
                ahead; a time in the past means at once.
            delay_ms: Delay of the delivery, from now; the wall clock of this machine does not
                matter.
            delay_level: 1 to 18 for 1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h.

        Raises:
            TopicNotFound: The topic does not exist.
            LimitExceeded: The message is too large, or its delivery is too far ahead.
            Unreachable: No outcome within the delivery timeout; the message may be stored or not.
            ProducerClosed: The producer is closed.
            BatonError: Storage rejected the message.
        """
        message = with_ordering_key(
            Message(body, tag, checked_keys(keys), properties or {}), ordering_key
        )
        at_once = deliver_at_unix_ms is delay_ms is delay_level is None
        options = (
            ANY_QUEUE
            if ordering_key is None and queue is None
            else SendOptions(ordering_key, queue)
        )
        if self._traced is not None or not at_once:
            return await self._send_traced_or_scheduled(
                topic, message, (deliver_at_unix_ms, delay_ms, delay_level), options
            )
        record = encode_record(message)
        outcome, index = self._place(topic, options, message, record) or (
            await self._wait_to_place(topic, options, message, record)
        )
        # Each object that a message in flight keeps alive costs time in garbage collections.
        del message, record, options
        if (settled := outcome.when_settled()) is not None:
            await settled
        return await outcome.moved[index] if outcome.moved else outcome.receipt(index)

    async def request(  # noqa: PLR0913  keyword-only, each with a default
        self,
        topic: str,
        body: bytes,
        *,
        timeout_ms: int = 3_000,
        tag: str = "",
        keys: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        ordering_key: str | None = None,
        queue: QueueRef | None = None,
    ) -> Reply:
        """Send a message as a request, and return the reply of the handler that consumes it.

        The request is stored and consumed like any other message; the reply is neither stored nor
        replicated. The first reply counts, later ones are dropped. The other arguments are those
        of `send`.

        Args:
            timeout_ms: How long to wait for the reply, at most 24 h.

        Raises:
            RequestFailed: The responder replied with an error.
            RequestTimedOut: No reply arrived in time. The request may be handled or not.
            TopicNotFound, LimitExceeded, Unreachable, ProducerClosed: As for `send`. `Unreachable`
                also if the node with the reply inbox was lost: then the request may be handled.
        """
        message = Message(body, tag, checked_keys(keys), properties or {})
        self._refuse_if_closing()
        return await self._requester.request(topic, message, timeout_ms, ordering_key, queue)

    def transaction(  # noqa: PLR0913  keyword-only, each with a default
        self,
        topic: str,
        body: bytes,
        *,
        tag: str = "",
        keys: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        ordering_key: str | None = None,
        queue: QueueRef | None = None,
        check_after_ms: int | None = None,
    ) -> AbstractAsyncContextManager[Transaction]:
        """Return a block that sends a message if, and only if, the block succeeds.

            async with producer.transaction("orders", body, keys=[order.id]) as tx:
                await database.store(order)

        At the start of the block the message is stored as a half message, which no consumer sees.
        Without an error the end of the block commits it: it gets its offset and becomes visible.
        An `Exception` rolls it back. If this process dies, or the block is cancelled, the broker
        asks the `transaction_checker` of any live producer of the group: first after 6 s, then
        every 30 s. After 15 checks without an answer, or after 24 h, the message moves to the topic
        BATON_SYS_UNRESOLVED. Messages of the same ordering key are in the order of their commits.

        Args:
            check_after_ms: Age of the transaction at the first check, 1 ms to 24 h, instead of the
                brokers' setting (6 s): for a local transaction that takes longer, or one after
                which others wait. The other arguments are those of `send`.

        Raises:
            InvalidArgument: The producer has no group, or `check_after_ms` is out of range.
            TopicNotFound, LimitExceeded, ProducerClosed: As for `send`; the block is not run.
            Unreachable: At the start: the block is not run, and the half message may be stored. At
                the end: the message may be committed, and the checker will be asked.
            TransactionEnded: At the end: a check-back or an operator has rolled it back.
        """
        message = Message(body, tag, checked_keys(keys), properties or {})
        return TransactionBlock(
            lambda: self.begin_transaction(
                topic,
                message,
                ordering_key=ordering_key,
                queue=queue,
                check_after_ms=check_after_ms,
            )
        )

    async def begin_transaction(
        self,
        topic: str,
        message: Message,
        *,
        ordering_key: str | None = None,
        queue: QueueRef | None = None,
        check_after_ms: int | None = None,
        group: str = "",
    ) -> Transaction:
        """Store a half message and return its transaction, which the caller ends.

        Arguments and errors are those of `transaction`, which is simpler if one block does it all.

        Args:
            group: Producer group to be asked about it; by default that of this producer.
        """
        group = check_group(group) if group else needs_group(self._group)
        message = with_ordering_key(message, ordering_key)
        record = encode_record(message)
        self._refuse_if_closing()
        known = self._buffer.topics.get(topic) or await self._open_topic(
            topic, self._settings.delivery_timeout_ms
        )
        options = SendOptions(ordering_key, queue)

        def choose() -> QueueRef:
            return known.choose(options, self._clock.monotonic_ms())

        async def begin(half: Message) -> tuple[Any, str]:
            encoded = record if half is message else encode_record(half)
            after_ms = checked_after_ms(check_after_ms)
            return await self._transactions.begin(group, half, encoded, choose, after_ms)

        traced = self._traced
        begun, transaction_id = await (
            begin(message) if traced is None else traced.begin(topic, message, begin)
        )
        return Transaction(self._transactions, begun, transaction_id)

    async def end_transaction(
        self, transaction_id: str, state: TransactionState, *, topic: str = ""
    ) -> CommitReceipt | None:
        """End a transaction of any producer by its id.

        Args:
            state: COMMIT or ROLLBACK; UNKNOWN changes nothing.
            topic: Topic of the message, for the receipt. If it is given and the message is of
                another one, the transaction is not found.

        Returns:
            The receipt of a commit; None otherwise.

        Raises:
            TransactionEnded: It has the other outcome.
            TransactionNotFound: The id is unknown, or its outcome is forgotten.
            Unreachable: No outcome within the delivery timeout; it may have ended.
        """
        if state is TransactionState.COMMIT:
            return await self._transactions.commit(transaction_id, topic)
        await self._transactions.end(transaction_id, state, topic)
        return None

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
        message = with_ordering_key(message, ordering_key)
        when = (deliver_at_unix_ms, delay_ms, delay_level)
        if self._traced is not None:
            submit = self._submitting(topic, when, SendOptions(ordering_key, queue))
            return await self._traced.submit(topic, message, submit)
        if not (deliver_at_unix_ms is delay_ms is delay_level is None):
            return await self._schedule(topic, message, when, SendOptions(ordering_key, queue))
        record = encode_record(message)
        options = (
            ANY_QUEUE
            if ordering_key is None and queue is None
            else SendOptions(ordering_key, queue)
        )
        placed = self._place(topic, options, message, record)
        return PendingReceipt(
            *(placed or await self._wait_to_place(topic, options, message, record))
        )

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
        message = with_ordering_key(
            Message(body, tag, checked_keys(keys), properties or {}), ordering_key
        )
        options = SendOptions(ordering_key, queue, one_way=True)
        if self._traced is not None:
            submit = self._submitting(topic, (None, None, None), options)
            await self._traced.submit(topic, message, submit)
            return
        record = encode_record(message)
        if self._place(topic, options, message, record) is None:
            await self._wait_to_place(topic, options, message, record)

    async def send_many(
        self,
        topic: str,
        bodies: Bodies,
        *,
        tag: str = "",
        keys: Keys = (),
        ordering_key: str | None = None,
        queue: QueueRef | None = None,
    ) -> list[ReceiptRange]:
        """Send many messages; return their receipts when all have the durability of the settings.

        This is the fastest way to send: the messages are encoded as columns, and there is one
        receipt per batch. The messages of one batch are consecutive in `bodies` and in the queue;
        with an ordering key or a queue, all messages keep their order. If the call is cancelled,
        messages that are in a batch already are sent nevertheless.

        Args:
            topic: The topic.
            bodies: Bodies, each of at most 4 MiB: a sequence of bytes, or a column of Arrow (binary
                or string, without nulls).
            tag: Tag of all messages.
            keys: One key per message, by which it can be found; an empty string for none.
            ordering_key: As for `send`, for all messages.
            queue: Send all messages to this queue.

        Returns:
            The receipts in the order of `bodies`.

        Raises:
            InvalidArgument, BadBatch, LimitExceeded: A message is not valid. No message was sent.
            PartlySent: Some messages are stored and others have failed.
            TopicNotFound, Unreachable, ProducerClosed: As for `send`, for all messages.
        """
        columns = MessageColumns(bodies, tag, keys, ordering_key)
        if self._traced is None or not len(columns):
            return await self._send_columns(topic, columns, ordering_key, queue)

        async def send(properties: Mapping[str, str]) -> list[ReceiptRange]:
            columns.add_properties(properties)
            return await self._send_columns(topic, columns, ordering_key, queue)

        return await self._traced.send_many(topic, len(columns), send)

    async def _send_columns(
        self, topic: str, columns: MessageColumns, ordering_key: str | None, queue: QueueRef | None
    ) -> list[ReceiptRange]:
        no_options = ordering_key is None and queue is None
        options = ANY_QUEUE if no_options else SendOptions(ordering_key, queue)
        outcomes: list[ReceiptRange | FailedRange] = []
        placed: list[tuple[BatchOutcome, int, int, int]] = []
        begin = 0
        while begin < len(columns):
            piece = columns.piece(begin, *self._buffer.batch_limits)
            count = len(piece.records)
            try:
                batch = await self._place_many(topic, options, piece)
            except BatonError as error:
                outcomes.append(FailedRange(begin, len(columns) - begin, error))
                break
            placed.append((*batch, count, begin))
            begin += count
            await asyncio.sleep(0)  # let the first batches leave while the others are encoded
        stored = [
            outcome
            for batch, first, count, index in placed
            for outcome in await batch.wait_for_range(first, count, index)
        ]
        return _all_stored([*stored, *outcomes])

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
            ProducerClosed: The producer is closed.
        """
        self._refuse_if_closing()
        await self._scheduled.cancel(schedule_id)

    async def flush(self) -> None:
        """Wait until every message that was submitted before is stored or has failed."""
        self._block.check()
        await self._scheduled.flush()
        await self._buffer.flush()

    async def close(self) -> None:
        """Accept no more messages, and wait until every submitted message has an outcome.

        This includes messages of `send_one_way` and scheduled messages. A later send, and a send
        that still waits for the byte limit or for its topic, raises `ProducerClosed`. A second call
        does nothing more. The end of the block calls this method.
        """
        self._closing.set()
        self._waiting.fail_all(_closed())
        await self.flush()

    async def _send_traced_or_scheduled(
        self,
        topic: str,
        message: Message,
        when: tuple[int | None, int | None, int | None],
        options: SendOptions,
    ) -> Receipt | ScheduleReceipt:
        """Send a message that has a span, or a time of delivery."""
        if self._traced is None:
            return await (await self._schedule(topic, message, when, options))
        return await self._traced.send(topic, message, self._submitting(topic, when, options))

    def _submitting(
        self,
        topic: str,
        when: tuple[int | None, int | None, int | None],
        options: SendOptions,
    ) -> Callable[[Message], Coroutine[Any, Any, PendingReceipt | PendingSchedule]]:
        """Return a function that starts to send a message, for a send with a span."""

        async def submit(message: Message) -> PendingReceipt | PendingSchedule:
            if when != (None, None, None):
                return await self._schedule(topic, message, when, options)
            record = encode_record(message)
            placed = self._place(topic, options, message, record)
            return PendingReceipt(
                *(placed or await self._wait_to_place(topic, options, message, record))
            )

        return submit

    def _place(
        self, topic: str, options: SendOptions, message: Message, record: bytes
    ) -> tuple[BatchOutcome, int] | None:
        """Put the message into a batch; None if it has to wait before."""
        known = self._buffer.topics.get(topic)
        if (
            known is None
            or asyncio.get_running_loop() is not self._block.loop
            or self._closing.is_set()
            or self._waiting.delays(known, topic, options.ordering_key, len(record))
        ):
            return None
        return self._buffer.place(known, options, message, record)

    async def _place_many(
        self, topic: str, options: SendOptions, piece: MessagePiece
    ) -> tuple[BatchOutcome, int]:
        def place(known: TopicQueues) -> tuple[BatchOutcome, int]:
            return self._buffer.place_many(known, options, piece)

        known, key = self._buffer.topics.get(topic), options.ordering_key
        if (
            known is None
            or asyncio.get_running_loop() is not self._block.loop
            or self._closing.is_set()
            or self._waiting.delays(known, topic, key, piece.size)
        ):
            return await self._when_due(topic, key, piece.size, place)
        return place(known)

    async def _wait_to_place(
        self, topic: str, options: SendOptions, message: Message, record: bytes
    ) -> tuple[BatchOutcome, int]:
        """Put the message into a batch when its topic is open and there is room for it."""

        def place(known: TopicQueues) -> tuple[BatchOutcome, int]:
            return self._buffer.place(known, options, message, record)

        return await self._when_due(topic, options.ordering_key, len(record), place)

    async def _when_due(
        self,
        topic: str,
        ordering_key: str | None,
        size: int,
        place: Callable[[TopicQueues], Placed],
    ) -> Placed:
        """Call `place` when the topic is open and there is room for `size` bytes."""
        self._refuse_if_closing()
        deadline_ms = self._clock.monotonic_ms() + self._settings.delivery_timeout_ms
        send = WaitingSend(topic, ordering_key, size, deadline_ms, place)
        self._waiting.add(send)
        try:
            return await send.placed
        except BatonError as error:
            raise error.with_traceback(None)  # noqa: B904  all messages that waited share it

    async def _open_for_waiting(self, topic: str) -> None:
        """Open the topic for the messages that wait for its route, or fail them."""
        while (deadline_ms := self._waiting.deadline_ms(topic)) is not None:
            try:
                await self._open_topic(topic, max(1, deadline_ms - self._clock.monotonic_ms()))
            except Unreachable as error:
                self._waiting.fail_topic(topic, error, max(deadline_ms, self._clock.monotonic_ms()))
            except BatonError as error:
                self._waiting.fail_topic(topic, error, sys.maxsize)
            except (TypeError, ValueError):  # a request can't have it
                invalid = InvalidArgument(
                    f"topic must be a name, got {topic!r}", facts={"field": "topic"}
                )
                self._waiting.fail_topic(topic, invalid, sys.maxsize)
            else:
                self._waiting.topic_opened(topic)

    def _refuse_if_closing(self) -> None:
        self._block.check()
        if self._closing.is_set():
            raise _closed()

    async def _schedule(
        self,
        topic: str,
        message: Message,
        when: tuple[int | None, int | None, int | None],
        options: SendOptions,
    ) -> PendingSchedule:
        self._refuse_if_closing()
        at_unix_ms, delay_ms, level = when
        now_unix_ms, now_ms = self._clock.unix_ms(), self._clock.monotonic_ms()
        deliver_unix_ms = deliver_time(
            now_unix_ms,
            deliver_at_unix_ms=at_unix_ms,
            delay_ms=delay_ms,
            delay_level=level,
        )
        is_time = at_unix_ms is not None
        delay = None if is_time else DelayLeft(deliver_unix_ms - now_unix_ms, now_ms)
        record = encode_record(message)
        known = self._buffer.topics.get(topic) or await self._open_topic(
            topic, self._settings.delivery_timeout_ms
        )

        def choose() -> QueueRef:
            return known.choose(options, self._clock.monotonic_ms())

        await self._scheduled.admit(record)
        self._refuse_if_closing()
        return self._scheduled.submit(message, record, deliver_unix_ms, delay, choose)

    async def _open_topic(self, topic: str, timeout_ms: int) -> TopicQueues:
        """Wait for the route of a topic and return the topic.

        Raises:
            TopicNotFound: The topic does not exist.
            Unreachable: No nameserver returned the route in time.
            ProducerClosed: The producer was closed meanwhile.
        """
        route = await unless(self._closing, wait_for_route(self._directory, topic, timeout_ms))
        self._refuse_if_closing()
        assert route is not None
        known = self._buffer.topics.get(topic)
        if known is None:
            known = self._buffer.add_topic(topic, route)
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
            self._buffer.remove_topic(topic)
            self._scheduled.forget_topic(topic)
            self._transactions.forget_topic(topic)

    def _start(self, loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = begin_task(self._tasks, loop)
        self._loops.add(task)
        task.add_done_callback(self._loops.discard)
        return task


def _all_stored(outcomes: Sequence[ReceiptRange | FailedRange]) -> list[ReceiptRange]:
    """Return the receipts; raise the common error of all messages, or `PartlySent`."""
    stored = [one for one in outcomes if isinstance(one, ReceiptRange)]
    failed = [one for one in outcomes if isinstance(one, FailedRange)]
    if not failed:
        return stored
    if not stored and len({id(one.error) for one in failed}) == 1:
        raise failed[0].error
    counts = [sum(one.message_count for one in ranges) for ranges in (failed, stored)]
    raise PartlySent(
        f"{counts[0]} messages have failed, {counts[1]} are stored; the first error: "
        f"{failed[0].error.message}",
        stored=stored,
        failed=failed,
    )


def _closed() -> ProducerClosed:
    return ProducerClosed(
        "the producer is closed", remedy="Open another Producer; this message was not sent."
    )


def stream_of(client_id: str, nameserver: str, environment: ClientEnvironment) -> ClientStream:
    """Return the metrics stream of a client, with its own producer."""
    from batonmq._telemetry.client_stream import ClientStream  # noqa: PLC0415

    return ClientStream(
        client_id,
        environment,
        lambda: Producer(nameserver, METRICS_PRODUCER, environment=environment),
    )
