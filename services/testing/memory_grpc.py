"""gRPC channels and servers on an in-memory network.

All else is the production code: stubs, servicers, serializers, the edge interceptor, and statuses
with their details.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio

from batonmq._common import timeouts
from batonmq._common.rpc import from_rpc_error
from batonmq_server.runtime.interceptor import EdgeInterceptor
from batonmq_server.testing.memory_network import (
    END,
    UNAVAILABLE,
    UNIMPLEMENTED,
    CallResponse,
    CallStatus,
    MemoryCall,
    MemoryNetwork,
    Metadata,
    OrderedPath,
    RequestStream,
)
from batonmq_server.testing.virtual_time import VirtualHost

_EXCEEDED = CallStatus(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
Read = Callable[[bytes], Any]
Write = Callable[[Any], bytes]


def memory_connector(
    network: MemoryNetwork, host: VirtualHost
) -> Callable[[str], grpc.aio.Channel]:
    """Return a function that creates the channels of a host."""
    return lambda address: MemoryChannel(network, host, address)  # type: ignore[return-value]


def memory_prober(network: MemoryNetwork, host: VirtualHost) -> Callable[[str], Awaitable[bool]]:
    """Return a function that finds out for a host whether connections to an address are refused."""
    return lambda address: network.refuses(host, address)


class MemoryChannel:
    """The part of `grpc.aio.Channel` that stubs use, for one host."""

    def __init__(self, network: MemoryNetwork, host: VirtualHost, address: str) -> None:
        self._network, self._host, self._address = network, host, address
        self._open: dict[MemoryCall, None] = {}

    def unary_unary(
        self, path: str, request_serializer: Write, response_deserializer: Read, **_: object
    ) -> Callable[..., UnaryCall]:
        """Return a function that starts calls of a method with one response."""

        def call(
            request: Any, *, timeout: float | None = None, metadata: Metadata = ()
        ) -> UnaryCall:
            begun = self._call(path, timeout, metadata)
            self._begin_with(begun, request, request_serializer(request))
            return UnaryCall(begun, response_deserializer)

        return call

    def unary_stream(
        self, path: str, request_serializer: Write, response_deserializer: Read, **_: object
    ) -> Callable[..., StreamCall]:
        """Return a function that starts calls of a method with a stream of responses."""

        def call(
            request: Any, *, timeout: float | None = None, metadata: Metadata = ()
        ) -> StreamCall:
            begun = self._call(path, timeout, metadata)
            begun.streams = True
            self._begin_with(begun, request, request_serializer(request))
            return StreamCall(begun, response_deserializer)

        return call

    def stream_stream(
        self, path: str, request_serializer: Write, response_deserializer: Read, **_: object
    ) -> Callable[..., DuplexCall]:
        """Return a function that starts calls of a method with streams in both directions."""

        def call(*, timeout: float | None = None, metadata: Metadata = ()) -> DuplexCall:
            begun = self._call(path, timeout, metadata)
            begun.streams = True
            begun.requests = RequestStream(OrderedPath(self._network, begun.source, begun.target))
            self._network.begin(begun)
            return DuplexCall(begun, response_deserializer, request_serializer)

        return call

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return READY: connections never fail, only calls do."""
        return grpc.ChannelConnectivity.READY

    async def __aenter__(self) -> MemoryChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel all calls in progress."""
        for call in self._open:
            if not call.over:
                call.settle(0, CallStatus(grpc.StatusCode.CANCELLED, "channel closed"))

    def _call(self, path: str, timeout_s: float | None, metadata: Metadata) -> MemoryCall:
        call = MemoryCall(self._network, self._host, self._address, path, timeout_s)
        call.metadata = tuple(metadata)
        self._open = {one: None for one in self._open if not one.over} | {call: None}
        return call

    def _begin_with(self, call: MemoryCall, request: Any, raw: bytes) -> None:
        """Begin a call with one request."""
        call.raw = raw
        self._network.watcher.called(call, request)
        self._network.begin(call)


class _ClientCall:
    """A call at its client."""

    def __init__(self, call: MemoryCall, read: Read) -> None:
        self._call, self._read = call, read
        now_s = call.network.loop.time()
        self._end_s = None if call.timeout_s is None else now_s + call.timeout_s
        self._metadata: Metadata = ()

    def cancel(self) -> None:
        self._call.network.end_call(self._call)

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*self._metadata)

    async def _next(self) -> Any:
        """Return the next response; the call ends if there is none."""
        watcher = self._call.network.watcher
        try:
            async with timeouts.timeout_at(self._end_s):
                answer = await self._call.next()
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            self.cancel()
            failure = error if isinstance(error, grpc.aio.AioRpcError) else _EXCEEDED.error()
            watcher.told(self._call, failure)
            raise failure from None
        except BaseException:
            self.cancel()
            raise
        self._metadata = answer.metadata
        message = self._read(answer.raw)
        watcher.told(self._call, message)
        return message


class UnaryCall(_ClientCall):
    """A call with one response; await it."""

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only().__await__()

    async def _only(self) -> Any:
        answer = await self._next()
        self.cancel()
        return answer


class StreamCall(_ClientCall):
    """A call with a stream of responses."""

    def __aiter__(self) -> StreamCall:
        return self

    async def __anext__(self) -> Any:
        return await self._next()


class DuplexCall(StreamCall):
    """A call with a stream of requests and a stream of responses.

    As in gRPC, requests are written by one task at a time, and a reader is cancelled with the call.
    """

    def __init__(self, call: MemoryCall, read: Read, write: Write) -> None:
        super().__init__(call, read)
        self._write, self._no_more, self._writing = write, False, False

    async def write(self, request: Any) -> None:
        """Send a request.

        Raises:
            InvalidStateError: the call has ended, or `done_writing` was called.
        """
        call = self._call
        assert not self._writing, "two tasks write to one stream"
        if call.ended:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._no_more:
            raise asyncio.InvalidStateError('RPC is half closed after calling "done_writing".')
        raw = self._write(request)
        call.network.watcher.called(call, request)
        call.network.write(call, raw)
        self._writing = True
        try:
            await asyncio.sleep(0)
        finally:
            self._writing = False

    async def done_writing(self) -> None:
        """End the stream of requests."""
        if not self._call.ended and not self._no_more:
            self._no_more = True
            self._call.network.write(self._call, END)


class _Aborted(grpc.aio.AbortError):
    def __init__(self, status: CallStatus) -> None:
        super().__init__(status.details)
        self.status = status


class _Context:
    """The part of `grpc.aio.ServicerContext` that servicers use."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: MemoryCall) -> None:
        self._loop, self._source, self._metadata = loop, call.source, call.metadata
        timeout_s = call.timeout_s
        self.trailing: Metadata = ()
        self.end_s = None if timeout_s is None else loop.time() + timeout_s
        self.send: Callable[[Any], None] | None = None

    def send_initial_metadata(self, metadata: Metadata) -> asyncio.Future[None]:
        """Return a future that is done: clients of this network read no metadata."""
        assert not metadata, "servicers send none"
        sent = self._loop.create_future()
        sent.set_result(None)
        return sent

    async def write(self, response: Any) -> None:
        assert self.send is not None, "only streams write"
        self.send(response)

    def peer(self) -> str:
        return self._source

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return that of a connection without TLS."""
        return {"transport_security_type": (b"insecure",)}

    def time_remaining(self) -> float | None:
        return None if self.end_s is None else max(0.0, self.end_s - self._loop.time())

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self.trailing = tuple(metadata)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> None:
        raise _Aborted(CallStatus(code, details, tuple(trailing_metadata)))


class MemoryServer:
    """The part of `grpc.aio.Server` that services use; it runs on a host."""

    def __init__(
        self, network: MemoryNetwork, host: VirtualHost, address: str, edge: EdgeInterceptor
    ) -> None:
        self.host, self._network, self._address, self._edge = host, network, address, edge
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._wrapped: dict[str, Any] = {}
        self._open: dict[asyncio.Task[None], tuple[MemoryCall, int]] = {}

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """Ignore them: the same handlers are added by name."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Add the handlers of a service."""
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def start(self) -> None:
        """Start to receive calls."""
        self._network.serve(self._address, self)

    async def stop(self, grace_s: float) -> None:
        """Stop receiving calls; those in progress may take `grace_s` seconds to end."""
        self._network.close(self._address)
        if self._open:
            _, left = await asyncio.wait(self._open, timeout=grace_s)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)

    def crash(self, noticed: bool) -> None:
        """Crash the server.

        Args:
            noticed: Whether clients notice at once; otherwise they wait for their deadlines.
        """
        self._network.close(self._address, machine=not noticed)
        if noticed:
            for call, copy in self._open.values():
                refuse = partial(call.settle, copy, UNAVAILABLE)
                self._network.send(call.target, call.source, refuse)

    def arrive(self, call: MemoryCall, copy: int) -> None:
        """Receive a call, or its duplicate."""
        self.host.post(self._accept, call, copy)

    def _accept(self, call: MemoryCall, copy: int) -> None:
        task = self.host.spawn(self._answer(call, copy))
        call.tasks.append(task)
        self._open[task] = (call, copy)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._open[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def _answer(self, call: MemoryCall, copy: int) -> None:
        way = _ResponsePath(self._network, call, copy)
        requests: _Requests | None = None
        request: Any = None
        if call.path not in self._handlers:
            way.send(UNIMPLEMENTED)
            return
        try:
            handler = await self._handler(call.path)
            context = _Context(self._network.loop, call)
            if call.requests is not None:
                requests = _Requests(call.requests, handler.request_deserializer)
            else:
                request = handler.request_deserializer(call.raw)
            async with timeouts.timeout_at(context.end_s):
                if not call.streams:
                    answer = await handler.unary_unary(request, context)
                    self._network.watcher.answered(call, request, answer)
                    way.send(CallResponse(handler.response_serializer(answer), context.trailing))
                    return

                def send(response: Any) -> None:
                    newest = request if requests is None else requests.newest
                    self._network.watcher.answered(call, newest, response)
                    way.send(CallResponse(handler.response_serializer(response)))

                context.send = send
                if requests is not None:
                    await handler.stream_stream(requests, context)
                else:
                    await handler.unary_stream(request, context)
                way.send(END)
        except _Aborted as aborted:
            error = from_rpc_error(aborted.status.error())
            newest = request if requests is None else requests.newest
            self._network.watcher.answered(call, newest, error)
            way.send(aborted.status)
        except TimeoutError:
            return

    async def _handler(self, path: str) -> Any:
        if path not in self._wrapped:

            async def found(_: object) -> Any:
                return self._handlers[path]

            self._wrapped[path] = await self._edge.intercept_service(
                found, SimpleNamespace(method=path, invocation_metadata=())
            )
        return self._wrapped[path]


class _Requests:
    """The requests of a stream, for its servicer.

    Attributes:
        newest: The newest request that was read; None before the first.
    """

    def __init__(self, stream: RequestStream, read: Read) -> None:
        self._stream, self._read = stream, read
        self.newest: Any = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        self.newest = self._read(await self._stream.next())
        return self.newest


class _ResponsePath:
    """Delivers the responses of one call; a lost one breaks its stream."""

    def __init__(self, network: MemoryNetwork, call: MemoryCall, copy: int) -> None:
        self._call, self._copy = call, copy
        self._path = OrderedPath(network, call.target, call.source)

    def send(self, answer: CallResponse | CallStatus) -> None:
        call = self._call
        deliver = partial(call.settle, self._copy, answer)
        if not call.streams:
            self._path.send(deliver)
        elif not self._path.send(deliver, partial(call.settle, self._copy, UNAVAILABLE)):
            call.cancel_at_server()
