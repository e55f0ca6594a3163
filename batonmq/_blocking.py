"""Clients for programs without asyncio: each wraps a client of the same name.

Each object runs the wrapped client in an event loop in a thread of its own. A call in any thread
runs there, and the caller waits for its result. An error that leaves the `with` block also leaves
the block of the wrapped client, which then closes as it does in asyncio.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from batonmq._common.stop_signals import STOP_SIGNALS
from batonmq._common.threads import run_in_thread
from batonmq._connection.forked_process import ForkedProcess, ProcessGuard
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.handler_adapters import BatchHandler, Handler
from batonmq._consumer.membership import SubscriptionVerdict
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.puller import Puller, PullerSettings, SeekTarget
from batonmq._consumer.transform_adapter import TransformHandler
from batonmq._core.flow_control import FlowReason
from batonmq._core.queues import QueueRef
from batonmq._core.requests import Reply
from batonmq._core.transactions import CommitReceipt, PendingTransaction, TransactionState
from batonmq._producer.message_columns import Bodies, Keys
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.receipts import Receipt, ReceiptRange
from batonmq._producer.scheduled_sender import ScheduleReceipt
from batonmq._producer.transaction import Transaction
from batonmq._telemetry.client_metrics import ClientMetrics
from batonmq.errors import InvalidArgument, Unreachable

if TYPE_CHECKING:
    from batonmq._telemetry.open_telemetry import OpenTelemetry

T = TypeVar("T")


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._takes_calls, self._lock = False, threading.Lock()
        self._process = ProcessGuard()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()), name="batonmq", daemon=True
        )

    def start(self) -> None:
        """Start the loop.

        Raises:
            InvalidArgument: It was started before.
        """
        self._process.check()
        if self._thread.ident is not None:
            raise InvalidArgument(
                "the client was used in a block before",
                remedy="Make another client for each `with` block.",
            )
        self._thread.start()
        self._started.wait()

    @property
    def open(self) -> bool:
        """Whether the loop takes calls."""
        return self._takes_calls

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop and return its result.

        If the caller is interrupted, as by Ctrl-C, `work` is cancelled.

        Raises:
            Unreachable: the loop does not run, or ends before there is a result.
            InvalidArgument: the caller runs in the loop, which would wait for itself.
            ForkedProcess: the loop runs in the process that this one was forked from.
        """
        try:
            self._process.check()
        except ForkedProcess:
            work.close()
            raise
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidArgument(
                "a call that waits is not possible in the client's own thread",
                remedy="Call it in another thread, as in a plain handler without inline=True.",
            )
        future: Future[T] | None = None
        try:
            with self._lock:  # a call that the loop gets when it has ended would wait for ever
                if self._loop is None or not self._takes_calls:
                    work.close()
                    raise Unreachable(
                        "the client is not open", remedy="Use the client inside of its with block."
                    )
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
            return future.result()
        except CancelledError:
            raise Unreachable(
                "the client was closed during the call",
                remedy="Let calls in other threads end before you leave the with block.",
            ) from None
        except BaseException:
            if future is not None:
                future.cancel()  # the caller was interrupted: a poll must take no messages for it
            raise

    def do(self, work: Callable[[], T]) -> T:
        """Call `work`, which does not wait for anything, in the loop and return its result.

        Raises:
            Unreachable: the loop does not run.
        """
        if threading.current_thread() is self._thread:
            return work()
        return self.call(_done(work))

    def notify(self, call: Callable[[], object]) -> None:
        """Call a function in the loop soon, if the loop runs; does not wait."""
        with suppress(RuntimeError):  # the loop has just been closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call)

    def stop(self) -> None:
        self._process.check()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._takes_calls = asyncio.get_running_loop(), True
        self._started.set()
        await self._stop.wait()
        with self._lock:
            self._takes_calls = False


class _ClientContext:
    """Enters and leaves the block of a client in one task of the loop.

    The client's TaskGroup requires that one task does both.
    """

    def __init__(self, thread: _LoopThread, context: AbstractAsyncContextManager[Any]) -> None:
        self._thread, self._context = thread, context
        self._entered: asyncio.Future[None] | None = None
        self._leave: asyncio.Future[BaseException | None] | None = None
        self._left: Any = None

    def open(self) -> None:
        self._thread.start()
        try:
            self._thread.call(self._open())
        except BaseException:
            self._thread.stop()
            raise

    def close(self, error: BaseException | None) -> None:
        """Leave the block, by `error` if it is not None; the caller raises the error itself."""
        try:
            self._thread.call(self._close(error))
        finally:
            self._thread.stop()

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self._entered, self._leave = loop.create_future(), loop.create_future()
        self._left = asyncio.run_coroutine_threadsafe(self._live(), loop)
        await self._entered

    async def _close(self, error: BaseException | None) -> None:
        assert self._leave is not None
        if not self._leave.done():  # the block may have ended already, by an error of the client
            self._leave.set_result(error)
        await asyncio.wrap_future(self._left)

    async def _live(self) -> None:
        assert self._entered is not None
        assert self._leave is not None
        failure: BaseException | None = None
        trace: TracebackType | None = None
        try:
            async with self._context:
                self._entered.set_result(None)
                failure = await self._leave
                if failure is not None:
                    trace = failure.__traceback__
                    raise failure
        except BaseException as error:
            if error is failure:
                error.with_traceback(trace)
            elif self._entered.done():
                raise
            else:
                self._entered.set_exception(error)


class BlockingTransaction:
    """A `Transaction` with blocking calls."""

    def __init__(self, thread: _LoopThread, transaction: Transaction) -> None:
        self._thread, self._transaction = thread, transaction

    @property
    def transaction_id(self) -> str:
        """See `Transaction`."""
        return self._transaction.transaction_id

    @property
    def receipt(self) -> CommitReceipt | None:
        """See `Transaction`."""
        return self._transaction.receipt

    def commit(self) -> CommitReceipt:
        """See `Transaction.commit`."""
        return self._thread.call(self._transaction.commit())

    def rollback(self) -> None:
        """See `Transaction.rollback`."""
        self._thread.call(self._transaction.rollback())

    def leave_open(self) -> None:
        """See `Transaction.leave_open`."""
        self._transaction.leave_open()


class _BlockingTransactionBlock:
    """A `with` block that ends a transaction; see `Producer.transaction`."""

    def __init__(
        self, thread: _LoopThread, block: AbstractAsyncContextManager[Transaction]
    ) -> None:
        self._thread, self._block = thread, block

    def __enter__(self) -> BlockingTransaction:
        return BlockingTransaction(self._thread, self._thread.call(self._block.__aenter__()))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.call(self._block.__aexit__(kind, error, trace))


def _in_a_thread(
    checker: Callable[[PendingTransaction], TransactionState],
) -> Callable[[PendingTransaction], Coroutine[Any, Any, TransactionState]]:
    """Return the checker as a coroutine function that calls it in a thread."""

    async def check(transaction: PendingTransaction) -> TransactionState:
        return await run_in_thread(checker, transaction)

    return check


class BlockingProducer:
    """A `Producer` with blocking calls. Use it as a context manager; threads may share it."""

    def __init__(
        self,
        nameserver: str,
        settings: ProducerSettings | None = None,
        *,
        group: str = "",
        transaction_checker: Callable[[PendingTransaction], TransactionState] | None = None,
        telemetry: OpenTelemetry | None = None,
    ) -> None:
        """See `Producer`; the transaction checker is a function that may block."""
        self._thread = _LoopThread()
        checker = None if transaction_checker is None else _in_a_thread(transaction_checker)
        self._producer = Producer(
            nameserver,
            settings,
            group=group,
            transaction_checker=checker,
            telemetry=telemetry,
        )

    def __enter__(self) -> Self:
        self._context = _ClientContext(self._thread, self._producer)
        self._context.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.close(error)

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
        queue: QueueRef | None = ...,
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
        queue: QueueRef | None = ...,
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

    def request(  # noqa: PLR0913  keyword-only, each with a default
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
        """See `Producer.request`."""
        return self._thread.call(
            self._producer.request(
                topic,
                body,
                timeout_ms=timeout_ms,
                tag=tag,
                keys=keys,
                properties=properties,
                ordering_key=ordering_key,
                queue=queue,
            )
        )

    def send_many(
        self,
        topic: str,
        bodies: Bodies,
        *,
        tag: str = "",
        keys: Keys = (),
        ordering_key: str | None = None,
        queue: QueueRef | None = None,
    ) -> list[ReceiptRange]:
        """See `Producer.send_many`."""
        return self._thread.call(
            self._producer.send_many(
                topic, bodies, tag=tag, keys=keys, ordering_key=ordering_key, queue=queue
            )
        )

    def send_one_way(  # noqa: PLR0913  keyword-only, each with a default
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
        """See `Producer.send_one_way`."""
        sending = self._producer.send_one_way(
            topic,
            body,
            tag=tag,
            keys=keys,
            properties=properties,
            ordering_key=ordering_key,
            queue=queue,
        )
        self._thread.call(sending)

    @property
    def one_way_failures(self) -> int:
        """See `Producer.one_way_failures`."""
        return self._producer.one_way_failures

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
    ) -> AbstractContextManager[BlockingTransaction]:
        """See `Producer.transaction`; for a `with` block."""
        block = self._producer.transaction(
            topic,
            body,
            tag=tag,
            keys=keys,
            properties=properties,
            ordering_key=ordering_key,
            queue=queue,
            check_after_ms=check_after_ms,
        )
        return _BlockingTransactionBlock(self._thread, block)

    def end_transaction(
        self, transaction_id: str, state: TransactionState, *, topic: str = ""
    ) -> CommitReceipt | None:
        """See `Producer.end_transaction`."""
        return self._thread.call(self._producer.end_transaction(transaction_id, state, topic=topic))

    def cancel(self, schedule_id: str) -> None:
        """See `Producer.cancel`."""
        self._thread.call(self._producer.cancel(schedule_id))

    def flush(self) -> None:
        """See `Producer.flush`."""
        self._thread.call(self._producer.flush())

    def close(self) -> None:
        """See `Producer.close`; does nothing after the block."""
        if self._thread.open:
            self._thread.call(self._producer.close())


class BlockingConsumer:
    """A `Consumer` with blocking calls. Use it as a context manager.

    Iterate over it in one thread, or pass a handler to `run`. All other methods may be called in
    any thread while the block runs. Arguments and errors are those of `Consumer`. The first
    SIGTERM or SIGINT stops a consumer that runs, or is iterated, in the main thread.
    """

    def __init__(  # noqa: PLR0913  keyword-only from the settings on, each with a default
        self,
        nameserver: str,
        group: str,
        subscriptions: Mapping[str, str],
        settings: ConsumerSettings | None = None,
        *,
        client_id: str = "",
        metrics: ClientMetrics | None = None,
        telemetry: OpenTelemetry | None = None,
    ) -> None:
        self._thread = _LoopThread()
        self._consumer = Consumer(
            nameserver,
            group,
            subscriptions,
            settings,
            client_id=client_id,
            metrics=metrics,
            telemetry=telemetry,
        )

    def __enter__(self) -> Self:
        self._context = _ClientContext(self._thread, self._consumer)
        self._context.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._context.close(error)
        finally:
            STOP_SIGNALS.remove(self)

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Yield messages; each is acknowledged when the next one is requested."""
        self._handle_signals()
        while True:
            message = self._thread.call(self._next())
            if message is None:
                return
            yield message

    def run(self, handler: Handler, *, inline: bool = False) -> None:
        """See `Consumer.run`; a plain function runs in threads, several at once.

        With `inline` it runs in the library's own thread, one call at a time.
        """
        self._handle_signals()
        self._thread.call(self._consumer.run(handler, inline=inline))

    def run_batches(self, handler: BatchHandler, *, messages_max: int = 1_000) -> None:
        """See `Consumer.run_batches`; a plain function runs in threads, several at once."""
        self._handle_signals()
        self._thread.call(self._consumer.run_batches(handler, messages_max=messages_max))

    def transform(self, handler: TransformHandler, *, to: str | Sequence[str]) -> None:
        """See `Consumer.transform`; a plain function runs in threads, several at once."""
        self._handle_signals()
        self._thread.call(self._consumer.transform(handler, to=to))

    def stop(self) -> None:
        """Start no more messages: `run`, `run_batches`, `transform` and the iteration end."""
        self._thread.do(self._consumer.stop)

    def reply(self, message: ReceivedMessage, reply: Reply | bytes) -> None:
        """See `Consumer.reply`."""
        self._thread.do(lambda: self._consumer.reply(message, reply))

    def close(self, *, drain_ms: int | None) -> None:
        """See `Consumer.close`."""
        self._thread.call(self._consumer.close(drain_ms=drain_ms))

    def pause(self, queue: QueueRef) -> None:
        """See `Consumer.pause`."""
        self._thread.do(lambda: self._consumer.pause(queue))

    def resume(self, queue: QueueRef) -> None:
        """See `Consumer.resume`."""
        self._thread.do(lambda: self._consumer.resume(queue))

    @property
    def assignment(self) -> tuple[QueueRef, ...]:
        """See `Consumer.assignment`."""
        return self._thread.do(lambda: self._consumer.assignment)

    @property
    def verdict(self) -> SubscriptionVerdict:
        """See `Consumer.verdict`."""
        return self._thread.do(lambda: self._consumer.verdict)

    @property
    def flow(self) -> dict[QueueRef, FlowReason]:
        """See `Consumer.flow`."""
        return self._thread.do(lambda: self._consumer.flow)

    @property
    def handle_timeout_ms(self) -> int | None:
        """See `Consumer.handle_timeout_ms`."""
        return self._consumer.handle_timeout_ms

    @handle_timeout_ms.setter
    def handle_timeout_ms(self, timeout_ms: int | None) -> None:
        self._thread.do(lambda: setattr(self._consumer, "handle_timeout_ms", timeout_ms))

    def _handle_signals(self) -> None:
        if self._consumer.handles_signals:
            stop = self._consumer.stop_by_signal
            STOP_SIGNALS.add(self, lambda: self._thread.notify(stop))

    async def _next(self) -> ReceivedMessage | None:
        try:
            return await anext(self._consumer)
        except StopAsyncIteration:
            return None


class BlockingPuller:
    """A `Puller` with blocking calls. Use it as a context manager."""

    def __init__(
        self,
        nameserver: str,
        group: str = "",
        settings: PullerSettings | None = None,
        *,
        filters: Mapping[str, str] | None = None,
    ) -> None:
        self._thread = _LoopThread()
        self._puller = Puller(nameserver, group, settings, filters=filters)

    def __enter__(self) -> Self:
        self._context = _ClientContext(self._thread, self._puller)
        self._context.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.close(error)

    def queues(self, topic: str) -> tuple[QueueRef, ...]:
        """See `Puller.queues`."""
        return self._thread.call(self._puller.queues(topic))

    def assign(self, queues: Iterable[QueueRef]) -> None:
        """See `Puller.assign`."""
        self._thread.call(self._puller.assign(queues))

    @property
    def assignment(self) -> tuple[QueueRef, ...]:
        """See `Puller.assignment`."""
        return self._puller.assignment

    def pause(self, queue: QueueRef) -> None:
        """See `Puller.pause`."""
        self._thread.do(lambda: self._puller.pause(queue))

    def resume(self, queue: QueueRef) -> None:
        """See `Puller.resume`."""
        self._thread.do(lambda: self._puller.resume(queue))

    def seek(self, queue: QueueRef, to: SeekTarget) -> int:
        """See `Puller.seek`."""
        return self._thread.call(self._puller.seek(queue, to))

    def position(self, queue: QueueRef) -> int:
        """See `Puller.position`."""
        return self._thread.call(self._puller.position(queue))

    def lost_count(self, queue: QueueRef) -> int:
        """See `Puller.lost_count`."""
        return self._thread.do(lambda: self._puller.lost_count(queue))

    def poll(
        self, timeout_ms: int = 1_000, count_max: int = 500
    ) -> dict[QueueRef, list[ReceivedMessage]]:
        """See `Puller.poll`."""
        return self._thread.call(self._puller.poll(timeout_ms, count_max))

    def committed(self, queue: QueueRef) -> int | None:
        """See `Puller.committed`."""
        return self._thread.call(self._puller.committed(queue))

    def commit(self, offsets: Mapping[QueueRef, int] | None = None) -> None:
        """See `Puller.commit`."""
        self._thread.call(self._puller.commit(offsets))


async def _done(work: Callable[[], T]) -> T:
    """Call `work`, which does not block, in the loop that runs this coroutine."""
    return work()
