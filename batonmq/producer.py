"""Sends messages: many concurrent sends become few batches, retries never store twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from types import TracebackType
from typing import NamedTuple, overload

import grpc.aio
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.storage.v1 import storage_service_pb2 as pb

from batonmq.common.aio import only_error
from batonmq.common.errors import (
    BatonError,
    DuplicateSequence,
    Internal,
    NotWritable,
    QueueNotFound,
    Retry,
    Unreachable,
)
from batonmq.common.rpc import error_from_pb, from_rpc_error
from batonmq.core.delays import deliver_time
from batonmq.core.records import Message, encode_record
from batonmq.core.route import QueueId, queue_of_key
from batonmq.core.sending import Batch, QueueSender
from batonmq.directory import Directory, Surroundings
from batonmq.routes import follow_route, queues_of, wait_for_route, writable_queues_of
from batonmq.scheduling import PendingSchedule, ScheduleReceipt, Scheduling

log = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 8 * 1024 * 1024
REQUEST_BATCHES_MAX = 1_024
WOKEN_AT_ONCE = 64
"""Senders of a batch that go on in one turn of the event loop."""
_ANY = (None, None)


class Durability(Enum):
    """How safe a message is when its receipt is given."""

    MEMORY = pb.DURABILITY_MEMORY
    """In the page cache of one node: survives kill -9, not a power cut."""
    FSYNCED = pb.DURABILITY_FSYNCED
    """On the disk of one node."""
    REPLICATED = pb.DURABILITY_REPLICATED
    """On the disk of the in-sync set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """How a producer behaves.

    Attributes:
        durability: What a receipt has to mean.
        linger_ms: Wait so long for more messages before a batch leaves; 0 sends at once, and
            what arrives while a request is under way still travels together.
        batch_bytes_max: A batch of one queue takes no more than this.
        batch_messages_max: Nor more messages than this, up to 65,535.
        in_flight_requests_max: Requests under way to one broker.
        in_flight_bytes_max: Messages that wait or travel; beyond, `send` waits.
        delivery_timeout_ms: A batch without an outcome for so long after its first message was
            handed over fails.
        request_timeout_ms: Bound of one request.
    """

    durability: Durability = Durability.FSYNCED
    linger_ms: int = 0
    batch_bytes_max: int = 512 * 1024
    batch_messages_max: int = 1_000
    in_flight_requests_max: int = 4
    in_flight_bytes_max: int = 64 * 1024 * 1024
    delivery_timeout_ms: int = 120_000
    request_timeout_ms: int = 10_000


class Receipt(NamedTuple):
    """Proof that a message is stored.

    Attributes:
        queue: Where it is.
        offset: Its place in the queue, in messages.
        position: Where its batch is in the log of the broker, in bytes.
        place: Index of the message in its batch.
        store_unix_ms: Wall clock of the storage node.
        durability: What was really reached.
        duplicate: Whether an earlier try had stored it already.
    """

    queue: QueueId
    offset: int
    position: int
    place: int
    store_unix_ms: int
    durability: Durability
    duplicate: bool

    @property
    def message_id(self) -> str:
        """Names the message in the cluster."""
        return f"{self.queue.broker}-{self.position:x}-{self.place:x}"


class Pending:
    """A message on its way; await it for the receipt."""

    __slots__ = ("_index", "_outcome")

    def __init__(self, outcome: _Outcome, index: int) -> None:
        self._outcome, self._index = outcome, index

    def __await__(self) -> Generator[object, None, Receipt]:
        return self._outcome.wait(self._index).__await__()


class _Outcome:
    """What the senders of one batch wait for: each on a future of its own, made when it waits.

    One that all share would need a shield for each of them, and every message pays for it.

    Attributes:
        wants: Ordering key and queue of the messages that have one, by index.
        moved: Where the messages are now, if the queue did not take them.
    """

    __slots__ = ("_error", "_stored", "_waiters", "bytes_count", "moved", "queue", "wants")

    def __init__(self, queue: QueueId) -> None:
        self.queue = queue
        self.bytes_count = 0
        self.wants: dict[int, tuple[str | None, QueueId | None]] = {}
        self.moved: list[Pending] = []
        self._error: BatonError | None = None
        self._stored = (0, 0, 0, Durability.MEMORY, False)
        self._waiters: list[asyncio.Future[None]] | None = []

    async def wait(self, index: int) -> Receipt:
        """The receipt of one of the messages."""
        if self._waiters is not None:
            future: asyncio.Future[None] = asyncio.Future()
            self._waiters.append(future)
            await future
        if self.moved:
            return await self.moved[index]
        if self._error is not None:
            raise self._error.with_traceback(None)
        first_offset, position, store_unix_ms, durability, duplicate = self._stored
        return Receipt(
            self.queue, first_offset + index, position, index, store_unix_ms, durability, duplicate
        )

    def settle(self, outcome: pb.AppendReceipt | BatonError) -> None:
        assert self._waiters is not None
        if isinstance(outcome, BatonError):
            self._error = outcome
        else:
            self._stored = (
                outcome.first_offset,
                outcome.position,
                outcome.store_unix_ms,
                Durability(outcome.durability),
                outcome.duplicate,
            )
        self._wake()

    def move(self, moved: list[Pending]) -> None:
        """Let those who wait go on with what each message waits for now."""
        self.moved = moved
        self._wake()

    def _wake(self) -> None:
        assert self._waiters is not None
        waiters, self._waiters = self._waiters, None
        _wake(iter(waiters))


def _wake(waiters: Iterator[asyncio.Future[None]]) -> None:
    """Wake some, and the others in the next turns of the loop.

    Who wakes sends again; so the first batch can leave while the next is being filled.
    """
    woken = list(islice(waiters, WOKEN_AT_ONCE))
    for future in woken:
        if not future.done():
            future.set_result(None)
    if woken:
        asyncio.get_running_loop().call_soon(_wake, waiters)


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
        self._topics: dict[str, _Topic] = {}
        self._senders: dict[QueueId, QueueSender[_Outcome]] = {}
        self._brokers: dict[str, _BrokerLoop] = {}
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

    async def _admitted(self, topic: str, record: bytes) -> _Topic:
        """The topic, once there is room for the record."""
        known = self._topics.get(topic) or await self._open_topic(topic)
        while len(record) > self._room < self._settings.in_flight_bytes_max:
            self._landed.clear()
            await self._landed.wait()
        return known

    def _place(
        self,
        known: _Topic,
        wanted: tuple[str | None, QueueId | None],
        message: Message,
        record: bytes,
    ) -> tuple[_Outcome, int]:
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
            outcome = _Outcome(sender.queue)
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

    async def _open_topic(self, topic: str) -> _Topic:
        route = await wait_for_route(self._directory, topic, self._settings.delivery_timeout_ms)
        known = self._topics.get(topic)
        if known is None:
            known = self._topics[topic] = _Topic(route)
            self._loops.append(self._tasks.create_task(self._follow(topic, known)))
        return known

    async def _follow(self, topic: str, known: _Topic) -> None:
        try:
            await follow_route(self._directory, topic, known.change)
        except BatonError as error:
            log.warning("topic lost topic=%s error=%s", topic, error)
            self._topics.pop(topic, None)

    def _sender(self, queue: QueueId) -> QueueSender[_Outcome]:
        sender = self._senders.get(queue)
        if sender is None:
            sender = self._senders[queue] = QueueSender(
                queue,
                self._random.getrandbits(63) or 1,
                self._settings.batch_bytes_max,
                self._settings.batch_messages_max,
            )
            if queue.broker not in self._brokers:
                loop = _BrokerLoop(self, queue.broker)
                self._brokers[queue.broker] = loop
                self._loops.append(self._tasks.create_task(loop.run()))
        return sender

    def _settle(self, batch: Batch[_Outcome], outcome: pb.AppendReceipt | BatonError) -> None:
        batch.token.settle(outcome)
        self._room += batch.token.bytes_count
        self._landed.set()

    def _takes(self, queue: QueueId) -> bool:
        """Whether the queue takes messages, as far as is known here."""
        known = self._topics.get(queue.topic)
        return known is None or queue in known.queues

    def _move(self, sender: QueueSender[_Outcome], error: BatonError) -> None:
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
        known: _Topic,
        wanted: tuple[str | None, QueueId | None],
        message: Message,
        record: bytes,
    ) -> Pending:
        try:
            return Pending(*self._place(known, wanted, message, record))
        except BatonError as error:
            refused = _Outcome(wanted[1] or QueueId("", "", 0))
            refused.settle(error)
            return Pending(refused, 0)

    def _abandon(self) -> None:
        """Tell those who still wait that nobody sends any more."""
        for sender in self._senders.values():
            for batch in sender.drop():
                self._settle(batch, Unreachable("the producer was closed"))


class _Topic:
    """The queues of a topic, and whose turn it is.

    Attributes:
        queues: Those that take messages.
        current: Sender of the queue whose turn it is, once it was looked up.
    """

    def __init__(self, route: nameserver_pb.Route) -> None:
        self._turn = 0
        self.change(route)

    def change(self, route: nameserver_pb.Route) -> None:
        self._name, self._all = route.topic.name, frozenset(queues_of(route))
        self.queues = writable_queues_of(route)
        self.current: QueueSender[_Outcome] | None = None

    def next_turn(self) -> None:
        self._turn += 1
        self.current = None

    def choose(self, ordering_key: str | None, queue: QueueId | None) -> QueueId:
        if queue is not None:
            if queue not in self._all:
                raise QueueNotFound(f"{queue} is not a queue of the topic")
            if queue not in self.queues:
                raise NotWritable(f"queue {queue} takes no messages")
            return queue
        if not self.queues:
            raise NotWritable(f"topic {self._name} takes no messages")
        if ordering_key is not None:
            return queue_of_key(self.queues, ordering_key)
        return self.queues[self._turn % len(self.queues)]


class _BrokerLoop:
    """Sends the batches that are ready for one broker, a few requests at a time."""

    def __init__(self, producer: Producer, broker: str) -> None:
        self._producer, self._settings, self._broker = producer, producer._settings, broker
        self._ready: dict[QueueSender[_Outcome], None] = {}
        self._woken, self._turn = asyncio.Event(), asyncio.Lock()

    def wake(self, sender: QueueSender[_Outcome]) -> None:
        if sender.ready and sender not in self._ready:
            self._ready[sender] = None
            self._woken.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._settings.in_flight_requests_max):
                tasks.create_task(self._work(tasks))

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        """Have one request under way at a time."""
        while True:
            async with self._turn:
                await self._woken.wait()
                if self._settings.linger_ms:
                    await asyncio.sleep(self._settings.linger_ms / 1000)
                senders = self._take()
            if senders and (failed := await self._request(senders)):
                tasks.create_task(self._back_off(*failed))

    def _take(self) -> list[QueueSender[_Outcome]]:
        unix_ms = self._producer._clock.unix_ms()
        taken: list[QueueSender[_Outcome]] = []
        bytes_count = 0
        while self._ready and bytes_count < REQUEST_BYTES_MAX and len(taken) < REQUEST_BATCHES_MAX:
            sender = next(iter(self._ready))
            del self._ready[sender]
            if not sender.ready:
                continue
            try:
                bytes_count += len(sender.take(unix_ms).encoded)
            except BatonError as error:
                self._producer._settle(sender.refused(), error)
                self.wake(sender)
            else:
                taken.append(sender)
        if not self._ready:
            self._woken.clear()
        return taken

    async def _request(
        self, senders: Sequence[QueueSender[_Outcome]]
    ) -> tuple[list[QueueSender[_Outcome]], BatonError] | None:
        """Send what `senders` have taken; those that have failed, and an error of one of them."""
        outcomes = await self._append([s.in_flight.encoded for s in senders if s.in_flight])
        failed: list[QueueSender[_Outcome]] = []
        worst: BatonError | None = None
        for sender, outcome in zip(senders, outcomes, strict=True):
            if isinstance(outcome, BatonError):
                worst = outcome
                failed.append(sender)
                self._failed(sender, outcome)
            else:
                self._producer._settle(sender.stored(), outcome)
            self.wake(sender)
        return (failed, worst) if worst else None

    async def _back_off(self, failed: list[QueueSender[_Outcome]], error: BatonError) -> None:
        failures = max(sender.failures for sender in failed)
        await self._producer._directory.pause(error, failures)
        for sender in failed:
            sender.backing_off = False
            self.wake(sender)

    async def _append(self, batches: list[bytes]) -> Sequence[pb.AppendReceipt | BatonError]:
        """One outcome per batch; if the call failed, its error for each."""
        try:
            stub = await self._producer._directory.storage(self._broker)
            answer = await stub.Append(
                pb.AppendRequest(batches=batches, durability=self._settings.durability.value),
                timeout=self._settings.request_timeout_ms / 1000,
            )
        except grpc.aio.AioRpcError as error:
            return [from_rpc_error(error)] * len(batches)
        except BatonError as error:
            return [error] * len(batches)
        return [
            error_from_pb(outcome.error) if outcome.HasField("error") else outcome.receipt
            for outcome in answer.outcomes
        ]

    def _failed(self, sender: QueueSender[_Outcome], error: BatonError) -> None:
        batch = sender.in_flight
        assert batch is not None
        no_queue = isinstance(error, NotWritable | QueueNotFound)
        batch.unsure = batch.unsure or not no_queue
        if no_queue and not self._producer._takes(sender.queue):
            self._producer._move(sender, error)
            return
        now_ms = self._producer._clock.monotonic_ms()
        late_ms = now_ms - self._settings.delivery_timeout_ms
        retry = error.retry is not Retry.NEVER
        if retry and batch.begin_ms > late_ms:
            log.debug("append is repeated queue=%s error=%s", sender.queue, error)
            sender.again()
        elif retry or isinstance(error, DuplicateSequence | Internal):
            self._producer._settle(sender.unknown(), error)
        else:
            self._producer._settle(sender.refused(), error)
        for never_sent in sender.expire(late_ms):
            self._producer._settle(never_sent, error)
