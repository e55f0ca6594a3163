"""Sends messages: many concurrent sends become few batches, retries never store twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import overload

from baton.storage.v1 import storage_service_pb2 as pb

from batonmq.common.aio import only_error
from batonmq.common.errors import (
    BatonError,
    NotWritable,
    Unreachable,
)
from batonmq.core.delays import deliver_time
from batonmq.core.records import Message, encode_record
from batonmq.core.route import QueueId
from batonmq.core.sending import Batch, QueueSender
from batonmq.directory import Directory, Surroundings
from batonmq.producing.broker import BrokerLoop, Landing
from batonmq.producing.receipts import Outcome, Pending, Receipt
from batonmq.producing.settings import ProducerSettings
from batonmq.producing.topic import TopicQueues
from batonmq.routes import follow_route, wait_for_route
from batonmq.scheduling import PendingSchedule, ScheduleReceipt, Scheduling

log = logging.getLogger(__name__)

_ANY = (None, None)


class Producer:
    """Sends messages to topics. Use it as an async context manager; share one per process.

    Args:
        nameserver: host:port of a nameserver; several separated by commas.
        surroundings: Clock, randomness and transport; the real ones by default.

    Every send is idempotent: a batch that had to be repeated is stored once, and the receipt is
    that of the first time, also when the storage node was killed in between.
    """

    def __init__(
        self,
        nameserver: str,
        settings: ProducerSettings | None = None,
        *,
        surroundings: Surroundings | None = None,
    ) -> None:
        outside = surroundings or Surroundings()
        self._settings = settings or ProducerSettings()
        self._clock, self._random = outside.clock, outside.random
        self._directory = Directory(nameserver, self._random, outside.connect)
        self._topics: dict[str, TopicQueues] = {}
        self._senders: dict[QueueId, QueueSender[Outcome]] = {}
        self._brokers: dict[str, BrokerLoop] = {}
        self._room = self._settings.in_flight_bytes_max
        self._landed = asyncio.Event()
        self._closed = False
        self._tasks = asyncio.TaskGroup()
        self._loops: list[asyncio.Task[None]] = []
        self._scheduling = Scheduling(
            self._directory, self._clock, self._random, self._tasks, self._settings
        )

    async def __aenter__(self) -> Producer:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                await self.flush()
        finally:
            self._closed = True
            self._scheduling.close()
            for task in self._loops:
                task.cancel()
            try:
                await self._tasks.__aexit__(kind, error, trace)
            except BaseExceptionGroup as group:
                raise only_error(group) from None
            finally:
                self._abandon()
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
        queue: QueueId | None = ...,
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
        queue: QueueId | None = ...,
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
        queue: QueueId | None = None,
        deliver_at_unix_ms: int | None = None,
        delay_ms: int | None = None,
        delay_level: int | None = None,
    ) -> Receipt | ScheduleReceipt:
        """Send one message and wait until it is as safe as the settings ask.

        With one of the last three it is stored now, durably, and becomes visible later; the receipt
        then is a `ScheduleReceipt`. Until then `cancel` takes it back.

        Args:
            body: At most 4 MiB.
            tag: For filters; at most 127 bytes, no white space, no `|`.
            keys: For look-ups.
            properties: At most 32 KiB.
            ordering_key: Messages with the same key go to the same queue, in order, as long as
                the topic's queues stay the same.
            queue: Exactly this queue.
            deliver_at_unix_ms: When, up to 40 days ahead; a time that has passed means at once.
            delay_ms: How much later than now, by this machine's clock.
            delay_level: 1 to 18 for 1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h.

        Raises:
            TopicNotFound: there is no such topic.
            LimitExceeded: the message is too large, or its time too far ahead.
            Unreachable: no outcome within the delivery timeout: the message may be stored or not.
            BatonError: as storage refused it.
        """
        message = Message(body, tag, tuple(keys), properties or {})
        if not (deliver_at_unix_ms is delay_ms is delay_level is None):
            when = (deliver_at_unix_ms, delay_ms, delay_level)
            return await (await self._schedule(topic, message, when, (ordering_key, queue)))
        record = encode_record(message)
        known = self._topics.get(topic)
        if known is None or len(record) > self._room:
            known = await self._admitted(topic, record)
        wanted = _ANY if ordering_key is None and queue is None else (ordering_key, queue)
        outcome, index = self._place(known, wanted, message, record)
        return await outcome.wait(index)

    @overload
    async def submit(
        self,
        topic: str,
        message: Message,
        *,
        ordering_key: str | None = ...,
        queue: QueueId | None = ...,
    ) -> Pending: ...

    @overload
    async def submit(
        self,
        topic: str,
        message: Message,
        *,
        ordering_key: str | None = ...,
        queue: QueueId | None = ...,
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
        queue: QueueId | None = None,
        deliver_at_unix_ms: int | None = None,
        delay_ms: int | None = None,
        delay_level: int | None = None,
    ) -> Pending | PendingSchedule:
        """Hand over a message; waits only while too many bytes are in flight.

        The last three are as for `send`. Messages for the same time are delivered in the order in
        which they were stored: await a receipt before the next `submit` where that matters.

        Returns:
            What to await for the receipt. Errors of the sending are raised there.

        Raises:
            TopicNotFound, LimitExceeded: as `send`.
            Unreachable: the producer is closed.
        """
        if not (deliver_at_unix_ms is delay_ms is delay_level is None):
            when = (deliver_at_unix_ms, delay_ms, delay_level)
            return await self._schedule(topic, message, when, (ordering_key, queue))
        record = encode_record(message)
        known = await self._admitted(topic, record)
        return Pending(*self._place(known, (ordering_key, queue), message, record))

    async def cancel(self, schedule_id: str) -> None:
        """Take back a message that was sent for later.

        Args:
            schedule_id: Of its receipt, whoever sent it.

        Raises:
            NotScheduled: it is delivered, or cancelled: perhaps by this very call, if an answer was
                lost on the way and it had to be repeated.
            Unreachable: no outcome within the delivery timeout: it may be cancelled or not.
        """
        await self._scheduling.cancel(schedule_id)

    async def flush(self) -> None:
        """Wait until every message handed over has an outcome, good or bad."""
        await self._scheduling.flush()
        while any(not sender.idle for sender in self._senders.values()):
            self._landed.clear()
            await self._landed.wait()

    async def _admitted(self, topic: str, record: bytes) -> TopicQueues:
        """The topic, once there is room for the record."""
        known = self._topics.get(topic) or await self._open_topic(topic)
        while len(record) > self._room < self._settings.in_flight_bytes_max:
            self._landed.clear()
            await self._landed.wait()
        return known

    def _place(
        self,
        known: TopicQueues,
        wanted: tuple[str | None, QueueId | None],
        message: Message,
        record: bytes,
    ) -> tuple[Outcome, int]:
        """Put the message into a batch; `wanted` is its ordering key and its queue, if it has.

        Returns:
            Outcome of the batch, and the message's index there.
        """
        if self._closed:
            raise Unreachable("the producer is closed")
        if wanted == _ANY:
            sender = known.current = known.current or self._sender(known.choose(*_ANY))
        else:
            sender = self._sender(known.choose(*wanted))
        batch = sender.open_batch(len(record))
        if batch is None:
            outcome = Outcome(sender.queue)
            batch = sender.begin_batch(outcome, self._clock.monotonic_ms())
            known.next_turn()
            self._brokers[sender.queue.broker].wake(sender)
        index, outcome = batch.builder.add(message, record), batch.token
        if wanted != _ANY:
            outcome.wants[index] = wanted
        outcome.bytes_count += len(record)
        self._room -= len(record)
        return outcome, index

    async def _schedule(
        self,
        topic: str,
        message: Message,
        when: tuple[int | None, int | None, int | None],
        wanted: tuple[str | None, QueueId | None],
    ) -> PendingSchedule:
        at_unix_ms, delay_ms, level = when
        deliver_unix_ms = deliver_time(
            self._clock.unix_ms(),
            deliver_at_unix_ms=at_unix_ms,
            delay_ms=delay_ms,
            delay_level=level,
        )
        known = self._topics.get(topic) or await self._open_topic(topic)

        def choose() -> QueueId:
            queue = known.choose(*wanted)
            known.next_turn()
            return queue

        if self._closed:
            raise Unreachable("the producer is closed")
        return await self._scheduling.submit(message, deliver_unix_ms, choose)

    async def _open_topic(self, topic: str) -> TopicQueues:
        route = await wait_for_route(self._directory, topic, self._settings.delivery_timeout_ms)
        known = self._topics.get(topic)
        if known is None:
            known = self._topics[topic] = TopicQueues(route)
            self._loops.append(self._tasks.create_task(self._follow(topic, known)))
        return known

    async def _follow(self, topic: str, known: TopicQueues) -> None:
        try:
            await follow_route(self._directory, topic, known.change)
        except BatonError as error:
            log.warning("topic lost topic=%s error=%s", topic, error)
            self._topics.pop(topic, None)

    def _sender(self, queue: QueueId) -> QueueSender[Outcome]:
        sender = self._senders.get(queue)
        if sender is None:
            sender = self._senders[queue] = QueueSender(
                queue,
                self._random.getrandbits(63) or 1,
                self._settings.batch_bytes_max,
                self._settings.batch_messages_max,
            )
            if queue.broker not in self._brokers:
                landing = Landing(self._settle, self._takes, self._move)
                loop = BrokerLoop(
                    queue.broker, self._settings, self._directory, self._clock, landing
                )
                self._brokers[queue.broker] = loop
                self._loops.append(self._tasks.create_task(loop.run()))
        return sender

    def _settle(self, batch: Batch[Outcome], outcome: pb.AppendReceipt | BatonError) -> None:
        batch.token.settle(outcome)
        self._room += batch.token.bytes_count
        self._landed.set()

    def _takes(self, queue: QueueId) -> bool:
        """Whether the queue takes messages, as far as is known here."""
        known = self._topics.get(queue.topic)
        return known is None or queue in known.queues

    def _move(self, sender: QueueSender[Outcome], error: BatonError) -> None:
        """Give what waits for a queue that takes no messages to others of the topic."""
        known = self._topics.get(sender.queue.topic)
        for batch in (sender.refused(), *sender.drop()):
            if known is None or (batch.unsure and not isinstance(error, NotWritable)):
                self._settle(batch, error)
                continue
            moved = [
                self._placed_anew(known, batch.token.wants.get(index, _ANY), *message)
                for index, message in enumerate(batch.builder.messages())
            ]
            batch.token.move(moved)
            self._room += batch.token.bytes_count
            self._landed.set()

    def _placed_anew(
        self,
        known: TopicQueues,
        wanted: tuple[str | None, QueueId | None],
        message: Message,
        record: bytes,
    ) -> Pending:
        try:
            return Pending(*self._place(known, wanted, message, record))
        except BatonError as error:
            refused = Outcome(wanted[1] or QueueId("", "", 0))
            refused.settle(error)
            return Pending(refused, 0)

    def _abandon(self) -> None:
        """Tell those who still wait that nobody sends any more."""
        for sender in self._senders.values():
            for batch in sender.drop():
                self._settle(batch, Unreachable("the producer was closed"))
