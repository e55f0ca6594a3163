"""An event loop with a clock that jumps to the next timer instead of waiting for it.

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
    """Every task waits and no timer is set, so the program can't continue."""


class Livelock(Exception):
    """The program keeps running without time passing."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop like that of asyncio, with a clock that jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__(_NeverWaits(self))
        self.now_s = 0.0
        self._task_numbers = itertools.count()
        self.set_task_factory(self._new_task)  # type: ignore[arg-type]

    def time(self) -> float:
        """Return the seconds since the start."""
        return self.now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """See asyncio; a callback of a frozen host waits until the host is thawed."""
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
        """See asyncio; a callback of a frozen host waits until the host is thawed."""
        context = copy_context() if context is None else context
        host = context.get(_HOST)
        if host is None:
            return super().call_at(when, callback, *args, context=context)
        gate = _Gate(host, callback, args, context)
        gate.handle = handle = super().call_at(when, gate, context=context)
        return handle

    def run_again(self, gate: _Gate) -> None:
        """Queue a callback that a frozen host had kept."""
        super().call_soon(gate, context=gate.context)

    def run_in_executor(self, *_: Any) -> Any:  # type: ignore[override]
        """Raise RuntimeError: there are no threads in virtual time."""
        raise RuntimeError("threads can't be used in virtual time")

    def _new_task(
        self, _: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **kwargs: Any
    ) -> asyncio.Task[T]:
        task: _NumberedTask = _NumberedTask.__new__(_NumberedTask)
        task.number = next(self._task_numbers)
        task.__init__(coroutine, loop=self, **kwargs)  # type: ignore[misc]
        return task


class VirtualHost:
    """A simulated process: its tasks and timers wait while it is frozen.

    It can be frozen in a `VirtualTimeLoop` only.
    """

    def __init__(self, name: str) -> None:
        self.name, self.frozen = name, False
        self._held: deque[_Gate] = deque()
        self._context = Context()
        self._context.run(_HOST.set, self)

    def post(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call `callback` as part of the process; if it is frozen, after it is thawed."""
        asyncio.get_running_loop().call_soon(callback, *args, context=self._context.copy())

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task of the process; the caller must keep a reference."""
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    def freeze(self) -> None:
        """Suspend the process at any point of its work."""
        self.frozen = True

    def thaw(self) -> None:
        """Resume the process; first run the callbacks that became due meanwhile, in their order."""
        self.frozen = False
        while self._held:
            _loop().run_again(self._held.popleft())

    def hold(self, gate: _Gate) -> None:
        """Keep a callback until the process is thawed."""
        self._held.append(gate)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time and return its result, like `asyncio.run`.

    Waiting takes no time: when every task waits, the clock of the loop jumps to the next timer.
    Threads and sockets are not available. The garbage collector is off meanwhile, because it would
    close abandoned generators at random times, and runs would differ.

    Raises:
        Deadlock: every task waits, and no timer is set.
        Livelock: the program keeps running without time passing.
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
    """A callback of a host; it waits while the host is frozen, and can be cancelled at any time."""

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
    """A task with a hash that does not depend on its address, so that sets have a fixed order."""

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
