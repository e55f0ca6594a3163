"""Sends and cancels scheduled messages of a producer.

Each message is its own batch, so that it can be cancelled alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from random import Random
from typing import Any, NamedTuple, Protocol

import grpc.aio

from baton.storage.v1 import schedule_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.directory import Directory
from batonmq._core.delays import DelayLeft
from batonmq._core.queues import QueueRef
from batonmq._core.records import BatchBuilder, Message
from batonmq._producer.item_sender import ItemSender, OutgoingMessage
from batonmq._producer.producer_settings import CompressionSettings, compressor_of
from batonmq.errors import BatonError, InvalidArgument, Retry, Unreachable

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

    @property
    def settled(self) -> bool:
        """Whether the message has its outcome."""
        return self._future.done()

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
        self._directory, self._clock = directory, clock
        self._group, self._settings, self._packing = tasks, settings, compressor_of(settings)
        self._items: ItemSender[pb.ScheduleItem, pb.ScheduleReceipt] = ItemSender(
            directory,
            clock,
            random,
            self._run,
            self._request,
        )
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
        delay: DelayLeft | None,
        choose: Callable[[], QueueRef],
    ) -> PendingSchedule:
        """Start to send a message.

        Args:
            record: The message, encoded.
            deliver_unix_ms: Time of delivery; with a delay, that by the clock of this machine.
            delay: Delay of the delivery; None if the time was given.
            choose: Returns the queue; called again if that queue is no longer writable.

        Raises:
            QueueNotFound, NotWritable: no queue can be chosen.
        """
        builder = BatchBuilder(self._packing)
        builder.add(message, record)
        sending = OutgoingMessage(
            builder,
            len(record),
            choose,
            self._clock.monotonic_ms() + self._settings.delivery_timeout_ms,
            lambda batch: pb.ScheduleItem(
                batch=batch,
                deliver_unix_ms=deliver_unix_ms,
                delay_ms=None if delay is None else delay.at(self._clock.monotonic_ms()),
            ),
        )
        queue = choose()
        future: asyncio.Future[ScheduleReceipt] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self._pending.add(future)
        self._bytes += len(record)
        self._run(self._settle(sending, queue, future))
        return PendingSchedule(future)

    def forget_topic(self, name: str) -> None:
        """See `ItemSender`."""
        self._items.forget_topic(name)

    async def flush(self) -> None:
        """Wait until every message that is in flight now is stored or has failed."""
        if self._pending:
            await asyncio.wait(self._pending)

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
        self,
        sending: OutgoingMessage[pb.ScheduleItem],
        queue: QueueRef,
        future: asyncio.Future[ScheduleReceipt],
    ) -> None:
        try:
            queue, receipt = await self._items.send(sending, queue)
        except BatonError as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(
                    ScheduleReceipt(
                        queue, receipt.schedule_id, receipt.deliver_unix_ms, receipt.duplicate
                    )
                )
        finally:
            self._bytes -= sending.bytes_count
            self._pending.discard(future)
            self._settled.set()

    async def _request(self, broker: str, items: Sequence[pb.ScheduleItem]) -> list[_Outcome]:
        return await schedule_items(self._directory, broker, items, self._timeout_s)


async def schedule_items(
    directory: Directory, broker: str, items: Sequence[pb.ScheduleItem], timeout_s: float
) -> list[_Outcome]:
    """Return one outcome per item; if the call failed, its error for each item."""
    try:
        stub = await directory.schedule(broker)
        answer = await stub.Schedule(pb.ScheduleRequest(items=items), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return [from_rpc_error(error)] * len(items)
    except BatonError as error:
        return [error] * len(items)
    return [
        error_from_pb(one.error) if one.HasField("error") else one.receipt
        for one in answer.outcomes
    ]


_Outcome = pb.ScheduleReceipt | BatonError


def _retrieve(future: asyncio.Future[ScheduleReceipt]) -> None:
    """Retrieve the exception, so that asyncio logs no warning for a receipt without a waiter."""
    if not future.cancelled():
        future.exception()
