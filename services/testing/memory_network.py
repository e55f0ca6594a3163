"""An in-memory network with seeded faults: messages between named nodes, and calls made of them.

A call, each response and a client's cancellation are separate messages, which may be delayed,
reordered, duplicated or lost. The messages of one stream, in each direction, keep their order and
are not duplicated; a lost one breaks the stream. Responses of other calls and damaged bytes are not
simulated, because gRPC excludes both. `memory_grpc` has the channels and servers on top.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Protocol

import grpc
import grpc.aio

from batonmq._common import timeouts
from batonmq_server.testing.virtual_time import VirtualHost

Metadata = Sequence[tuple[str, str | bytes]]
RESET_MS = 20
"""How long it takes until a crashed peer or a broken stream is noticed."""
KEEPALIVE_MS = 4_500
"""How long it takes until a peer whose machine is gone is noticed: the interval and the time limit
of the pings of `batonmq._connection.channels`."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Faults of the network between two nodes.

    Attributes:
        loss: Probability that a message is lost; a lost message of a stream breaks the stream.
        duplicate: Probability that a call arrives twice.
        slow: Probability that a message takes up to `slow_ms_max` instead of `delay_ms_max`.
        delay_ms_min: Shortest delay of a message.
        delay_ms_max: Longest delay of a message that is not slow.
        slow_ms_max: Longest delay of a slow message; longer than most deadlines.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    delay_ms_min: int = 1
    delay_ms_max: int = 10
    slow_ms_max: int = 8_000


class NetworkObserver:
    """Observes calls and responses; this base class ignores them."""

    def called(self, call: MemoryCall, request: Any) -> None:
        """Called when a client sends a call; of a stream of requests, for each request."""

    def answered(self, call: MemoryCall, request: Any, answer: Any) -> None:
        """Called when a servicer has answered; `answer` is the message, or the error.

        Args:
            request: The request; of a stream, the newest that the servicer has read, or None.
        """

    def told(self, call: MemoryCall, answer: Any) -> None:
        """Called when a client receives an answer; `answer` is the message, or the error."""


class CallReceiver(Protocol):
    """Receives the calls of an address."""

    host: VirtualHost

    def arrive(self, call: MemoryCall, copy: int) -> None:
        """Receive a call, or its duplicate."""


class MemoryNetwork:
    """Delivers messages between named nodes.

    Args:
        random: Decides about the faults of each message.
        watcher: Observes calls and responses.

    Attributes:
        cut: Pairs (source, target) with a cut connection.
        gone: Hosts that have crashed.
    """

    def __init__(self, random: Random, watcher: NetworkObserver) -> None:
        self.loop, self.watcher, self._random = asyncio.get_running_loop(), watcher, random
        self.faults = Faults()
        self.cut: set[tuple[str, str]] = set()
        self.gone: set[VirtualHost] = set()
        self.counts: Counter[str] = Counter()
        self._servers: dict[str, CallReceiver] = {}
        self._refused: set[str] = set()
        self._open: dict[VirtualHost, dict[MemoryCall, None]] = {}
        self._calls = 0
        self._over = False

    def later(self, delay_s: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        """Call `callback` later, outside of any host."""
        return self.loop.call_later(delay_s, callback, context=Context())

    def delay_s(self) -> float:
        """Return the delay of the next message, in seconds."""
        faults, random = self.faults, self._random
        longest = faults.delay_ms_max
        if faults.slow and random.random() < faults.slow:
            self.counts["slow"] += 1
            longest = faults.slow_ms_max
        return random.uniform(faults.delay_ms_min, longest) / 1000

    def lost(self, source: str, target: str) -> bool:
        """Return whether the next message between the two nodes is lost."""
        if self._over or (source, target) in self.cut:
            self.counts["cut"] += 1
            return True
        if self.faults.loss and self._random.random() < self.faults.loss:
            self.counts["lost"] += 1
            return True
        return False

    def send(self, source: str, target: str, deliver: Callable[[], object]) -> bool:
        """Send a message; return False if it is lost."""
        if self.lost(source, target):
            return False
        self.later(self.delay_s(), deliver)
        return True

    def serve(self, address: str, server: CallReceiver) -> None:
        """Make `server` receive the calls of an address."""
        self._servers[address] = server
        self._refused.discard(address)

    def crash(self, host: VirtualHost) -> None:
        """Crash a host: its calls are cancelled at their servers, and it can send no new ones."""
        self.gone.add(host)
        for call in self._open.pop(host, ()):
            call.over = True
            self._cancel(call)

    def break_streams(self, host: VirtualHost) -> int:
        """Break all streams that a host reads, at both ends; return their number."""
        broken = [call for call in self._open.get(host, ()) if call.streams and not call.over]
        for call in broken:
            self.later(RESET_MS / 1000, partial(call.break_off, UNAVAILABLE))
            self._cancel(call)
        return len(broken)

    def close(self, address: str, *, machine: bool = False) -> None:
        """Refuse the calls of an address from now on.

        Args:
            machine: Whether the machine is gone as well, so that it refuses no connections either.
        """
        self._servers.pop(address, None)
        if not machine:
            self._refused.add(address)
            return
        for calls in self._open.values():
            for call in calls:
                if call.address == address:
                    self.later(KEEPALIVE_MS / 1000, call.break_off_unanswered)

    async def refuses(self, host: VirtualHost, address: str) -> bool:
        """Return whether a process is known to have ended, as its machine refuses connections.

        A server that crashed unnoticed, as with its machine, does not refuse them.
        """
        target = address.partition(":")[0]
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def arrive() -> None:
            refused = address in self._refused
            self.send(target, host.name, partial(_settle, answer, refused))

        self.send(host.name, target, arrive)
        try:
            async with timeouts.timeout(1):
                return bool(await answer)
        except TimeoutError:
            return False

    def end(self) -> None:
        """End the simulation: no message is sent any more, and every call fails."""
        self._over = True
        self._servers.clear()

    def number(self) -> int:
        """Return the number of a new call."""
        self._calls += 1
        return self._calls

    def begin(self, call: MemoryCall) -> None:
        """Send a call to its server, possibly twice."""
        self._open.setdefault(call.host, {})[call] = None
        if self._over or call.host in self.gone:
            call.settle(0, UNAVAILABLE)
            return
        if call.requests is not None:
            self._send_in_order(call, partial(self._arrive, call, 0))
            return
        copies = 1
        twice = self.faults.duplicate and self._random.random() < self.faults.duplicate
        if twice and not call.method.startswith("Watch"):
            self.counts["duplicated"] += 1
            copies = 2
        for copy in range(copies):
            self.send(call.source, call.target, partial(self._arrive, call, copy))

    def write(self, call: MemoryCall, request: bytes | CallStatus) -> None:
        """Send a request of a stream to its server, or END after the last one."""
        assert call.requests is not None, f"{call.method} has one request"
        self._send_in_order(call, partial(self._deliver, call, call.requests.put, request))

    def end_call(self, call: MemoryCall) -> None:
        """End a call at its client, and send the cancellation to the server."""
        if call.over:
            return
        call.give_up()
        del self._open[call.host][call]
        if call.tasks and all(task.done() for task in call.tasks):
            return
        if call.requests is not None:
            self._cancel(call)
        else:
            self.send(call.source, call.target, call.cancel_at_server)

    def _arrive(self, call: MemoryCall, copy: int) -> None:
        server = self._servers.get(call.address)
        if server is None:
            self.later(RESET_MS / 1000, lambda: call.settle(copy, UNAVAILABLE))
        else:
            call.server_host = server.host
            server.arrive(call, copy)

    def _cancel(self, call: MemoryCall) -> None:
        """Send a cancellation that arrives in any case."""
        if call.requests is not None:
            self._send_in_order(call, partial(self._deliver, call, call.cancel_at_server))
        else:
            self.later(self.delay_s(), call.cancel_at_server)

    def _send_in_order(self, call: MemoryCall, deliver: Callable[[], object]) -> None:
        """Send a message of the client of a stream; if it is lost, the stream breaks."""
        assert call.requests is not None, f"{call.method} has one request"
        reset = partial(self._deliver, call, call.cancel_at_server)
        if not call.requests.path.send(deliver, reset):
            self.later(RESET_MS / 1000, partial(call.break_off, UNAVAILABLE))

    def _deliver(self, call: MemoryCall, receive: Callable[..., object], *args: object) -> None:
        """Deliver a message to the server that received the call, if there is one."""
        host = call.server_host
        if host is None:
            return
        if host not in self.gone:
            host.post(receive, *args)
        elif call.address in self._servers or call.address in self._refused:
            # The machine runs, and does not know the connection.
            self.later(RESET_MS / 1000, partial(call.break_off, UNAVAILABLE))


def _settle(answer: asyncio.Future[bool], value: bool) -> None:
    if not answer.done():
        answer.set_result(value)


@dataclass(frozen=True, slots=True)
class CallStatus:
    """The status of a failed call."""

    code: grpc.StatusCode
    details: str = ""
    metadata: Metadata = ()

    def error(self) -> grpc.aio.AioRpcError:
        """Return the error that a stub raises."""
        trailing = grpc.aio.Metadata(*self.metadata)
        return grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), trailing, self.details)


UNAVAILABLE = CallStatus(grpc.StatusCode.UNAVAILABLE, "connection refused or reset")
UNIMPLEMENTED = CallStatus(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
END = CallStatus(grpc.StatusCode.OK)
"""Follows the last response of a stream."""


@dataclass(frozen=True, slots=True)
class CallResponse:
    """A serialized response, with its trailing metadata."""

    raw: bytes
    metadata: Metadata = ()


class OrderedPath:
    """Delivers messages from `source` to `target` in order; after a lost one, all others are lost.

    Args:
        source: Name of the node that sends.
        target: Name of the node that receives.
    """

    def __init__(self, network: MemoryNetwork, source: str, target: str) -> None:
        self._network, self._source, self._target = network, source, target
        self._last_s = 0.0
        self._broken = False
        self._travelling: deque[Callable[[], object]] = deque()

    def send(
        self, deliver: Callable[[], object], reset: Callable[[], object] | None = None
    ) -> bool:
        """Send a message; return False if it is lost, and the path was not broken before.

        Args:
            deliver: Called when the message arrives.
            reset: Called in its place if it is lost.
        """
        network = self._network
        if self._broken:
            return True
        now_s = network.loop.time()
        self._last_s = max(now_s + network.delay_s(), self._last_s)
        self._broken = network.lost(self._source, self._target)
        arrive = reset if self._broken else deliver
        if arrive is not None:
            self._travelling.append(arrive)
            network.later(self._last_s - now_s, self._arrive)
        return not self._broken

    def _arrive(self) -> None:
        self._travelling.popleft()()


class RequestStream:
    """The requests of a stream: on their way, and at the server.

    Attributes:
        path: Delivers the call, its requests and its cancellation.
    """

    def __init__(self, path: OrderedPath) -> None:
        self.path = path
        self._received: asyncio.Queue[bytes | CallStatus] = asyncio.Queue()

    def put(self, request: bytes | CallStatus) -> None:
        """Receive a request, or END."""
        self._received.put_nowait(request)

    async def next(self) -> bytes:
        """Return the next request.

        Raises:
            StopAsyncIteration: the client sends no more.
        """
        request = await self._received.get()
        if isinstance(request, CallStatus):
            self.put(request)
            raise StopAsyncIteration
        return request


class MemoryCall:
    """One call, at its client and at its server.

    Attributes:
        number: Number of the call, in the order of their start.
        method: Name of the method without the service, such as "Pull".
        streams: Whether the method has a stream of responses.
        requests: The stream of requests; None if the method has one request.
        metadata: Headers of the call.
        server_host: Host of the server that received the call; None before that.
    """

    def __init__(
        self,
        network: MemoryNetwork,
        host: VirtualHost,
        address: str,
        path: str,
        timeout_s: float | None,
    ) -> None:
        self.network, self.host, self.address, self.path = network, host, address, path
        self.source, self.target = host.name, address.partition(":")[0]
        self.method = path.rpartition("/")[2]
        self.number = network.number()
        self.timeout_s = timeout_s
        self.raw = b""
        self.metadata: Metadata = ()
        self.streams = False
        self.requests: RequestStream | None = None
        self.server_host: VirtualHost | None = None
        self.over = False
        self.tasks: list[asyncio.Task[None]] = []
        self._answers: deque[CallResponse | CallStatus] = deque()
        self._arrived = asyncio.Event()
        self._copy: int | None = None

    async def next(self) -> CallResponse:
        """Return the next response.

        Raises:
            AioRpcError: the call has failed.
            StopAsyncIteration: the stream has ended.
            CancelledError: the client has cancelled the call.
        """
        while not self._answers:
            if self.over:
                raise asyncio.CancelledError
            self._arrived.clear()
            await self._arrived.wait()
        answer = self._answers.popleft()
        if answer is END:
            raise StopAsyncIteration
        if isinstance(answer, CallStatus):
            raise answer.error()
        return answer

    @property
    def ended(self) -> bool:
        """Whether the client knows that the call has ended, and has read all responses."""
        return self.over or (bool(self._answers) and isinstance(self._answers[0], CallStatus))

    def settle(self, copy: int, answer: CallResponse | CallStatus) -> None:
        """Deliver a response to the client; responses to a duplicate of the call are ignored."""
        if self.over or self._copy not in (None, copy):
            self.network.counts["late"] += 1
            return
        self._copy = copy
        self._answers.append(answer)
        self._arrived.set()

    def give_up(self) -> None:
        """End the call at the client, which reads no more responses."""
        self.over = True
        self._answers.clear()
        self._arrived.set()

    def break_off(self, status: CallStatus) -> None:
        """Fail the call at the client."""
        self._copy = -1
        self._answers.append(status)
        self._arrived.set()

    def break_off_unanswered(self) -> None:
        """Fail the call at the client, unless it has ended."""
        if not (self.ended or (self._answers and self._answers[-1] is END)):
            self.break_off(UNAVAILABLE)

    def cancel_at_server(self) -> None:
        """Cancel the call at the server."""
        for task in self.tasks:
            task.cancel()
