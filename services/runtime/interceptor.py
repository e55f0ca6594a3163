"""The edge of every service: who may call, deadlines, error mapping, metrics of calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NoReturn

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from batonmq._common.clock import Clock
from batonmq._common.rpc import abort
from batonmq.errors import BatonError, Internal, NoDeadline, NotServing
from batonmq_server.runtime.access.admission import Admission
from batonmq_server.runtime.access.guard import Guard

log = logging.getLogger(__name__)

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
Context = grpc.aio.ServicerContext[Any, Any]


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every call of the `baton.` packages; of others it only asks who may call.

    - With a `guard` that is on, whoever may not call is refused, and what is held ends when access
      is revoked. The request of somebody who is not known is not read.
    - A call without a deadline is refused; streams that watch are open-ended and need none.
    - A `BatonError` becomes its status with details; anything else a bare INTERNAL, logged here.
    - Counts, times and in-flight numbers go to Prometheus by service, method and reason.
    - After `drain`, new calls are refused with NOT_SERVING, and so are those that are only held:
      watches, and calls of the methods named in `held`.
    """

    def __init__(
        self,
        clock: Clock,
        registry: CollectorRegistry,
        held: frozenset[str] = frozenset(),
        guard: Guard | None = None,
    ) -> None:
        self._clock, self._held = clock, held
        self.draining = False
        self._admission = Admission(guard, held) if guard is not None and guard.on else None
        self._waiting: set[asyncio.Task[Any]] = set()
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._by_method = lru_cache(maxsize=None)(self._metrics_of)
        self._calls = Counter(
            "baton_rpc_calls",
            "Calls by outcome; reason is OK or the reason of the error.",
            ("service", "method", "reason"),
            registry=registry,
        )
        self._seconds = Histogram(
            "baton_rpc_seconds",
            "Time from request to answer, held calls included.",
            ("service", "method"),
            buckets=_BUCKETS,
            registry=registry,
        )
        self._open = Gauge(
            "baton_rpc_open", "Calls under way.", ("service", "method"), registry=registry
        )

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler chosen for this call."""
        name = handler_call_details.method
        if name not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._wrapped[name] = self._handler(name, handler)
        if self._admission is not None:
            metadata = handler_call_details.invocation_metadata or ()
            if (error := self._admission.unread(name, metadata)) is not None:
                return self._refusing(name, error)
        return self._wrapped[name]

    def _handler(
        self, name: str, handler: grpc.RpcMethodHandler[Any, Any]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        _, service, method = name.split("/")
        if service.startswith("baton."):
            return self._wrap(handler, service, method)
        return handler if self._admission is None else self._admission.foreign(name, handler)

    def _refusing(self, name: str, error: BatonError) -> grpc.RpcMethodHandler[Any, Any]:
        """Answers a call of any form without a look at what was sent."""
        _, service, method = name.split("/")

        async def refuse(_: Any, context: Context) -> None:
            with self.counted(service.rpartition(".")[2], method) as outcome:
                outcome.reason = error.reason
                await abort(context, error)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _wrap(
        self, handler: grpc.RpcMethodHandler[Any, Any], service: str, method: str
    ) -> grpc.RpcMethodHandler[Any, Any]:
        codec = (handler.request_deserializer, handler.response_serializer)
        edge, path = _Edge(self, service.rpartition(".")[2], method), f"/{service}/{method}"
        call: Any = handler.unary_unary or handler.unary_stream
        assert call is not None, "services have no client streams"
        if handler.unary_unary:
            if self._admission is not None:
                call = self._admission.unary(path, call)
            return grpc.unary_unary_rpc_method_handler(edge.unary(call), *codec)
        if self._admission is not None:
            call = self._admission.stream(path, call)
        return grpc.unary_stream_rpc_method_handler(edge.stream(call), *codec)

    def _metrics_of(self, service: str, method: str) -> tuple[Gauge, Histogram]:
        labels = (service, method)
        return self._open.labels(*labels), self._seconds.labels(*labels)

    def drain(self) -> None:
        """Take no more calls, and end the held ones."""
        self.draining = True
        for task in self._waiting:
            task.cancel()

    def admit(self, method: str, context: Context) -> None:
        """Refuse a call before its handler sees it.

        Raises:
            NotServing: the process is stopping.
            NoDeadline: the caller set none.
        """
        if self.draining:
            raise _stopping()
        if not method.startswith("Watch") and context.time_remaining() is None:
            raise NoDeadline(f"{method} was called without a deadline")

    @contextmanager
    def counted(self, service: str, method: str) -> Iterator[_Outcome]:
        """Note the start and the end of a call, and as what it ends."""
        outcome, start_ms = _Outcome(), self._clock.monotonic_ms()
        # A stream that is abandoned ends in another task than the one that runs it now.
        task = _this_task()
        if method.startswith("Watch") or method in self._held:
            self._waiting.add(task)
        is_open, seconds = self._by_method(service, method)
        is_open.inc()
        try:
            yield outcome
        finally:
            self._waiting.discard(task)
            is_open.dec()
            self._calls.labels(service, method, outcome.reason).inc()
            seconds.observe((self._clock.monotonic_ms() - start_ms) / 1e3)


class _Outcome:
    """How a call ended: OK, the reason of its error, or CANCELLED while nothing else is known."""

    reason = "CANCELLED"


class _Edge:
    def __init__(self, owner: EdgeInterceptor, service: str, method: str) -> None:
        self._owner, self._service, self._method = owner, service, method

    def unary(self, call: Any) -> Any:
        async def wrapped(request: Any, context: Context) -> Any:
            with self._owner.counted(self._service, self._method) as outcome:
                try:
                    self._owner.admit(self._method, context)
                    answer = await call(request, context)
                    outcome.reason = "OK"
                    return answer
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  it stops here
                    await self._fail(context, error, outcome)

        return wrapped

    def stream(self, call: Any) -> Any:
        async def wrapped(request: Any, context: Context) -> AsyncIterator[Any]:
            with self._owner.counted(self._service, self._method) as outcome:
                try:
                    self._owner.admit(self._method, context)
                    async for item in call(request, context):
                        yield item
                    outcome.reason = "OK"
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  it stops here
                    await self._fail(context, error, outcome)

        return wrapped

    async def _fail(
        self, context: Context, error: Exception | asyncio.CancelledError, outcome: _Outcome
    ) -> NoReturn:
        if isinstance(error, asyncio.CancelledError):
            if not self._owner.draining:
                raise error
            _this_task().uncancel()
            error = _stopping()
        if not isinstance(error, BatonError):
            log.error("unexpected error method=%s", self._method, exc_info=error)
            error = Internal("internal error; see the server's log")
        outcome.reason = error.reason
        await abort(context, error)


def _stopping() -> NotServing:
    return NotServing("the service is stopping", retry_after_ms=500)


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
