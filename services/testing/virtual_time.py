"""An event loop with a clock that jumps to the next timer instead of waiting for it.

It can also simulate several processes: every task and timer that a `VirtualHost` starts, directly
or indirectly, belongs to that host, and can be frozen and thawed like a process under SIGSTOP and
SIGCONT. The order of events in the loop depends on nothing outside it: no thread, no socket, no
hash of an address or of a string.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

SPINS_MAX = 1_000_000
TIMERS_KEPT = 100
"""With more timers than that, cancelled ones are removed if they are the majority."""
CLOCK_RESOLUTION_S = 1e-9
_HOST: ContextVar[VirtualHost | None] = ContextVar("host", default=None)


class Deadlock(Exception):
    """Every task waits and no timer is set, so the program can't continue."""


class Livelock(Exception):
    """The program keeps running without time passing."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop like that of asyncio, with a clock that jumps to the next timer.

    It has its own queues of callbacks and timers, and replaces the step of the loop, `_run_once`.
    That of asyncio polls sockets, and compares timers in Python: half of the time of a simulation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._due: deque[_Callback] = deque()
        self._timers: list[tuple[float, _Callback]] = []
        self._timers_cancelled = 0
        self._spins = 0
        self._task_numbers = itertools.count()
        self.set_task_factory(self._new_task)  # type: ignore[arg-type]

    def time(self) -> float:
        """Return the seconds since the start."""
        return self.now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> _Callback:
        """See asyncio; a callback of a frozen host waits until the host is thawed."""
        handle = _Callback(self, self.now_s, callback, args, context)
        self._due.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> _Callback:
        """See asyncio."""
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> _Callback:
        """See asyncio; a callback of a frozen host waits until the host is thawed."""
        handle = _Callback(self, when, callback, args, context)
        handle.is_timer = True
        heapq.heappush(self._timers, (when, handle))
        return handle

    def run_again(self, handle: _Callback) -> None:
        """Queue a callback that a frozen host had kept."""
        self._due.append(handle)

    def timer_cancelled(self) -> None:
        """Count a timer that is cancelled before its time."""
        self._timers_cancelled += 1

    def run_in_executor(self, *_: Any) -> Any:  # type: ignore[override]
        """Raise RuntimeError: there are no threads in virtual time."""
        raise RuntimeError("threads can't be used in virtual time")

    def close(self) -> None:
        """See asyncio; forget all callbacks and timers."""
        super().close()
        self._due.clear()
        self._timers.clear()

    def _run_once(self) -> None:
        """Run the callbacks that are due; if there are none, jump to the next timer first."""
        due, timers = self._due, self._timers
        self._remove_cancelled()
        wait_s = 0.0
        if not due and not self._stopping:  # type: ignore[attr-defined]
            if not timers:
                raise Deadlock
            wait_s = timers[0][0] - self.now_s
        if wait_s > 0:
            self._spins = 0
            self.now_s += wait_s
        else:
            self._spins += 1
            if self._spins > SPINS_MAX:
                raise Livelock
        end_s = self.now_s + CLOCK_RESOLUTION_S
        while timers and timers[0][0] < end_s:
            _, handle = heapq.heappop(timers)
            handle.is_timer = False
            due.append(handle)
        for _ in range(len(due)):
            due.popleft().run()

    def _remove_cancelled(self) -> None:
        """Remove cancelled timers: all if they are the majority, otherwise those at the head."""
        timers = self._timers
        if len(timers) > TIMERS_KEPT and self._timers_cancelled > len(timers) / 2:
            timers[:] = [entry for entry in timers if not entry[1].is_cancelled]
            heapq.heapify(timers)
            self._timers_cancelled = 0
        while timers and timers[0][1].is_cancelled:
            heapq.heappop(timers)
            self._timers_cancelled -= 1

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
        self._held: deque[_Callback] = deque()
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

    def hold(self, handle: _Callback) -> None:
        """Keep a callback until the process is thawed."""
        self._held.append(handle)


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


class _Callback:
    """The handle of a callback or timer; it waits while its host is frozen.

    It has the methods of `asyncio.Handle` and `asyncio.TimerHandle`, and no reference cycle.
    """

    __slots__ = (
        "args",
        "callback",
        "context",
        "due_s",
        "host",
        "is_cancelled",
        "is_timer",
        "loop",
    )

    def __init__(
        self,
        loop: VirtualTimeLoop,
        due_s: float,
        callback: Callable[..., Any] | None,
        args: tuple[Any, ...],
        context: Context | None,
    ) -> None:
        self.loop, self.due_s, self.callback, self.args = loop, due_s, callback, args
        self.context = copy_context() if context is None else context
        self.host = self.context.get(_HOST)
        self.is_cancelled = self.is_timer = False

    def __lt__(self, other: _Callback) -> bool:
        return False  # `_timers` compares two handles only if they are due at the same time.

    def when(self) -> float:
        """See asyncio."""
        return self.due_s

    def cancelled(self) -> bool:
        """See asyncio."""
        return self.is_cancelled

    def cancel(self) -> None:
        """See asyncio."""
        if not self.is_cancelled:
            self.is_cancelled, self.callback, self.args = True, None, ()
            if self.is_timer:
                self.loop.timer_cancelled()

    def run(self) -> None:
        """Run the callback, unless it is cancelled or its host is frozen."""
        if self.callback is None:
            return
        if self.host is not None and self.host.frozen:
            self.host.hold(self)
            return
        try:
            self.context.run(self.callback, *self.args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001  the loop continues, as that of asyncio
            message = f"Exception in callback {self.callback}"
            self.loop.call_exception_handler({"message": message, "exception": error})


class _NumberedTask(asyncio.Task[Any]):
    """A task with a hash that does not depend on its address, so that sets have a fixed order."""

    number: int

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other
