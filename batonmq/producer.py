"""Sends messages: many concurrent sends become few batches, retries never store twice."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from types import TracebackType

import grpc.aio
from baton.storage.v1 import storage_service_pb2 as pb

from batonmq.common.aio import only_error
from batonmq.common.clock import Clock
from batonmq.common.errors import (
    BatonError,
    DuplicateSequence,
    QueueNotFound,
    Retry,
    Unreachable,
)
from batonmq.common.rpc import error_from_pb, from_rpc_error
from batonmq.core.records import Message, encode_record
from batonmq.core.route import QueueId, queue_of_key
from batonmq.core.sending import Batch, QueueSender
from batonmq.directory import Directory
from batonmq.routes import follow_route, queues_of, wait_for_route

log = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 8 * 1024 * 1024


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
        delivery_timeout_ms: A batch without an outcome for so long after its first try fails.
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


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof that a message is stored.

    Attributes:
        queue: Where it is.
        offset: Its place in the queue, in messages.
        message_id: Names the message in the cluster: broker, position of its batch, index.
        store_unix_ms: Wall clock of the storage node.
        durability: What was really reached.
        duplicate: Whether an earlier try had stored it already.
    """

    queue: QueueId
    offset: int
    message_id: str
    store_unix_ms: int
    durability: Durability
    duplicate: bool


class Pending:
    """A message on its way; await it for the receipt."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: _Outcome, index: int) -> None:
        self._batch, self._index = batch, index

    def __await__(self) -> Generator[object, None, Receipt]:
        receipt = yield from asyncio.shield(self._batch.future).__await__()
        queue, index = self._batch.queue, self._index
        return Receipt(
            queue,
            receipt.first_offset + index,
            f"{queue.broker}-{receipt.position:x}-{index:x}",
            receipt.store_unix_ms,
            Durability(receipt.durability),
            receipt.duplicate,
        )


class _Outcome:
    """What the senders of one batch wait for."""

    __slots__ = ("bytes_count", "future", "queue")

    def __init__(self, queue: QueueId, future: asyncio.Future[pb.AppendReceipt]) -> None:
        self.queue, self.future = queue, future
        self.bytes_count = 0


class Producer:
    """Sends messages to topics. Use it as an async context manager; share one per process.

    Args:
        nameserver: host:port of a nameserver; several separated by commas.

    Every send is idempotent: a batch that had to be repeated is stored once, and the receipt is
    that of the first time, also when the storage node was killed in between.
    """

    def __init__(self, nameserver: str, settings: ProducerSettings | None = None) -> None:
        self._settings = settings or ProducerSettings()
        self._clock = Clock()
        self._random = Random(secrets.randbits(64))
        self._directory = Directory(nameserver, self._random)
        self._producer_id = self._random.getrandbits(63) or 1
        self._topics: dict[str, _Topic] = {}
        self._senders: dict[QueueId, QueueSender[_Outcome]] = {}
        self._brokers: dict[str, _BrokerLoop] = {}
        self._bytes = 0
        self._landed = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._loops: list[asyncio.Task[None]] = []

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
            for task in self._loops:
                task.cancel()
            try:
                await self._tasks.__aexit__(kind, error, trace)
            except BaseExceptionGroup as group:
                raise only_error(group) from None
            finally:
                self._abandon()
                await self._directory.close()

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
    ) -> Receipt:
        """Send one message and wait until it is as safe as the settings ask.

        Args:
            body: At most 4 MiB.
            tag: For filters; at most 127 bytes, no white space, no `|`.
            keys: For look-ups.
            properties: At most 32 KiB.
            ordering_key: Messages with the same key go to the same queue, in order, as long as
                the topic's queues stay the same.
            queue: Exactly this queue.

        Raises:
            TopicNotFound: there is no such topic.
            LimitExceeded: the message is too large.
            Unreachable: no outcome within the delivery timeout: the message may be stored or not.
            BatonError: as storage refused it.
        """
        message = Message(body, tag, tuple(keys), properties or {})
        return await (await self.submit(topic, message, ordering_key=ordering_key, queue=queue))

    async def submit(
        self,
        topic: str,
        message: Message,
        *,
        ordering_key: str | None = None,
        queue: QueueId | None = None,
    ) -> Pending:
        """Hand over a message; waits only while too many bytes are in flight.

        Returns:
            What to await for the receipt. Errors of the sending are raised there.

        Raises:
            TopicNotFound, LimitExceeded: as `send`.
        """
        record = encode_record(message)
        while self._bytes and self._bytes + len(record) > self._settings.in_flight_bytes_max:
            self._landed.clear()
            await self._landed.wait()
        known = self._topics.get(topic) or await self._open_topic(topic)
        sender = self._sender(known.choose(ordering_key, queue))
        batch = sender.open_batch(len(record))
        if batch is None:
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(_retrieve)
            batch = sender.begin_batch(_Outcome(sender.queue, future))
            known.next_turn()
        index = sender.add(batch, message, record)
        batch.token.bytes_count += len(record)
        self._bytes += len(record)
        self._brokers[sender.queue.broker].wake(sender)
        return Pending(batch.token, index)

    async def flush(self) -> None:
        """Wait until every message handed over has an outcome, good or bad."""
        while any(not sender.idle for sender in self._senders.values()):
            self._landed.clear()
            await self._landed.wait()

    async def _open_topic(self, topic: str) -> _Topic:
        route = await wait_for_route(self._directory, topic, self._settings.delivery_timeout_ms)
        known = self._topics.get(topic)
        if known is None:
            known = self._topics[topic] = _Topic(queues_of(route))
            self._loops.append(self._tasks.create_task(self._follow(topic, known)))
        return known

    async def _follow(self, topic: str, known: _Topic) -> None:
        try:
            await follow_route(self._directory, topic, lambda route: known.change(queues_of(route)))
        except BatonError as error:
            log.warning("topic lost topic=%s error=%s", topic, error)
            self._topics.pop(topic, None)

    def _sender(self, queue: QueueId) -> QueueSender[_Outcome]:
        sender = self._senders.get(queue)
        if sender is None:
            sender = self._senders[queue] = QueueSender(
                queue,
                self._producer_id,
                self._settings.batch_bytes_max,
                self._settings.batch_messages_max,
            )
            if queue.broker not in self._brokers:
                loop = _BrokerLoop(self, queue.broker)
                self._brokers[queue.broker] = loop
                self._loops.append(self._tasks.create_task(loop.run()))
        return sender

    def _settle(self, batch: Batch[_Outcome], outcome: pb.AppendReceipt | BatonError) -> None:
        if isinstance(outcome, BatonError):
            batch.token.future.set_exception(outcome)
        else:
            batch.token.future.set_result(outcome)
        self._bytes -= batch.token.bytes_count
        self._landed.set()

    def _abandon(self) -> None:
        """Tell those who still wait that nobody sends any more."""
        for sender in self._senders.values():
            for batch in sender.drop():
                self._settle(batch, Unreachable("the producer was closed"))


def _retrieve(future: asyncio.Future[pb.AppendReceipt]) -> None:
    """Look at the exception, so that a receipt nobody awaits is no warning."""
    if not future.cancelled():
        future.exception()


class _Topic:
    """The queues of a topic, and whose turn it is."""

    def __init__(self, queues: tuple[QueueId, ...]) -> None:
        self._queues = queues
        self._turn = 0

    def change(self, queues: tuple[QueueId, ...]) -> None:
        self._queues = queues

    def next_turn(self) -> None:
        self._turn += 1

    def choose(self, ordering_key: str | None, queue: QueueId | None) -> QueueId:
        if queue is not None:
            if queue not in self._queues:
                raise QueueNotFound(f"{queue} is not a queue of the topic")
            return queue
        if ordering_key is not None:
            return queue_of_key(self._queues, ordering_key)
        return self._queues[self._turn % len(self._queues)]


class _BrokerLoop:
    """Sends the batches that are ready for one broker, a few requests at a time."""

    def __init__(self, producer: Producer, broker: str) -> None:
        self._producer, self._settings, self._broker = producer, producer._settings, broker
        self._ready: dict[QueueSender[_Outcome], None] = {}
        self._woken = asyncio.Event()
        self._slots = asyncio.Semaphore(self._settings.in_flight_requests_max)

    def wake(self, sender: QueueSender[_Outcome]) -> None:
        if sender.ready and sender not in self._ready:
            self._ready[sender] = None
            self._woken.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as requests:
            while True:
                await self._woken.wait()
                if self._settings.linger_ms:
                    await asyncio.sleep(self._settings.linger_ms / 1000)
                await self._slots.acquire()
                senders = self._take()
                if senders:
                    requests.create_task(self._request(senders))
                else:
                    self._slots.release()

    def _take(self) -> list[QueueSender[_Outcome]]:
        unix_ms = self._producer._clock.unix_ms()
        monotonic_ms = self._producer._clock.monotonic_ms()
        taken: list[QueueSender[_Outcome]] = []
        bytes_count = 0
        while self._ready and bytes_count < REQUEST_BYTES_MAX:
            sender = next(iter(self._ready))
            del self._ready[sender]
            if not sender.ready:
                continue
            try:
                bytes_count += len(sender.take(unix_ms, monotonic_ms).encoded)
            except BatonError as error:
                self._producer._settle(sender.refused(), error)
                self.wake(sender)
            else:
                taken.append(sender)
        if not self._ready:
            self._woken.clear()
        return taken

    async def _request(self, senders: Sequence[QueueSender[_Outcome]]) -> None:
        try:
            outcomes = await self._append([s.in_flight.encoded for s in senders if s.in_flight])
        finally:
            self._slots.release()
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
        if worst is None:
            return
        failures = max(sender.failures for sender in failed)
        await self._producer._directory.pause(worst, failures)
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
        waited_ms = self._producer._clock.monotonic_ms() - batch.first_sent_ms
        retry = error.retry is not Retry.NEVER
        if retry and waited_ms < self._settings.delivery_timeout_ms:
            log.debug("append is repeated queue=%s error=%s", sender.queue, error)
            sender.again()
        elif retry or isinstance(error, DuplicateSequence):
            self._producer._settle(sender.unknown(), error)
        else:
            self._producer._settle(sender.refused(), error)
