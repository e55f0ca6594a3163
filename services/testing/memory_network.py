"""An in-memory network with seeded faults: messages between named nodes, and calls made of them.

A call, each answer to it and a client's cancellation are messages of their own, which may be
late, overtake each other, come twice or never. Not played are answers that belong to another
call, and damaged bytes: gRPC excludes both. `wire` has the channels and servers on top.
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
"""A peer that is gone, or a stream that broke, is noticed after this time."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What the way between two nodes does to a message.

    Attributes:
        loss: Probability that a message never arrives. A stream of answers breaks with it.
        duplicate: Probability that a call arrives twice, the second time later.
        slow: Probability that a message takes up to `slow_ms_max` instead of `delay_ms_max`.
        delay_ms_min: Shortest time on the way.
        delay_ms_max: Longest time on the way, if it is not slow.
        slow_ms_max: Longest time on the way of all; more than most deadlines.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    delay_ms_min: int = 1
    delay_ms_max: int = 10
    slow_ms_max: int = 8_000


class NetworkObserver:
    """Sees what passes, as it happens; this one looks away."""

    def called(self, call: MemoryCall, request: Any) -> None:
        """A call leaves its client."""

    def answered(self, call: MemoryCall, request: Any, answer: Any) -> None:
        """A servicer has answered; `answer` is the message, or the error."""

    def told(self, call: MemoryCall, answer: Any) -> None:
        """A client learns an answer; `answer` is the message, or the error."""


class CallReceiver(Protocol):
    """Who answers calls at an address."""

    def arrive(self, call: MemoryCall, copy: int) -> None:
        """A call, or its second copy, comes in."""


class MemoryNetwork:
    """Delivers between named nodes.

    Attributes:
        cut: The (source, target) pairs that are down.
        gone: Hosts that have crashed.

    Args:
        random: Draws what happens to each message.
    """

    def __init__(self, random: Random, watcher: NetworkObserver) -> None:
        self.loop, self.watcher, self._random = asyncio.get_running_loop(), watcher, random
        self.faults = Faults()
        self.cut: set[tuple[str, str]] = set()
        self.gone: set[VirtualHost] = set()
        self.counts: Counter[str] = Counter()
        self._servers: dict[str, CallReceiver] = {}
        self._open: dict[VirtualHost, dict[MemoryCall, None]] = {}
        self._calls = 0
        self._over = False

    def later(self, delay_s: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        """Call `callback` later, on behalf of no host."""
        return self.loop.call_later(delay_s, callback, context=Context())

    def delay_s(self) -> float:
        """How long the next message takes."""
        faults, random = self.faults, self._random
        longest = faults.delay_ms_max
        if faults.slow and random.random() < faults.slow:
            self.counts["slow"] += 1
            longest = faults.slow_ms_max
        return random.uniform(faults.delay_ms_min, longest) / 1000

    def lost(self, source: str, target: str) -> bool:
        """Whether the next message between the two gets lost."""
        if self._over or (source, target) in self.cut:
            self.counts["cut"] += 1
            return True
        if self.faults.loss and self._random.random() < self.faults.loss:
            self.counts["lost"] += 1
            return True
        return False

    def send(self, source: str, target: str, deliver: Callable[[], object]) -> bool:
        """Send one message; False if it gets lost."""
        if self.lost(source, target):
            return False
        self.later(self.delay_s(), deliver)
        return True

    def serve(self, address: str, server: CallReceiver) -> None:
        """Let `server` answer at `address` from now on."""
        self._servers[address] = server

    def crash(self, host: VirtualHost) -> None:
        """The calls that `host` waits for have no client any more; servers notice in time.

        It makes no new ones.
        """
        self.gone.add(host)
        for call in self._open.pop(host, ()):
            call.over = True
            self.later(self.delay_s(), call.cancel_at_server)

    def break_streams(self, host: VirtualHost) -> int:
        """Every stream that `host` reads breaks, at both ends; how many there were."""
        broken = [call for call in self._open.get(host, ()) if call.streams and not call.over]
        for call in broken:
            self.later(RESET_MS / 1000, partial(call.break_off, UNAVAILABLE))
            self.later(self.delay_s(), call.cancel_at_server)
        return len(broken)

    def close(self, address: str) -> None:
        """Nobody answers at `address` any more."""
        self._servers.pop(address, None)

    def end(self) -> None:
        """The run is over: nothing is sent any more, every call fails."""
        self._over = True
        self._servers.clear()

    def number(self) -> int:
        """A number for a call."""
        self._calls += 1
        return self._calls

    def begin(self, call: MemoryCall) -> None:
        """Send the call to its server, perhaps twice."""
        self._open.setdefault(call.host, {})[call] = None
        if self._over or call.host in self.gone:
            call.settle(0, UNAVAILABLE)
            return
        copies = 1
        twice = self.faults.duplicate and self._random.random() < self.faults.duplicate
        if twice and not call.method.startswith("Watch"):
            self.counts["duplicated"] += 1
            copies = 2
        for copy in range(copies):
            self.send(call.source, call.target, partial(self._arrive, call, copy))

    def end_call(self, call: MemoryCall) -> None:
        """The client waits for no more answers; it tells the server if that still works."""
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


@dataclass(frozen=True, slots=True)
class CallStatus:
    """How a call failed."""

    code: grpc.StatusCode
    details: str = ""
    metadata: Metadata = ()

    def error(self) -> grpc.aio.AioRpcError:
        """The error as a stub raises it."""
        trailing = grpc.aio.Metadata(*self.metadata)
        return grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), trailing, self.details)


UNAVAILABLE = CallStatus(grpc.StatusCode.UNAVAILABLE, "connection refused or reset")
END = CallStatus(grpc.StatusCode.OK)
"""After the last answer of a stream."""


@dataclass(frozen=True, slots=True)
class CallResponse:
    """What a servicer has answered, serialized, with its trailing metadata."""

    raw: bytes
    metadata: Metadata = ()


class MemoryCall:
    """One call, at its client and at its server.

    Attributes:
        number: In order of their beginning.
        method: Without the service, "Pull".
        streams: Whether there may be several answers.
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
        self.streams = False
        self.over = False
        self.tasks: list[asyncio.Task[None]] = []
        self._answers: deque[CallResponse | CallStatus] = deque()
        self._arrived = asyncio.Event()
        self._copy: int | None = None

    async def next(self) -> CallResponse:
        """The next answer.

        Raises:
            AioRpcError: the call has failed.
            StopAsyncIteration: there is none.
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

    def settle(self, copy: int, answer: CallResponse | CallStatus) -> None:
        """An answer arrives at the client; only those of one copy of the call count."""
        if self.over or self._copy not in (None, copy):
            self.network.counts["late"] += 1
            return
        self._copy = copy
        self._answers.append(answer)
        self._arrived.set()

    def break_off(self, status: CallStatus) -> None:
        """No more answers arrive at the client."""
        self._copy = -1
        self._answers.append(status)
        self._arrived.set()

    def cancel_at_server(self) -> None:
        """The client's cancellation arrives at the server."""
        for task in self.tasks:
            task.cancel()
