"""The edge of every service: deadlines, error mapping, metrics of calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from batonmq.common.clock import Clock
from batonmq.common.errors import BatonError, Internal, NoDeadline, NotServing
from batonmq.common.rpc import abort

log = logging.getLogger(__name__)

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
STOPPING = NotServing("the service is stopping", retry_after_ms=500)
Context = grpc.aio.ServicerContext[Any, Any]


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every call of the `baton.` packages.

    - A call without a deadline is refused; streams that watch are open-ended and need none.
    - A `BatonError` becomes its status with details; anything else a bare INTERNAL, logged here.
    - Counts, times and in-flight numbers go to Prometheus by service, method and reason.
    - After `drain`, new calls are refused with NOT_SERVING, and so are those that are only held:
      watches, and calls of the methods named in `held`.
    """

    def __init__(
        self, clock: Clock, registry: CollectorRegistry, held: frozenset[str] = frozenset()
    ) -> None:
        self._clock, self._held = clock, held
        self.draining = False
        self._waiting: set[asyncio.Task[Any]] = set()
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
        handler = await continuation(handler_call_details)
        _, service, method = handler_call_details.method.split("/")
        if handler is None or not service.startswith("baton."):
            return handler
        codec = (handler.request_deserializer, handler.response_serializer)
        edge = _Edge(self, service.rpartition(".")[2], method)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(edge.unary(handler.unary_unary), *codec)
        assert handler.unary_stream is not None, "services have no client streams"
        return grpc.unary_stream_rpc_method_handler(edge.stream(handler.unary_stream), *codec)

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
            raise STOPPING
        if not method.startswith("Watch") and context.time_remaining() is None:
            raise NoDeadline(f"{method} was called without a deadline")

    def count(self, service: str, method: str, reason: str, start_ms: int) -> None:
        """Note the end of a call."""
        self._waiting.discard(_this_task())
        self._open.labels(service, method).dec()
        self._calls.labels(service, method, reason).inc()
        self._seconds.labels(service, method).observe((self._clock.monotonic_ms() - start_ms) / 1e3)

    def begin(self, service: str, method: str) -> int:
        """Note the start of a call; its time, for `count`."""
        if method.startswith("Watch") or method in self._held:
            self._waiting.add(_this_task())
        self._open.labels(service, method).inc()
        return self._clock.monotonic_ms()


class _Edge:
    def __init__(self, owner: EdgeInterceptor, service: str, method: str) -> None:
        self._owner, self._service, self._method = owner, service, method

    def unary(self, call: Any) -> Any:
        async def wrapped(request: Any, context: Context) -> Any:
            start_ms, reason = self._owner.begin(self._service, self._method), "CANCELLED"
            try:
                self._owner.admit(self._method, context)
                answer = await call(request, context)
                reason = "OK"
                return answer
            except asyncio.CancelledError:
                if self._owner.draining:
                    _this_task().uncancel()
                    await abort(context, STOPPING)
                raise
            except Exception as error:  # noqa: BLE001  the edge is where the unexpected stops
                reason = error.reason if isinstance(error, BatonError) else "INTERNAL"
                await self._fail(context, error)
            finally:
                self._owner.count(self._service, self._method, reason, start_ms)

        return wrapped

    def stream(self, call: Any) -> Any:
        async def wrapped(request: Any, context: Context) -> AsyncIterator[Any]:
            start_ms, reason = self._owner.begin(self._service, self._method), "CANCELLED"
            try:
                self._owner.admit(self._method, context)
                async for item in call(request, context):
                    yield item
                reason = "OK"
            except asyncio.CancelledError:
                if self._owner.draining:
                    _this_task().uncancel()
                    await abort(context, STOPPING)
                raise
            except Exception as error:  # noqa: BLE001  the edge is where the unexpected stops
                reason = error.reason if isinstance(error, BatonError) else "INTERNAL"
                await self._fail(context, error)
            finally:
                self._owner.count(self._service, self._method, reason, start_ms)

        return wrapped

    async def _fail(self, context: Context, error: Exception) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, BatonError):
            await abort(context, error)
        log.error("unexpected error method=%s", self._method, exc_info=error)
        await abort(context, Internal("internal error; see the server's log"))


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
