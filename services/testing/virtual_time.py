"""An event loop whose clock jumps to the next timer instead of waiting for it.

It can also simulate several processes: every task and timer that a `VirtualHost` starts, directly
or indirectly, belongs to that host, and can be frozen and thawed like a process under SIGSTOP and
SIGCONT. The order of events in the loop depends on nothing outside it: no thread, no socket, no
hash of an address or of a string.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

SPINS_MAX = 1_000_000
_HOST: ContextVar[VirtualHost | None] = ContextVar("host", default=None)


class Deadlock(Exception):
    """Every task waits and no timer is set: the program can never go on."""


class Livelock(Exception):
    """The program runs on and on without time passing."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Same ready queue and timers as asyncio's; no real waiting."""

    def __init__(self) -> None:
        super().__init__(_NeverWaits(self))
        self.now_s = 0.0
        self._task_numbers = itertools.count()
        self.set_task_factory(self._new_task)  # type: ignore[arg-type]

    def time(self) -> float:
        """Seconds since the start."""
        return self.now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's; what a host has begun waits while the host is frozen."""
        context = copy_context() if context is None else context
        host = context.get(_HOST)
        if host is None:
            return super().call_soon(callback, *args, context=context)
        gate = _Gate(host, callback, args, context)
        gate.handle = super().call_soon(gate, context=context)
        return gate.handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As asyncio's; what a host has begun waits while the host is frozen."""
        context = copy_context() if context is None else context
        host = context.get(_HOST)
        if host is None:
            return super().call_at(when, callback, *args, context=context)
        gate = _Gate(host, callback, args, context)
        gate.handle = handle = super().call_at(when, gate, context=context)
        return handle

    def run_again(self, gate: _Gate) -> None:
        """Queue what a host had held."""
        super().call_soon(gate, context=gate.context)

    def run_in_executor(self, *_: Any) -> Any:  # type: ignore[override]
        """Refused: there are no threads in virtual time."""
        raise RuntimeError("a thread would not keep to virtual time")

    def _new_task(
        self, _: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **kwargs: Any
    ) -> asyncio.Task[T]:
        task: _NumberedTask = _NumberedTask.__new__(_NumberedTask)
        task.number = next(self._task_numbers)
        task.__init__(coroutine, loop=self, **kwargs)  # type: ignore[misc]
        return task


class VirtualHost:
    """One process: its tasks and timers stand still while it is frozen.

    It can be frozen in a `VirtualTimeLoop` only.
    """

    def __init__(self, name: str) -> None:
        self.name, self.frozen = name, False
        self._held: deque[_Gate] = deque()
        self._context = Context()
        self._context.run(_HOST.set, self)

    def post(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call `callback` as part of the process, once it runs."""
        asyncio.get_running_loop().call_soon(callback, *args, context=self._context.copy())

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of the process; the caller keeps it."""
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    def freeze(self) -> None:
        """Stop, in the middle of whatever it does."""
        self.frozen = True

    def thaw(self) -> None:
        """Go on: first with what has happened meanwhile, in the order in which it did."""
        self.frozen = False
        while self._held:
            _loop().run_again(self._held.popleft())

    def hold(self, gate: _Gate) -> None:
        """Keep what would run now until the process goes on."""
        self._held.append(gate)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time, in place of `asyncio.run`.

    Waiting costs nothing: when every task waits, the clock of the loop jumps to the next timer.
    Threads and sockets are refused. The garbage collector rests meanwhile: it would end abandoned
    generators at times of its own, and no two runs would be alike.

    Raises:
        Deadlock: every task waits, and no timer is set.
        Livelock: the program goes round without time passing.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(main)
    finally:
        if collects:
            gc.enable()


def _loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


class _Gate:
    """A callback of a host; waits while the host is frozen, and can be cancelled all the time."""

    __slots__ = ("args", "callback", "context", "handle", "host")
    handle: asyncio.Handle

    def __init__(
        self,
        host: VirtualHost,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: Context,
    ) -> None:
        self.host, self.callback, self.args, self.context = host, callback, args, context

    def __call__(self) -> None:
        if self.handle.cancelled():
            return
        if self.host.frozen:
            self.host.hold(self)
        else:
            self.callback(*self.args)


class _NumberedTask(asyncio.Task[Any]):
    """A task whose hash does not depend on its address, so that sets of tasks have an order."""

    number: int

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class _NeverWaits(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop
        self._spins = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock
        self._spins = 0 if timeout > 0 else self._spins + 1
        if self._spins > SPINS_MAX:
            raise Livelock
        self._loop.now_s += max(timeout, 0)
        return []
