"""Makes the small and frequent calls of a channel over one stream (Exchange of CallService).

A call of its own costs gRPC several times as much as two messages on an open stream, on both sides.
Such a call does what it would do alone: it has its deadline, and its error is that of the method.
If the stream breaks, its calls fail as if the connection of each had broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import grpc
import grpc.aio

from baton.calls.v1 import call_service_pb2 as pb
from baton.calls.v1 import call_service_pb2_grpc as pb_grpc
from batonmq._common import timeouts
from batonmq._common.rpc import STATUS_TRAILER
from batonmq._connection.wrapped_channel import WrappedChannel

STREAMED = frozenset(
    {
        "/baton.storage.v1.StorageService/Append",
        "/baton.storage.v1.TransactionService/Begin",
        "/baton.storage.v1.TransactionService/End",
        "/baton.storage.v1.ReplyService/Reply",
        "/baton.offsets.v1.OffsetsService/RecordDelivered",
        "/baton.offsets.v1.OffsetsService/Commit",
    }
)
"""The methods of calls that go over the stream."""
CALL_BYTES_MAX = 256 * 1024
"""A larger request is a call of its own: it would delay others, and gains nothing."""
IDLE_S = 20.0
"""A stream without calls for so long is ended."""
TIMEOUT_S_MAX = 86_400.0
"""Longest timeout of a call."""
END_S = 0.5
"""Longest wait for the end of cancelled calls when the last channel of a loop is closed."""
UNKNOWN_S = 60.0
"""Time until a server without `CallService`, of an earlier version, is tried again."""

_CALL_END = "_AioCall._handle_status_once_received"
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_NOTHING = grpc.aio.Metadata()
_OPEN_CHANNELS = WeakKeyDictionary[asyncio.AbstractEventLoop, "WeakSet[StreamingChannel]"]()
"""The channels of each event loop that are not closed."""
Exchange = grpc.aio.StreamStreamCall[pb.ExchangeRequest, pb.ExchangeResponse]
Open = Callable[[], Exchange]


class UnknownMethod(Exception):
    """The server does not have `CallService`: it is of an earlier version."""


class _UnsentCall(NamedTuple):
    method: str
    request: bytes
    end_s: float


class PendingReply(NamedTuple):
    """A call that has begun: its number, its reply, and the timer of its deadline."""

    call_id: int
    reply: asyncio.Future[pb.Reply]
    timer: asyncio.TimerHandle


class CallStream:
    """One stream, from its first call until it breaks, is idle, or is retired.

    Attributes:
        closed: Whether it takes no more calls.
    """

    def __init__(self, open_call: Open) -> None:
        self._open = open_call
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[pb.Reply]] = {}
        self._unsent: dict[int, _UnsentCall] = {}
        self._accepted, self._changed = asyncio.Event(), asyncio.Event()
        self._last_id = 0
        self._failure: Exception = _error(
            grpc.StatusCode.UNAVAILABLE, "the stream of calls has ended"
        )
        self.closed = False

    def begin(self, method: str, request: bytes, timeout_s: float) -> PendingReply:
        """Begin a call. `response` waits for its reply."""
        end_s = self._loop.time() + min(timeout_s, TIMEOUT_S_MAX)
        self._last_id = call_id = self._last_id + 1
        future = self._waiting[call_id] = self._loop.create_future()
        self._unsent[call_id] = _UnsentCall(method, request, end_s)
        self._changed.set()
        return PendingReply(call_id, future, self._loop.call_at(end_s, self._expire, call_id))

    async def response(self, pending: PendingReply) -> bytes:
        """Return the encoded response of a call.

        Raises:
            AioRpcError: The call has failed, or the stream has broken.
            UnknownMethod: Nothing was called.
        """
        call_id, future, timer = pending
        try:
            reply = await future
        finally:
            timer.cancel()
            self._forget(call_id)
        if reply.code:
            trailers = ((STATUS_TRAILER, reply.details),) if reply.details else ()
            code = _CODES.get(reply.code, grpc.StatusCode.UNKNOWN)
            raise _error(code, reply.message, grpc.aio.Metadata(*trailers))
        return reply.response

    def retire(self) -> None:
        """Take no more calls, and end when all have their replies."""
        self.closed = True
        self._changed.set()

    async def run(self) -> None:
        """Exchange calls and replies until the stream ends; then call `end`."""
        try:
            call = self._open()
            try:
                await self._exchange(call)
            finally:
                self.closed = True
                call.cancel()
        except grpc.aio.UsageError as error:  # the channel is closed
            self._failure = _error(grpc.StatusCode.UNAVAILABLE, str(error))

    def end(self) -> None:
        """Fail the calls without a reply; `run` has ended, or never begun."""
        self.closed = True
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(self._failure)

    async def _exchange(self, call: Exchange) -> None:
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write(call))
            try:
                async for response in call:
                    self._accepted.set()
                    for reply in response.replies:
                        self._settle(reply)
                    if response.closing:
                        self.retire()
            except grpc.aio.AioRpcError as error:
                self._failure = self._failure_of(error)
            finally:
                self.closed = True
                writing.cancel()

    def _failure_of(self, error: grpc.aio.AioRpcError) -> Exception:
        """Return the error of the calls without a reply.

        A stream that was accepted and then ends, as with its credentials, says nothing about the
        calls on their way: another stream may take them.
        """
        if self._accepted.is_set() and error.code() is not grpc.StatusCode.UNAVAILABLE:
            return _error(
                grpc.StatusCode.UNAVAILABLE, f"the stream of calls ended: {error.details()}"
            )
        return UnknownMethod() if error.code() is grpc.StatusCode.UNIMPLEMENTED else error

    async def _write(self, call: Exchange) -> None:
        """Send calls once the server has accepted the stream.

        gRPC loses the status of a stream that ends while something is written to it.
        """
        await self._accepted.wait()
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            while await self._has_calls():
                await call.write(pb.ExchangeRequest(calls=self._take()))
            await call.done_writing()
        # reading the call shows why it has ended

    async def _has_calls(self) -> bool:
        """Wait for calls to send; return False if the stream is idle or retired."""
        while not self._unsent:
            if self.closed:
                return False
            self._changed.clear()
            try:
                async with timeouts.timeout(IDLE_S):
                    await self._changed.wait()
            except TimeoutError:
                if not self._waiting:
                    self.closed = True
        return True

    def _take(self) -> list[pb.Call]:
        """Return the next calls to send together."""
        calls: list[pb.Call] = []
        bytes_count, now_s = 0, self._loop.time()
        while self._unsent and bytes_count < CALL_BYTES_MAX:
            call_id = next(iter(self._unsent))
            method, request, end_s = self._unsent.pop(call_id)
            left_ms = max(1, int((end_s - now_s) * 1000))
            calls.append(
                pb.Call(call_id=call_id, method=method, timeout_ms=left_ms, request=request)
            )
            bytes_count += len(request)
        return calls

    def _settle(self, reply: pb.Reply) -> None:
        """Give a reply to its caller, if that still waits."""
        future = self._forget(reply.call_id)
        if future is not None and not future.done():
            future.set_result(reply)

    def _expire(self, call_id: int) -> None:
        future = self._forget(call_id)
        if future is not None and not future.done():
            future.set_exception(_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _forget(self, call_id: int) -> asyncio.Future[pb.Reply] | None:
        self._unsent.pop(call_id, None)
        return self._waiting.pop(call_id, None)


class BegunCall:
    """A call that has begun on the stream. Awaiting it returns the response."""

    __slots__ = ("_response",)

    def __init__(self, response: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._response = response

    def __await__(self) -> Generator[Any, None, Any]:
        return self._response().__await__()


async def _all_ended() -> None:
    """Wait until gRPC has the end of all calls of the event loop; closing a channel does not.

    If the loop is closed before, gRPC logs "Event loop is closed" in the next loop of the process.
    It has a task for the end of each call, and no public way to wait for it. Calls on channels of
    the program's own may go on: the wait is short.
    """
    tasks = asyncio.all_tasks()
    if ends := [one for one in tasks if getattr(one.get_coro(), "__qualname__", "") == _CALL_END]:
        await asyncio.wait(ends, timeout=END_S)


class StreamingChannel(WrappedChannel):
    """A channel that makes the calls of `STREAMED` methods over one stream.

    If the server does not have `CallService`, the channel makes each of them alone.

    Args:
        channel: The channel of the stream and of all other calls.
        credentials: Returns what new calls identify themselves with. When it changes, another
            stream takes the next calls.

    Attributes:
        channel: As given.
    """

    def __init__(
        self, channel: grpc.aio.Channel, credentials: Callable[[], object] = lambda: None
    ) -> None:
        self.channel, self._credentials = channel, credentials
        self._exchange = pb_grpc.CallServiceStub(channel).Exchange
        self._open = _OPEN_CHANNELS.setdefault(asyncio.get_running_loop(), WeakSet())
        self._open.add(self)
        self._stream: CallStream | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._shown: object = None
        self._unknown_until_s = 0.0

    async def close(self, grace: float | None = None) -> None:
        """Close the channel; calls in flight end."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.channel.close(grace)
        self._open.discard(self)
        if not self._open:
            await _all_ended()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the connection."""
        return self.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the connection is in another state."""
        await self.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until there is a connection."""
        await self.channel.channel_ready()

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        *args: Any,
        **given: Any,
    ) -> Any:
        """As in `grpc.aio.Channel`; a call of a streamed method can only be awaited."""
        if method not in STREAMED:
            return self.channel.unary_unary(
                method, request_serializer, response_deserializer, *args, **given
            )
        alone: Any = self.channel.unary_unary(method, None, response_deserializer, *args, **given)
        encode, decode = request_serializer or bytes, response_deserializer or bytes

        def call(request: Any, **options: Any) -> Awaitable[Any]:
            raw, timeout_s = encode(request), options.get("timeout")
            small = len(options) == 1 and len(raw) <= CALL_BYTES_MAX
            supported = asyncio.get_running_loop().time() >= self._unknown_until_s
            if timeout_s is None or not (small and supported):
                begun: Awaitable[Any] = alone(raw, **options)
                return begun
            stream = self._current()
            pending = stream.begin(method, raw, timeout_s)

            async def response() -> Any:
                try:
                    return decode(await stream.response(pending))
                except UnknownMethod:
                    self._unknown_until_s = asyncio.get_running_loop().time() + UNKNOWN_S
                    return await alone(raw, **options)

            return BegunCall(response)

        return call

    def _current(self) -> CallStream:
        """Return the stream for a call that begins now."""
        stream, credentials = self._stream, self._credentials()
        if stream is not None and credentials != self._shown:
            stream.retire()
        if stream is None or stream.closed:
            stream, self._shown = CallStream(self._exchange), credentials
            self._stream = stream
            task = asyncio.ensure_future(stream.run())  # noqa: TID251  ended by `close`
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, stream))
        return stream

    def _ended(self, stream: CallStream, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        stream.end()

    def unary_stream(self, *args: Any, **given: Any) -> Any:
        """As in `grpc.aio.Channel`."""
        return self.channel.unary_stream(*args, **given)

    def stream_unary(self, *args: Any, **given: Any) -> Any:
        """As in `grpc.aio.Channel`."""
        return self.channel.stream_unary(*args, **given)

    def stream_stream(self, *args: Any, **given: Any) -> Any:
        """As in `grpc.aio.Channel`."""
        return self.channel.stream_stream(*args, **given)


def _error(
    code: grpc.StatusCode, details: str, trailers: grpc.aio.Metadata = _NOTHING
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, _NOTHING, trailers, details)
