"""Makes a span of OpenTelemetry for each send, and puts its context into the message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from batonmq._core.records import Message
from batonmq._producer.receipts import PendingReceipt, Receipt
from batonmq._producer.scheduled_sender import PendingSchedule, ScheduleReceipt

if TYPE_CHECKING:
    from batonmq._telemetry.open_telemetry import OpenTelemetry, SendSpan

Pending = TypeVar("Pending", PendingReceipt, PendingSchedule, PendingReceipt | PendingSchedule)
Sent = TypeVar("Sent")


class TracedSends:
    """The spans of a producer's sends.

    Args:
        start: Runs a coroutine until the producer is closed.
    """

    def __init__(
        self,
        telemetry: OpenTelemetry,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._telemetry, self._start = telemetry, start

    async def submit(
        self, topic: str, message: Message, submit: Callable[[Message], Awaitable[Pending]]
    ) -> Pending:
        """Start to send a message; its span ends when the message has an outcome."""
        span = self._telemetry._start_send(topic)
        message = span.carry(message)
        try:
            pending = await submit(message)
        except BaseException as error:
            span.end(error)
            raise
        self._start(_end_later(span, pending))
        return pending

    async def send(
        self, topic: str, message: Message, submit: Callable[[Message], Awaitable[Pending]]
    ) -> Receipt | ScheduleReceipt:
        """Send a message; its span ends when the message has an outcome."""
        span = self._telemetry._start_send(topic)
        message = span.carry(message)
        error: BaseException | None = None
        try:
            receipt: Receipt | ScheduleReceipt = await (await submit(message))
            _note(span, receipt)
        except BaseException as failure:
            error = failure
            raise
        finally:
            span.end(error)
        return receipt

    async def begin(
        self, topic: str, message: Message, begin: Callable[[Message], Awaitable[Sent]]
    ) -> Sent:
        """Store a half message; its span ends when `begin` returns."""
        span = self._telemetry._start_send(topic)
        message = span.carry(message)
        try:
            sent = await begin(message)
        except BaseException as error:
            span.end(error)
            raise
        span.end()
        return sent

    async def send_many(
        self, topic: str, count: int, send: Callable[[dict[str, str]], Awaitable[Sent]]
    ) -> Sent:
        """Send messages that all carry the context of one span; `send` takes its properties."""
        span = self._telemetry._start_send(topic, count)
        properties = span.context_of({})
        try:
            sent = await send(properties)
        except BaseException as error:
            span.end(error)
            raise
        span.end()
        return sent


async def _end_later(span: SendSpan, pending: PendingReceipt | PendingSchedule) -> None:
    error: BaseException | None = None
    try:
        try:
            receipt: Receipt | ScheduleReceipt = await pending
        except asyncio.CancelledError:  # the producer's block ends
            if not pending.settled:
                raise
            receipt = await pending  # does not wait
        _note(span, receipt)
    except BaseException as failure:
        error = failure
        if not isinstance(failure, Exception):
            raise
    finally:
        span.end(error)


def _note(span: SendSpan, receipt: Receipt | ScheduleReceipt) -> None:
    if isinstance(receipt, Receipt):
        span.stored(receipt.queue, receipt.message_id)
