"""Stores messages for programs that may repeat a send, at this process or at another one.

Each message is a batch of its own, under a producer id that its repetitions share. Its queue
follows from the id, or from the ordering key. So storage recognises a repetition, whichever process
sends it, and answers with the receipt of the first attempt. That holds as long as storage remembers
the id, the topic has the same queues, and the broker of the queue is listed: messages without an
ordering key of a broker that is not listed go to the queues of the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import grpc.aio

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import transaction_service_pb2 as transaction_pb
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.directory import ClientEnvironment, Directory
from batonmq._connection.routes import follow_route, wait_for_route, writable_queues_of
from batonmq._core.keyed_queues import KeyedQueues
from batonmq._core.ordering_key import with_ordering_key
from batonmq._core.queues import QueueRef
from batonmq._core.records import BatchBuilder, Message, encode_record
from batonmq._producer.item_sender import BatchItem, ItemSender, OutgoingMessage
from batonmq._producer.producer_settings import ProducerSettings, compressor_of
from batonmq._producer.scheduled_sender import schedule_items
from batonmq._producer.transaction_sender import begin_items
from batonmq.errors import BatonError, NotWritable, Unreachable

log = logging.getLogger(__name__)

IN_FLIGHT_MAX = 10_000
"""Messages without a receipt, at most; more wait."""
BROKERS_INTERVAL_MS = 1_000
"""While a broker fails, the listed brokers are looked up at most so often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnceMessage:
    """A message and its identity.

    Attributes:
        once: Producer id of this message alone: 63 bits, not 0, equal for all repetitions.
        ordering_key: None for none.
        deliver_unix_ms: Delivery time; None for now.
        transaction_group: Producer group of the transaction that it begins; empty for none.
    """

    topic: str
    message: Message
    once: int
    ordering_key: str | None = None
    deliver_unix_ms: int | None = None
    transaction_group: str = ""


class StoredOnce(NamedTuple):
    """Proof that a message is stored.

    Attributes:
        offset: Its offset; -1 if it has none yet.
        message_id: Its id; empty if it is in no queue yet.
        schedule_id: Of a message for later; empty otherwise.
        transaction_id: Of a message that begins a transaction; empty otherwise.
        duplicate: Whether an earlier attempt had stored it.
    """

    queue: QueueRef
    offset: int = -1
    schedule_id: str = ""
    deliver_unix_ms: int = 0
    transaction_id: str = ""
    duplicate: bool = False
    message_id: str = ""


class _AppendItem(NamedTuple):
    batch: bytes


class _TopicQueues:
    """The queues of one topic that take messages."""

    def __init__(self, route: nameserver_pb.Route) -> None:
        self.change(route)

    def change(self, route: nameserver_pb.Route) -> None:
        self.name = route.topic.name
        self.queues = writable_queues_of(route)
        self._keyed = KeyedQueues(self.queues)

    def choose(self, sending: OnceMessage, unlisted: frozenset[str]) -> QueueRef:
        """Return the queue of a message.

        Args:
            unlisted: Brokers that get no messages that may go elsewhere.

        Raises:
            NotWritable: The topic accepts no messages.
        """
        if not self.queues:
            raise NotWritable(f"topic {self.name} has no writable queue")
        if sending.ordering_key is not None:
            return self._keyed.of(sending.ordering_key)
        first = self.queues[sending.once % len(self.queues)]
        if first.broker not in unlisted:
            return first
        others = [queue for queue in self.queues if queue.broker not in unlisted]
        return others[sending.once % len(others)] if others else first


class OnceSender:
    """Stores messages under ids that their callers give.

    Args:
        spawn: Starts a task that lives as long as the process, at most.
    """

    def __init__(
        self,
        directory: Directory,
        environment: ClientEnvironment,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        settings: ProducerSettings | None = None,
    ) -> None:
        self._directory, self._clock, self._spawn = directory, environment.clock, spawn
        self._settings = settings or ProducerSettings()
        self._packing = compressor_of(self._settings)
        self._topics: dict[str, _TopicQueues] = {}
        self._unlisted: frozenset[str] = frozenset()
        self._doubt, self._lookup_ms = False, 0
        self._free_bytes = self._settings.in_flight_bytes_max
        self._count = 0
        self._freed = asyncio.Event()
        parts = directory, environment.clock, environment.random, spawn
        timeout_s = self._settings.request_timeout_ms / 1_000
        self._appends: ItemSender[_AppendItem, pb.AppendReceipt] = ItemSender(*parts, self._append)
        self._schedules: ItemSender[schedule_pb.ScheduleItem, schedule_pb.ScheduleReceipt] = (
            ItemSender(*parts, partial(schedule_items, directory, timeout_s=timeout_s))
        )
        self._begins: ItemSender[transaction_pb.BeginItem, transaction_pb.BeginReceipt] = (
            ItemSender(*parts, partial(begin_items, directory, timeout_s=timeout_s))
        )

    async def send(self, sending: OnceMessage, timeout_ms: int) -> StoredOnce:
        """Store a message, unless an earlier attempt has; return the first receipt.

        If the call is cancelled, the attempt that is in flight continues.

        Args:
            timeout_ms: No attempt begins later than this.

        Raises:
            TopicNotFound, LimitExceeded, BadBatch, NotWritable: It is not stored.
            BatonError: It is not stored, or it is unknown whether it is.
        """
        late_ms = self._clock.monotonic_ms() + timeout_ms
        record = encode_record(with_ordering_key(sending.message, sending.ordering_key))
        known = self._topics.get(sending.topic) or await self._open(sending.topic, timeout_ms)
        if self._doubt:
            await self._look_up_brokers()
        while self._count and (self._free_bytes < len(record) or self._count >= IN_FLIGHT_MAX):
            self._freed.clear()
            await self._freed.wait()
        outcome: asyncio.Future[StoredOnce] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(_retrieve)
        self._free_bytes -= len(record)
        self._count += 1
        try:
            self._spawn(self._settle(known, sending, record, late_ms, outcome))
        except BatonError:
            self._free(len(record))
            raise
        return await asyncio.shield(outcome)

    async def _settle(
        self,
        known: _TopicQueues,
        sending: OnceMessage,
        record: bytes,
        late_ms: int,
        outcome: asyncio.Future[StoredOnce],
    ) -> None:
        try:
            stored = await self._store(known, sending, record, late_ms)
        except BatonError as error:
            self._doubt = self._doubt or isinstance(error, Unreachable)
            outcome.set_exception(error)
        except asyncio.CancelledError:
            outcome.set_exception(Unreachable("the process stops; the message may be stored"))
            raise
        else:
            outcome.set_result(stored)
        finally:
            self._free(len(record))

    async def _store(
        self, known: _TopicQueues, sending: OnceMessage, record: bytes, late_ms: int
    ) -> StoredOnce:
        builder = BatchBuilder(self._packing)
        builder.add(with_ordering_key(sending.message, sending.ordering_key), record)

        def choose() -> QueueRef:
            return known.choose(sending, self._unlisted)

        def of(item: Callable[[bytes], BatchItem]) -> OutgoingMessage[Any]:
            return OutgoingMessage(builder, len(record), choose, late_ms, item, sending.once)

        if sending.transaction_group:
            queue, begun = await self._begins.send(
                of(
                    lambda batch: transaction_pb.BeginItem(
                        batch=batch, group=sending.transaction_group
                    )
                ),
                choose(),
            )
            return StoredOnce(queue, transaction_id=begun.transaction_id, duplicate=begun.duplicate)
        if (at_ms := sending.deliver_unix_ms) is not None:
            queue, later = await self._schedules.send(
                of(lambda batch: schedule_pb.ScheduleItem(batch=batch, deliver_unix_ms=at_ms)),
                choose(),
            )
            return StoredOnce(
                queue,
                schedule_id=later.schedule_id,
                deliver_unix_ms=later.deliver_unix_ms,
                duplicate=later.duplicate,
            )
        queue, receipt = await self._appends.send(of(_AppendItem), choose())
        return StoredOnce(
            queue,
            receipt.first_offset,
            duplicate=receipt.duplicate,
            message_id=f"{queue.broker}-{receipt.position:x}-0",
        )

    def _free(self, size: int) -> None:
        self._free_bytes += size
        self._count -= 1
        self._freed.set()

    async def _append(
        self, broker: str, items: Sequence[_AppendItem]
    ) -> Sequence[pb.AppendReceipt | BatonError]:
        """Return one outcome per item; if the call failed, its error for each item."""
        timeout_s = self._settings.request_timeout_ms / 1_000
        request = pb.AppendRequest(
            batches=[item.batch for item in items], durability=self._settings.durability.value
        )
        try:
            stub = await self._directory.connected_storage(broker, timeout_s)
            answer = await stub.Append(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return [from_rpc_error(error)] * len(items)
        except BatonError as error:
            return [error] * len(items)
        return [
            error_from_pb(one.error) if one.HasField("error") else one.receipt
            for one in answer.outcomes
        ]

    async def _open(self, topic: str, timeout_ms: int) -> _TopicQueues:
        route = await wait_for_route(self._directory, topic, timeout_ms)
        known = self._topics.get(topic)
        if known is None:
            known = self._topics[topic] = _TopicQueues(route)
            try:
                self._spawn(self._follow(topic, known))
            except BatonError:
                del self._topics[topic]
                raise
        return known

    async def _follow(self, topic: str, known: _TopicQueues) -> None:
        try:
            await follow_route(self._directory, topic, known.change)
        except BatonError as error:
            log.info("topic is no longer available topic=%s error=%s", topic, error)
            self._topics.pop(topic, None)

    async def _look_up_brokers(self) -> None:
        """Look up which brokers are listed, until all brokers of the topics are."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._lookup_ms:
            return
        self._lookup_ms = now_ms + BROKERS_INTERVAL_MS
        try:
            listed = await self._directory.brokers()
        except BatonError as error:
            log.debug("brokers not looked up error=%s", error)
            return
        used = {queue.broker for known in self._topics.values() for queue in known.queues}
        self._unlisted = frozenset(used - listed)
        self._doubt = bool(self._unlisted)


def _retrieve(outcome: asyncio.Future[StoredOnce]) -> None:
    """Retrieve the exception, so that asyncio logs no warning for a caller that has gone."""
    if not outcome.cancelled():
        outcome.exception()
