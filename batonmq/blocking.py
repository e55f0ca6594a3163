"""Producer and consumer for code without asyncio: the same ones, in an event loop of their own.

Each object runs one event loop in one thread. Calls from any thread are handed over to it and
waited for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from batonmq.common.errors import Unreachable
from batonmq.consumer import Consumer
from batonmq.consuming.message import ReceivedMessage
from batonmq.consuming.session import ConsumerSettings
from batonmq.core.route import QueueId
from batonmq.producer import Producer
from batonmq.producing.receipts import Receipt
from batonmq.producing.settings import ProducerSettings
from batonmq.scheduling import ScheduleReceipt

T = TypeVar("T")


class _LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()), name="batonmq", daemon=True
        )

    def start(self) -> None:
        self._thread.start()
        self._started.wait()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, done in the loop."""
        if self._loop is None or self._loop.is_closed():
            work.close()
            raise Unreachable("it is not open")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started.set()
        await self._stop.wait()


class _Life:
    """Enters and leaves an async context manager in one task of the loop, as it has to be."""

    def __init__(self, thread: _LoopThread, context: Producer | Consumer) -> None:
        self._thread, self._context = thread, context
        self._entered: asyncio.Future[None] | None = None
        self._leave: asyncio.Event | None = None
        self._left: Any = None

    def open(self) -> None:
        self._thread.start()
        try:
            self._thread.call(self._open())
        except BaseException:
            self._thread.stop()
            raise

    def close(self) -> None:
        try:
            self._thread.call(self._close())
        finally:
            self._thread.stop()

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self._entered, self._leave = loop.create_future(), asyncio.Event()
        self._left = asyncio.run_coroutine_threadsafe(self._live(), loop)
        await self._entered

    async def _close(self) -> None:
        assert self._leave is not None
        self._leave.set()
        await asyncio.wrap_future(self._left)

    async def _live(self) -> None:
        assert self._entered is not None
        assert self._leave is not None
        try:
            async with self._context:
                self._entered.set_result(None)
                await self._leave.wait()
        except BaseException as error:
            if self._entered.done():
                raise
            self._entered.set_exception(error)


class BlockingProducer:
    """See `Producer`; a context manager whose calls block. Safe to share between threads."""

    def __init__(self, nameserver: str, settings: ProducerSettings | None = None) -> None:
        self._thread = _LoopThread()
        self._make: Callable[[], Producer] = lambda: Producer(nameserver, settings)

    def __enter__(self) -> Self:
        self._producer = self._make()
        self._life = _Life(self._thread, self._producer)
        self._life.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._life.close()

    @overload
    def send(
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
    def send(
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

    def send(self, topic: str, body: bytes, **options: Any) -> Receipt | ScheduleReceipt:
        """See `Producer.send`."""
        receipt: Receipt | ScheduleReceipt = self._thread.call(
            self._producer.send(topic, body, **options)
        )
        return receipt

    def cancel(self, schedule_id: str) -> None:
        """See `Producer.cancel`."""
        self._thread.call(self._producer.cancel(schedule_id))

    def flush(self) -> None:
        """See `Producer.flush`."""
        self._thread.call(self._producer.flush())


class BlockingConsumer:
    """See `Consumer`; a context manager to iterate over from one thread."""

    def __init__(
        self,
        nameserver: str,
        group: str,
        subscriptions: Mapping[str, str],
        settings: ConsumerSettings | None = None,
        *,
        client_id: str = "",
    ) -> None:
        self._thread = _LoopThread()
        self._consumer = Consumer(nameserver, group, subscriptions, settings, client_id=client_id)

    def __enter__(self) -> Self:
        self._life = _Life(self._thread, self._consumer)
        self._life.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._life.close()

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Messages, each acknowledged when the next one is asked for."""
        while True:
            message = self._thread.call(self._next())
            if message is None:
                return
            yield message

    def stop(self) -> None:
        """End the iteration; from any thread."""

        async def stop() -> None:
            self._consumer.stop()

        self._thread.call(stop())

    async def _next(self) -> ReceivedMessage | None:
        try:
            return await anext(self._consumer)
        except StopAsyncIteration:
            return None
