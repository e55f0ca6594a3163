"""Exchange: many calls over one stream, each as if it had come alone.

A call of its own costs gRPC several times as much as two messages on an open stream. The handlers
are those of the methods, with all that the edge puts around them: admission, quotas, deadlines,
errors and metrics. Only the way of the bytes is another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio

from baton.calls.v1 import call_service_pb2 as pb
from baton.calls.v1 import call_service_pb2_grpc as pb_grpc
from batonmq._common import timeouts
from batonmq._common.rpc import STATUS_TRAILER
from batonmq.errors import BatonError, NotServing, Unauthenticated
from batonmq_server.runtime.interceptor import EdgeInterceptor

log = logging.getLogger(__name__)

EXCHANGE = "/baton.calls.v1.CallService/Exchange"
CALLS_MAX = 100
"""Calls of one stream in progress; the next one is read when one of them has its reply."""
RESPONSE_BYTES_MAX = 256 * 1024
"""A response with more bytes of replies gets no more of them."""
CLOSING_S = 1.0
"""A client that was told that its stream closes has so long to send its last calls."""
Context = grpc.aio.ServicerContext[Any, Any]

FindHandler = Callable[[str], "grpc.RpcMethodHandler[Any, Any] | None"]


class CallServicer(pb_grpc.CallServiceServicer):
    """Serves the streams of calls of one process.

    Args:
        edge: Has the handlers of the methods.
    """

    def __init__(self, edge: EdgeInterceptor) -> None:
        self._edge = edge
        self._open: set[_CallStream] = set()

    async def Exchange(
        self, requests: AsyncIterator[pb.ExchangeRequest], context: Context
    ) -> AsyncIterator[pb.ExchangeResponse]:
        """See the proto."""
        metadata = tuple(context.invocation_metadata() or ())
        stream = _CallStream(context, lambda method: self._edge.called_in_stream(method, metadata))
        self._open.add(stream)
        if self._edge.draining:
            stream.drain()
        try:
            async for response in stream.responses(requests):
                yield response
        finally:
            self._open.discard(stream)
            await stream.close()

    def drain(self) -> None:
        """Close each stream."""
        for stream in self._open:
            stream.drain()


class _CallStream:
    """One stream: its calls in progress, and the replies that are ready to leave."""

    def __init__(self, context: Context, find: FindHandler) -> None:
        self._context, self._find = context, find
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(CALLS_MAX)
        self._replies: list[pb.Reply] = []
        self._changed = asyncio.Event()
        self._calls = 0  # that have come and have no reply
        self._closing: BatonError | None = None
        self._told = self._ended = False
        self._failure: Exception | None = None

    def drain(self) -> None:
        """Close the stream, because the process stops."""
        self._begin_closing(NotServing("the service is stopping", retry_after_ms=500))

    def _begin_closing(self, reason: BatonError) -> None:
        """Tell the client that the stream closes, and give it time to send its last calls."""
        if self._closing is None:
            self._closing = reason
            asyncio.get_running_loop().call_later(CLOSING_S, self._end, reason)
            self._changed.set()

    def _end(self, failure: Exception | None) -> None:
        """End the stream once no call is in progress."""
        if not self._ended:
            self._ended, self._failure = True, failure
            self._changed.set()

    async def responses(
        self, requests: AsyncIterator[pb.ExchangeRequest]
    ) -> AsyncIterator[pb.ExchangeResponse]:
        """Yield the replies, together those that are ready in the same turn of the event loop.

        Raises:
            Exception: why the stream ends.
        """
        self._spawn(self._read(requests))
        yield pb.ExchangeResponse()  # the stream is accepted: see Exchange
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._closing is not None and not self._told:
                self._told = True
                yield pb.ExchangeResponse(closing=True)
            while replies := self._take():
                yield pb.ExchangeResponse(replies=replies)
                for _ in replies:
                    self._room.release()
                self._calls -= len(replies)
            if self._ended and not self._calls:
                break
        if self._failure is not None:
            raise self._failure

    def _take(self) -> list[pb.Reply]:
        """Return the replies of the next response."""
        count, bytes_count = 0, 0
        while count < len(self._replies) and bytes_count < RESPONSE_BYTES_MAX:
            bytes_count += len(self._replies[count].response)
            count += 1
        taken, self._replies = self._replies[:count], self._replies[count:]
        return taken

    async def close(self) -> None:
        """Cancel the calls in progress, and wait for their end."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _read(self, requests: AsyncIterator[pb.ExchangeRequest]) -> None:
        """Begin the calls of the client, until it sends no more."""
        try:
            async for request in requests:
                arrived_s = asyncio.get_running_loop().time()
                self._calls += len(request.calls)
                for call in request.calls:
                    await self._room.acquire()
                    self._spawn(self._answer(call, arrived_s))
        except Exception as error:  # noqa: BLE001  it ends the stream
            self._end(error)
        else:
            self._end(None)

    async def _answer(self, call: pb.Call, arrived_s: float) -> None:
        context = _CallContext(self._context, call.timeout_ms, arrived_s)
        try:
            reply = pb.Reply(call_id=call.call_id, response=await self._response(call, context))
        except _Failed as failed:
            reply = failed.reply(call.call_id)
            if failed.code is grpc.StatusCode.UNAUTHENTICATED:
                self._begin_closing(Unauthenticated(failed.message))
        except asyncio.CancelledError:
            if _being_cancelled():
                raise  # with the stream
            cancelled = _Failed(grpc.StatusCode.CANCELLED, "the call was cancelled")
            reply = cancelled.reply(call.call_id)
        except Exception:
            log.exception("unexpected error method=%s", call.method)
            reply = _Failed(grpc.StatusCode.INTERNAL, "internal error").reply(call.call_id)
        self._replies.append(reply)
        self._changed.set()

    async def _response(self, call: pb.Call, context: _CallContext) -> bytes:
        """Return the encoded response.

        Raises:
            _Failed: the call has failed.
        """
        handler: Any = self._find(call.method)
        if handler is None:
            raise _Failed(grpc.StatusCode.UNIMPLEMENTED, f"no such call here: {call.method}")
        if context.expired:  # while it waited for others
            raise _Failed(grpc.StatusCode.DEADLINE_EXCEEDED)
        decode = handler.request_deserializer or bytes
        try:
            async with timeouts.timeout_at(context.end_s):
                response = await handler.unary_unary(decode(call.request), context)
        except (TimeoutError, _Failed) as error:
            # A process that stops turns the end by the deadline into NOT_SERVING.
            if context.expired or isinstance(error, TimeoutError):
                raise _Failed(grpc.StatusCode.DEADLINE_EXCEEDED) from None
            raise
        encoded: bytes = handler.response_serializer(response)
        return encoded

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)  # noqa: TID251  ends with the stream, see `close`
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Failed(grpc.aio.AbortError):
    """The status of a call that has failed."""

    def __init__(self, code: grpc.StatusCode, message: str = "", details: bytes = b"") -> None:
        super().__init__(message)
        self.code, self.message, self._details = code, message, details

    def reply(self, call_id: int) -> pb.Reply:
        """Return the status as the reply to a call."""
        number: int = self.code.value[0]
        return pb.Reply(call_id=call_id, code=number, message=self.message, details=self._details)


class _CallContext:
    """The context of one call: that of the stream, with a deadline and an end of its own.

    Attributes:
        end_s: When the caller waits no longer, by the clock of the loop; None if it did not say.
    """

    def __init__(self, stream: Context, timeout_ms: int, arrived_s: float) -> None:
        self._stream, self._loop = stream, asyncio.get_running_loop()
        self.end_s = arrived_s + timeout_ms / 1000 if timeout_ms > 0 else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def expired(self) -> bool:
        """Whether the caller waits no longer."""
        return self.time_remaining() == 0

    def time_remaining(self) -> float | None:
        """Return the time until the deadline; None if there is none, which the edge refuses."""
        return None if self.end_s is None else max(0.0, self.end_s - self._loop.time())

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Ignore them: see Exchange."""

    def set_code(self, code: grpc.StatusCode) -> None:
        """Ignore it: it would be that of the stream."""

    def set_details(self, details: str) -> None:
        """Ignore them, as the code."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        """Raise the status of the call, which becomes its reply."""
        packed = dict(trailing_metadata).get(STATUS_TRAILER, b"")
        raise _Failed(code, details, packed)


class ServerWithCalls:
    """Adds services to a server, and their methods to those that streams of calls may call.

    Other contracts than those of BatonMQ are left out: their servicers admit their callers.
    """

    def __init__(self, server: grpc.aio.Server, edge: EdgeInterceptor) -> None:
        self._server, self._edge = server, edge
        servicer = CallServicer(edge)
        pb_grpc.add_CallServiceServicer_to_server(servicer, server)
        edge.ended_by_servicer[EXCHANGE] = servicer.drain

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """As in `grpc.aio.Server`."""
        self._server.add_generic_rpc_handlers(tuple(handlers))

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """As in `grpc.aio.Server`."""
        if service.startswith("baton."):
            paths = {f"/{service}/{name}": one for name, one in handlers.items()}
            self._edge.handlers.update(paths)
        self._server.add_registered_method_handlers(service, dict(handlers))


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())
