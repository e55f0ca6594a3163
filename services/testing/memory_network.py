"""An in-memory network with seeded faults: messages between named nodes, and calls made of them.

A call, each response and a client's cancellation are separate messages, which may be delayed,
reordered, duplicated or lost. Responses of other calls and damaged bytes are not simulated, because
gRPC excludes both. `memory_grpc` has the channels and servers on top.
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

from batonmq_server.testing.virtual_time import VirtualHost

Metadata = Sequence[tuple[str, str | bytes]]
RESET_MS = 20
"""How long it takes until a crashed peer or a broken stream is noticed."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Faults of the network between two nodes.

    Attributes:
        loss: Probability that a message is lost; a lost response breaks its stream.
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
        """Called when a client sends a call."""

    def answered(self, call: MemoryCall, request: Any, answer: Any) -> None:
        """Called when a servicer has answered; `answer` is the message, or the error."""

    def told(self, call: MemoryCall, answer: Any) -> None:
        """Called when a client receives an answer; `answer` is the message, or the error."""


class CallReceiver(Protocol):
    """Receives the calls of an address."""

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
            self.later(self.delay_s(), call.cancel_at_server)

    def break_streams(self, host: VirtualHost) -> int:
        """Break all streams that a host reads, at both ends; return their number."""
        broken = [call for call in self._open.get(host, ()) if call.streams and not call.over]
        for call in broken:
            self.later(RESET_MS / 1000, partial(call.break_off, UNAVAILABLE))
            self.later(self.delay_s(), call.cancel_at_server)
        return len(broken)

    def close(self, address: str, *, machine: bool = False) -> None:
        """Refuse the calls of an address from now on.

        Args:
            machine: Whether the machine is gone as well, so that it refuses no connections either.
        """
        self._servers.pop(address, None)
        if not machine:
            self._refused.add(address)

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
            async with asyncio.timeout(1):
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
        copies = 1
        twice = self.faults.duplicate and self._random.random() < self.faults.duplicate
        if twice and not call.writes and not call.method.startswith("Watch"):
            self.counts["duplicated"] += 1
            copies = 2
        for copy in range(copies):
            self.send(call.source, call.target, partial(self._arrive, call, copy))

    def end_call(self, call: MemoryCall) -> None:
        """End a call at its client, and send the cancellation to the server."""
        if call.over:
            return
        call.over = True
        del self._open[call.host][call]
        if not call.tasks or not all(task.done() for task in call.tasks):
            self.send(call.source, call.target, call.cancel_at_server)

    def _arrive(self, call: MemoryCall, copy: int) -> None:
        server = self._servers.get(call.address)
        if server is None:
            self.later(RESET_MS / 1000, lambda: call.settle(copy, UNAVAILABLE))
        else:
            server.arrive(call, copy)


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
END = CallStatus(grpc.StatusCode.OK)
"""Follows the last response of a stream."""


@dataclass(frozen=True, slots=True)
class CallResponse:
    """A serialized response, with its trailing metadata."""

    raw: bytes
    metadata: Metadata = ()


class MemoryCall:
    """One call, at its client and at its server.

    Attributes:
        number: Number of the call, in the order of their start.
        method: Name of the method without the service, such as "Pull".
        streams: Whether the method has a stream of responses.
        writes: Whether the client sends a stream of requests.
        requests: Serialized requests of the stream that have arrived at the server; None: no more
            will follow.
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
        self.streams = self.writes = False
        self.over = False
        self.requests: deque[bytes | None] = deque()
        self._request_arrived = asyncio.Event()
        self._last_request_s = 0.0
        self.tasks: list[asyncio.Task[None]] = []
        self._answers: deque[CallResponse | CallStatus] = deque()
        self._arrived = asyncio.Event()
        self._copy: int | None = None

    async def next(self) -> CallResponse:
        """Return the next response.

        Raises:
            AioRpcError: the call has failed.
            StopAsyncIteration: the stream has ended.
        """
        while not self._answers:
            self._arrived.clear()
            await self._arrived.wait()
        answer = self._answers.popleft()
        if answer is END:
            raise StopAsyncIteration
        if isinstance(answer, CallStatus):
            raise answer.error()
        return answer

    def write(self, raw: bytes | None) -> None:
        """Send a request of the stream to the server; a lost one breaks the stream at both ends."""
        network = self.network
        arrival_s = max(network.loop.time() + network.delay_s(), self._last_request_s)
        self._last_request_s = arrival_s
        if network.lost(self.source, self.target):
            network.later(RESET_MS / 1000, partial(self.break_off, UNAVAILABLE))
            network.later(network.delay_s(), self.cancel_at_server)
            return
        network.later(arrival_s - network.loop.time(), partial(self._take_request, raw))

    def _take_request(self, raw: bytes | None) -> None:
        self.requests.append(raw)
        self._request_arrived.set()

    async def next_request(self) -> bytes | None:
        """Return the next request of the stream at the server; None after the last one."""
        while not self.requests:
            self._request_arrived.clear()
            await self._request_arrived.wait()
        return self.requests.popleft()

    def settle(self, copy: int, answer: CallResponse | CallStatus) -> None:
        """Deliver a response to the client; responses to a duplicate of the call are ignored."""
        if self.over or self._copy not in (None, copy):
            self.network.counts["late"] += 1
            return
        self._copy = copy
        self._answers.append(answer)
        self._arrived.set()

    def break_off(self, status: CallStatus) -> None:
        """Fail the call at the client."""
        self._copy = -1
        self._answers.append(status)
        self._arrived.set()

    def cancel_at_server(self) -> None:
        """Cancel the call at the server."""
        for task in self.tasks:
            task.cancel()
