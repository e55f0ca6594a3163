"""Sends and cancels scheduled messages of a producer.

Each message is its own batch, so that it can be cancelled alone; one request has many batches. A
batch that is retried keeps its bytes, and so its producer id and sequence. Each producer id has at
most one batch in flight, so one producer uses many ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, Protocol

import grpc.aio

from baton.storage.v1 import schedule_service_pb2 as pb
from batonmq._common.batcher import Batcher
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.directory import Directory
from batonmq._core.queue_sender import SEQUENCE_LIMIT, maybe_stored
from batonmq._core.queues import QueueRef
from batonmq._core.records import BatchBuilder, Message
from batonmq._producer.producer_settings import CompressionSettings, compressor_of
from batonmq.errors import (
    BatonError,
    DuplicateSequence,
    InvalidArgument,
    NotWritable,
    QueueNotFound,
    Retry,
    Unreachable,
)

REQUEST_ITEMS_MAX = 1_024
REQUEST_BYTES_MAX = 8 * 1024 * 1024
IN_FLIGHT_MAX = 10_000
"""Most scheduled messages without a receipt; `admit` waits at this limit."""


class ScheduleReceipt(NamedTuple):
    """Proof that a message is stored and will be delivered.

    Attributes:
        queue: The queue to which the message will be delivered.
        schedule_id: Argument of `Producer.cancel`.
        deliver_unix_ms: Time of delivery, by the wall clock of the storage node.
        duplicate: Whether an earlier attempt had stored the message already.
    """

    queue: QueueRef
    schedule_id: str
    deliver_unix_ms: int
    duplicate: bool


class PendingSchedule:
    """A scheduled message in flight; await it to get the receipt."""

    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[ScheduleReceipt]) -> None:
        self._future = future

    def __await__(self) -> Generator[object, None, ScheduleReceipt]:
        return (yield from asyncio.shield(self._future).__await__())


class ScheduledSenderSettings(CompressionSettings, Protocol):
    """The part of `ProducerSettings` that scheduled messages need."""

    @property
    def in_flight_bytes_max(self) -> int:
        """See `ProducerSettings`."""
        ...

    @property
    def delivery_timeout_ms(self) -> int:
        """See `ProducerSettings`."""
        ...

    @property
    def request_timeout_ms(self) -> int:
        """See `ProducerSettings`."""
        ...


class ScheduledSender:
    """Sends and cancels scheduled messages.

    Args:
        tasks: Runs the requests; must outlive this object.
    """

    def __init__(
        self,
        directory: Directory,
        clock: Clock,
        random: Random,
        tasks: asyncio.TaskGroup,
        settings: ScheduledSenderSettings,
    ) -> None:
        self._directory, self._clock, self._random = directory, clock, random
        self._group, self._settings, self._packing = tasks, settings, compressor_of(settings)
        self._batchers: dict[str, Batcher[pb.ScheduleItem, _Outcome]] = {}
        self._lanes: dict[QueueRef, list[_Lane]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._pending: set[asyncio.Future[ScheduleReceipt]] = set()
        self._bytes = 0
        self._settled = asyncio.Event()

    async def admit(self, record: bytes) -> None:
        """Wait until the record fits the limits of messages and bytes in flight."""
        bytes_max = self._settings.in_flight_bytes_max
        while self._pending and (
            self._bytes + len(record) > bytes_max or len(self._pending) >= IN_FLIGHT_MAX
        ):
            self._settled.clear()
            await self._settled.wait()

    def submit(
        self,
        message: Message,
        record: bytes,
        deliver_unix_ms: int,
        choose: Callable[[], QueueRef],
    ) -> PendingSchedule:
        """Start to send a message.

        Args:
            record: The message, encoded.
            choose: Returns the queue; called again if that queue is no longer writable.

        Raises:
            QueueNotFound, NotWritable: no queue can be chosen.
        """
        builder = BatchBuilder(self._packing)
        builder.add(message, record)
        sending = _ScheduledMessage(
            builder, len(record), deliver_unix_ms, choose, self._clock.monotonic_ms()
        )
        queue = choose()
        future: asyncio.Future[ScheduleReceipt] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self._pending.add(future)
        self._bytes += len(record)
        self._run(self._settle(sending, queue, future))
        return PendingSchedule(future)

    async def flush(self) -> None:
        """Wait until every submitted message is stored or has failed."""
        while self._pending:
            self._settled.clear()
            await self._settled.wait()

    async def cancel(self, schedule_id: str) -> None:
        """See `Producer.cancel`."""
        broker = schedule_id.rpartition("-")[0]
        if not broker:
            raise InvalidArgument(
                f"{schedule_id[:100]!r} is not a schedule id",
                remedy="Use the schedule_id of the receipt unchanged.",
                facts={"field": "schedule_id"},
            )
        request = pb.CancelScheduledRequest(schedule_id=schedule_id)
        late_ms = self._clock.monotonic_ms() + self._settings.delivery_timeout_ms
        failures = 0
        while True:
            try:
                stub = await self._directory.schedule(broker)
                await stub.CancelScheduled(request, timeout=self._timeout_s)
            except (grpc.aio.AioRpcError, BatonError) as failure:
                error = failure if isinstance(failure, BatonError) else from_rpc_error(failure)
                if error.retry is Retry.NEVER or self._clock.monotonic_ms() >= late_ms:
                    raise error from failure
                await self._directory.pause(error, failures)
                failures += 1
            else:
                return

    def close(self) -> None:
        """Cancel all requests and fail the messages without a receipt."""
        for task in list(self._running):
            task.cancel()
        for future in list(self._pending):
            if not future.done():
                future.set_exception(Unreachable("the producer was closed"))
        self._pending.clear()

    @property
    def _timeout_s(self) -> float:
        return self._settings.request_timeout_ms / 1000

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _settle(
        self, sending: _ScheduledMessage, queue: QueueRef, future: asyncio.Future[ScheduleReceipt]
    ) -> None:
        try:
            receipt = await self._send(sending, queue)
        except BatonError as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(receipt)
        finally:
            self._bytes -= sending.bytes_count
            self._pending.discard(future)
            self._settled.set()

    async def _send(self, sending: _ScheduledMessage, queue: QueueRef) -> ScheduleReceipt:
        """Return the receipt; try another queue if the queue is not writable."""
        while True:
            lanes = self._lanes.setdefault(queue, [])
            lane = lanes.pop() if lanes else _Lane(self._random.getrandbits(63) or 1)
            item = sending.item(queue, lane, self._clock.unix_ms())
            unsure = True  # if this is cancelled while it waits, the batch may be stored
            try:
                receipt = await self._repeat(sending, queue, item)
            except _Rejected as refused:
                unsure = refused.unsure
                if unsure or not isinstance(refused.error, QueueNotFound | NotWritable):
                    raise refused.error from None
                before, queue = queue, sending.choose()
                if queue == before:
                    raise refused.error from None
            else:
                unsure = False
                lane.stored()
                return ScheduleReceipt(
                    queue, receipt.schedule_id, receipt.deliver_unix_ms, receipt.duplicate
                )
            finally:
                if unsure:
                    lane.skip_sequence()
                lanes.append(lane)

    async def _repeat(
        self, sending: _ScheduledMessage, queue: QueueRef, item: pb.ScheduleItem
    ) -> pb.ScheduleReceipt:
        """Send the same bytes until there is a receipt, and return it.

        Raises:
            _Rejected: The batch is not stored, or it is unknown whether it is.
        """
        late_ms = sending.begin_ms + self._settings.delivery_timeout_ms
        unsure, failures = False, 0
        while True:
            outcome = await self._batcher(queue.broker).call(item)
            if isinstance(outcome, pb.ScheduleReceipt):
                return outcome
            doubt = unsure and not isinstance(outcome, DuplicateSequence)
            unsure = unsure or outcome.kind in ("UNAVAILABLE", "INTERNAL")
            moved = isinstance(outcome, NotWritable) and not unsure
            over = self._clock.monotonic_ms() >= late_ms
            if over or moved or outcome.retry is Retry.NEVER:
                raise _Rejected(maybe_stored(outcome) if doubt else outcome, unsure)
            await self._directory.pause(outcome, failures)
            failures += 1

    def _batcher(self, broker: str) -> Batcher[pb.ScheduleItem, _Outcome]:
        batcher = self._batchers.get(broker)
        if batcher is None:

            async def request(items: Sequence[pb.ScheduleItem]) -> Sequence[_Outcome]:
                return [
                    outcome
                    for part in parts(items)
                    for outcome in await self._request(broker, part)
                ]

            batcher = self._batchers[broker] = Batcher(request, items_max=REQUEST_ITEMS_MAX)
            self._run(batcher.run())
        return batcher

    async def _request(self, broker: str, items: Sequence[pb.ScheduleItem]) -> list[_Outcome]:
        """Return one outcome per item; if the call failed, its error for each item."""
        try:
            stub = await self._directory.schedule(broker)
            answer = await stub.Schedule(pb.ScheduleRequest(items=items), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            return [from_rpc_error(error)] * len(items)
        except BatonError as error:
            return [error] * len(items)
        return [
            error_from_pb(one.error) if one.HasField("error") else one.receipt
            for one in answer.outcomes
        ]


_Outcome = pb.ScheduleReceipt | BatonError


class _Rejected(Exception):
    """A batch has no receipt; `unsure` if it may be stored."""

    def __init__(self, error: BatonError, unsure: bool) -> None:
        self.error, self.unsure = error, unsure


@dataclass(slots=True)
class _Lane:
    """A producer id on one queue, with at most one batch in flight."""

    producer_id: int
    epoch: int = 0
    sequence: int = 0

    def stored(self) -> None:
        self.sequence = (self.sequence + 1) % SEQUENCE_LIMIT

    def skip_sequence(self) -> None:
        """Start a new epoch, because the last batch may be stored with the current sequence."""
        self.epoch += 1
        self.sequence = 0


@dataclass(frozen=True, slots=True)
class _ScheduledMessage:
    builder: BatchBuilder
    bytes_count: int
    deliver_unix_ms: int
    choose: Callable[[], QueueRef]
    begin_ms: int

    def item(self, queue: QueueRef, lane: _Lane, born_unix_ms: int) -> pb.ScheduleItem:
        batch = self.builder.encode(
            topic=queue.topic,
            queue_id=queue.queue_id,
            producer=(lane.producer_id, lane.epoch),
            sequence=lane.sequence,
            born_unix_ms=born_unix_ms,
        )
        return pb.ScheduleItem(batch=batch, deliver_unix_ms=self.deliver_unix_ms)


def parts(items: Sequence[pb.ScheduleItem]) -> Iterator[Sequence[pb.ScheduleItem]]:
    """Split `items` into parts that fit `REQUEST_BYTES_MAX`; a part has at least one item."""
    begin, size = 0, 0
    for index, item in enumerate(items):
        size += len(item.batch)
        if size > REQUEST_BYTES_MAX and index > begin:
            yield items[begin:index]
            begin, size = index, len(item.batch)
    yield items[begin:]


def _retrieve(future: asyncio.Future[ScheduleReceipt]) -> None:
    """Retrieve the exception, so that asyncio logs no warning for a receipt without a waiter."""
    if not future.cancelled():
        future.exception()
