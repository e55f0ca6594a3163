"""The edge of every service: admission, deadlines, error mapping and metrics of calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, NoReturn

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Gauge, Histogram

from batonmq._common.clock import Clock
from batonmq._common.rpc import abort
from batonmq.errors import BatonError, Internal, NoDeadline, NotServing
from batonmq_server.runtime.access.admission import Admission
from batonmq_server.runtime.access.authenticator import Metadata
from batonmq_server.runtime.access.guard import Guard
from batonmq_server.runtime.descriptor_shortage import is_shortage, no_descriptors
from batonmq_server.runtime.log_limiter import LogLimiter
from batonmq_server.runtime.metrics import RpcMetrics
from batonmq_server.runtime.request_decoding import (
    decoded,
    decoded_stream,
    decoder_of,
    with_decoding,
)
from batonmq_server.runtime.response_stream import encoder_of, write_responses

log = logging.getLogger(__name__)

_FAULT_INTERVAL_MS = 10_000
"""Time between two tracebacks of the same error of one method."""
Context = grpc.aio.ServicerContext[Any, Any]


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all calls; services that gRPC brings get admission only.

    - With a `guard` that is on, calls without permission are rejected, and long polls and streams
      end when access is revoked. The request of an unauthenticated caller is not read.
    - A call without a deadline is rejected; open-ended calls need none. These are watches, and
      calls with a stream of requests.
    - A `BatonError` is sent as its status with details, any other error as INTERNAL without
      details; the latter is logged here, at most every 10 s for each method and class of error.
    - A request that can't be decoded is rejected with INVALID_ARGUMENT, also within a stream.
    - Counts, times and open calls are exported to Prometheus by service, method and reason.
    - A call within a stream of calls is treated as one that has come alone.
    - After `drain`, new calls are rejected with NOT_SERVING, and open-ended calls and long polls
      end with it.

    Args:
        long_polls: Names of the methods without a stream that are long polls.
        pause: Pauses a connection, named by its client, when its caller ignores its quota.
        services: Full names of the services of this process, beside those of `baton`.
        open_ended: Names of further methods that need no deadline and end with the drain.

    Attributes:
        handlers: The handlers by path, for streams of calls; see `ServerWithCalls`.
        ended_by_servicer: Streams, by path, that neither the drain nor a revocation of access
            cancels: their servicer ends them. The drain makes this call.
    """

    def __init__(  # noqa: PLR0913  keyword-only from the fifth on
        self,
        clock: Clock,
        registry: CollectorRegistry,
        long_polls: frozenset[str] = frozenset(),
        guard: Guard | None = None,
        pause: Callable[[str], None] = lambda _: None,
        *,
        services: frozenset[str] = frozenset(),
        open_ended: frozenset[str] = frozenset(),
    ) -> None:
        self._clock, self._long_polls, self._services = clock, long_polls, services
        self._open_ended = open_ended
        self.draining = False
        self._admission = (
            Admission(guard, long_polls, pause) if guard is not None and guard.on else None
        )
        self._waiting: set[asyncio.Task[Any]] = set()
        self.handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self.ended_by_servicer: dict[str, Callable[[], None]] = {}
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._by_method = lru_cache(maxsize=None)(self._metrics_of)
        self._metrics = RpcMetrics(registry)
        self._by_outcome = lru_cache(maxsize=None)(self._metrics.calls.labels)
        self.faults = LogLimiter(clock.monotonic_ms, _FAULT_INTERVAL_MS)

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler chosen for this call."""
        name, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        if name not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._wrapped[name] = self._handler(name, handler)
        if (rejecting := self._early_rejection(name, metadata or ())) is not None:
            return grpc.stream_stream_rpc_method_handler(rejecting)
        return self._wrapped[name]

    def called_in_stream(
        self, method: str, metadata: Metadata
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of a call within a stream of calls; None if it can't be made there.

        Args:
            method: Path of the method.
            metadata: That of the stream.
        """
        handler = self.handlers.get(method)
        if handler is None or handler.unary_unary is None:
            return None
        if (rejecting := self._early_rejection(method, metadata)) is not None:
            return grpc.unary_unary_rpc_method_handler(rejecting)
        if method not in self._wrapped:
            self._wrapped[method] = self._handler(method, handler)
        return self._wrapped[method]

    def _early_rejection(self, name: str, metadata: Metadata) -> Any:
        """Return a handler that rejects a call before its request is read; None to admit it."""
        admission = self._admission_of(name)
        error = admission.early_error(name, metadata) if admission is not None else None
        if admission is None or error is None:
            return None
        return self._rejecting(admission, name, error)

    def _admission_of(self, name: str) -> Admission | None:
        """Return what admits the calls of a method; None if its servicer does, or access is off."""
        admission = self._admission
        return admission if admission is not None and admission.covers(name) else None

    def _handler(
        self, name: str, handler: grpc.RpcMethodHandler[Any, Any]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        _, service, method = name.split("/")
        if service.startswith("baton.") or service in self._services:
            return self._wrap(handler, service, method)
        if self._admission is not None:
            handler = self._admission.third_party(name, handler)
        return with_decoding(handler)

    def _rejecting(
        self, admission: Admission, name: str, error: BatonError
    ) -> Callable[[Any, Context], Awaitable[None]]:
        """Return a handler for any kind of call that sends `error` without reading the request."""
        _, service, method = name.split("/")

        async def reject(_: Any, context: Context) -> None:
            with self.counted(service.rpartition(".")[2], method, waits=False) as outcome:
                outcome.reason = error.reason
                await abort(context, await admission.delayed(error, context))

        return reject

    def _wrap(
        self, handler: grpc.RpcMethodHandler[Any, Any], service: str, method: str
    ) -> grpc.RpcMethodHandler[Any, Any]:
        codec = (decoder_of(handler), encoder_of(handler))
        path = f"/{service}/{method}"
        admission = self._admission_of(path)
        open_ended = (
            method.startswith("Watch")
            or method in self._open_ended
            or handler.stream_stream is not None
        )
        cancelled = path not in self.ended_by_servicer
        waits = cancelled and (open_ended or method in self._long_polls)
        edge = _Edge(self, service.rpartition(".")[2], method, open_ended=open_ended, waits=waits)
        call: Any
        if (call := handler.unary_unary) is not None:
            if admission is not None:
                call = admission.unary(path, call)
            return grpc.unary_unary_rpc_method_handler(edge.unary(call), *codec)
        if (call := handler.unary_stream) is not None:
            if admission is not None:
                call = admission.stream(path, call)
            return grpc.unary_stream_rpc_method_handler(edge.stream(call, decoded), *codec)
        call = handler.stream_stream
        assert call is not None, f"{path} has a stream of requests and one response"
        if admission is not None:
            call = admission.stream(path, call, until_revoked=cancelled)
        return grpc.stream_stream_rpc_method_handler(edge.stream(call, decoded_stream), *codec)

    def _metrics_of(self, service: str, method: str) -> tuple[Gauge, Histogram]:
        labels = (service, method)
        return self._metrics.open.labels(*labels), self._metrics.seconds.labels(*labels)

    def drain(self) -> None:
        """Reject new calls, and end open-ended calls and long polls."""
        self.draining = True
        for task in self._waiting:
            task.cancel()
        for end in self.ended_by_servicer.values():
            end()

    def admit(self, method: str, context: Context, *, open_ended: bool) -> None:
        """Return if the call may reach its handler.

        Raises:
            NotServing: the process is stopping.
            NoDeadline: the call has no deadline.
        """
        if self.draining:
            raise _stopping()
        if not open_ended and context.time_remaining() is None:
            raise NoDeadline(f"{method} was called without a deadline")

    def counted(self, service: str, method: str, *, waits: bool) -> _CountedCall:
        """Return the context in which the start, the end and the outcome of a call are exported.

        Args:
            waits: Whether `drain` ends the call.
        """
        return _CountedCall(self, service, method, waits=waits)

    def call_begun(self, task: asyncio.Task[Any], service: str, method: str, *, waits: bool) -> int:
        """Count the start of a call in a task; return its monotonic time, in milliseconds."""
        if waits:
            self._waiting.add(task)
        self._by_method(service, method)[0].inc()
        return self._clock.monotonic_ms()

    def call_ended(
        self, task: asyncio.Task[Any], service: str, method: str, reason: str, start_ms: int
    ) -> None:
        """Count the end of a call."""
        self._waiting.discard(task)
        is_open, seconds = self._by_method(service, method)
        is_open.dec()
        self._by_outcome(service, method, reason).inc()
        seconds.observe((self._clock.monotonic_ms() - start_ms) / 1e3)


class _CountedCall:
    """A call that is counted; a class, because a generator costs 2 µs more per call.

    Attributes:
        reason: OK, the reason of its error, or CANCELLED until one of them is known.
    """

    __slots__ = ("_method", "_owner", "_service", "_start_ms", "_task", "_waits", "reason")

    def __init__(self, owner: EdgeInterceptor, service: str, method: str, *, waits: bool) -> None:
        self._owner, self._service, self._method, self._waits = owner, service, method, waits
        self.reason = "CANCELLED"

    def __enter__(self) -> _CountedCall:
        # The end of an abandoned stream runs in another task than the one that runs it now.
        self._task = _this_task()
        self._start_ms = self._owner.call_begun(
            self._task, self._service, self._method, waits=self._waits
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._owner.call_ended(self._task, self._service, self._method, self.reason, self._start_ms)


class _Edge:
    """Wraps the handler of one method.

    Args:
        open_ended: Whether calls need no deadline.
        waits: Whether `drain` ends calls.
    """

    def __init__(
        self, owner: EdgeInterceptor, service: str, method: str, *, open_ended: bool, waits: bool
    ) -> None:
        self._owner, self._service, self._method = owner, service, method
        self._open_ended, self._waits = open_ended, waits

    def unary(self, call: Any) -> Any:
        async def wrapped(request: Any, context: Context) -> Any:
            with self._counted() as outcome:
                try:
                    self._admit(context)
                    answer = await call(decoded(request), context)
                    outcome.reason = "OK"
                    return answer
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  it stops here
                    await self._fail(context, error, outcome)

        return wrapped

    def stream(self, call: Any, check: Callable[[Any], Any]) -> Any:
        """Return a handler with a stream of responses.

        Args:
            check: Checks that the request, or each request of a stream, was decoded.
        """

        async def wrapped(request: Any, context: Context) -> None:
            with self._counted() as outcome:
                try:
                    self._admit(context)
                    await write_responses(call(check(request), context), context)
                    outcome.reason = "OK"
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  it stops here
                    await self._fail(context, error, outcome)

        return wrapped

    def _counted(self) -> _CountedCall:
        return self._owner.counted(self._service, self._method, waits=self._waits)

    def _admit(self, context: Context) -> None:
        self._owner.admit(self._method, context, open_ended=self._open_ended)

    async def _fail(
        self, context: Context, error: Exception | asyncio.CancelledError, outcome: _CountedCall
    ) -> NoReturn:
        if isinstance(error, asyncio.CancelledError):
            if not self._owner.draining:
                raise error
            _this_task().uncancel()
            error = _stopping()
        if is_shortage(error):
            error = no_descriptors()
        if not isinstance(error, BatonError):
            if count := self._owner.faults.count((self._method, type(error))):
                log.error(
                    "unexpected error method=%s count=%d", self._method, count, exc_info=error
                )
            error = Internal("internal error; see the server's log")
        outcome.reason = error.reason
        await abort(context, error)


def _stopping() -> NotServing:
    return NotServing("the service is stopping", retry_after_ms=500)


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
