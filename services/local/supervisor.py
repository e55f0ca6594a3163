"""Supervision of child processes: report an unexpected end, start again, give up on repeats."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from random import Random

from batonmq._common import timeouts
from batonmq._common.backoff import Backoff
from batonmq._common.clock import Clock
from batonmq_server.local.child_process import ChildProcess, NotReady, describe_exit, until

READY_S = 45.0
STOP_GRACE_S = 15.0
DEATHS_MAX = 5
DEATHS_WINDOW_MS = 60_000
_LOG_LINES = 12


class RestartLimitExceeded(Exception):
    """A child process ended more often than the supervisor restarts it."""


class Supervisor:
    """Keeps child processes running, and reports every unexpected end.

    Args:
        report: Called with each message for the user.
        auto_restart: Whether a child that ended unexpectedly is started again; may be changed at
            any time.
        backoff: Delays of restarts.
    """

    def __init__(
        self, report: Callable[[str], None], *, auto_restart: bool, backoff: Backoff | None = None
    ) -> None:
        self.auto_restart = auto_restart
        self._report = report
        self._clock, self._random, self._backoff = Clock(), Random(), backoff or Backoff()
        self._children: dict[str, ChildProcess] = {}
        self._changing: dict[str, asyncio.Lock] = {}
        self._deaths: dict[str, deque[int]] = {}

    def __iter__(self) -> Iterator[str]:
        """Return the names of the children."""
        return iter(self._children)

    def add(self, child: ChildProcess) -> None:
        """Add a child and start it."""
        self._children[child.name] = child
        self._changing[child.name] = asyncio.Lock()
        self._deaths[child.name] = deque()
        child.spawn()

    def pid(self, name: str) -> int | None:
        """Return the process id of a child; None if it is not running or does not exist."""
        child = self._children.get(name)
        return child.pid if child else None

    async def ready(self, name: str) -> None:
        """Wait until a child that was just started is ready.

        Raises:
            NotReady: it ended, or was not ready in time; the message has the end of its log.
        """
        child = self._children[name]
        try:
            await child.ready(READY_S)
        except NotReady as error:
            raise NotReady(f"{error}{_log_end(child)}") from error

    async def serving(self, name: str) -> None:
        """Wait until a child is ready, even if it ends and is started again meanwhile.

        Raises:
            TimeoutError: it was not ready in time.
        """
        async with timeouts.timeout(READY_S):
            await until(self._children[name].serves)

    async def start(self, name: str) -> None:
        """Start a child that is not running, and wait until it is ready.

        Raises:
            NotReady: it ended, or was not ready in time; the message has the end of its log.
        """
        async with self._changing[name]:
            self._children[name].spawn()
            await self.ready(name)

    async def stop(self, name: str) -> None:
        """Stop a child; it is not started again until `start`."""
        async with self._changing[name]:
            if not await self._children[name].stop(STOP_GRACE_S):
                self._report(f"{name} did not stop within {STOP_GRACE_S:g} s and was killed")

    async def stop_all(self, order: Sequence[Sequence[str]]) -> None:
        """Stop the children, wave by wave; if cancelled, kill all that are left."""
        try:
            for wave in order:
                async with asyncio.TaskGroup() as tasks:
                    for name in wave:
                        if name in self._children:
                            tasks.create_task(self.stop(name))
        finally:
            for child in self._children.values():
                if child.pid is not None:
                    self._report(f"{child.name} was killed")
                    child.kill_now()

    async def kill(self, name: str) -> None:
        """Kill a child and wait for its end, which counts as unexpected."""
        pid = self.pid(name)
        self.send(name, signal.SIGKILL)
        await until(lambda: pid is None or self.pid(name) != pid)

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a child if it is running."""
        self._children[name].send(number)

    async def watch(self, name: str) -> None:
        """Watch one child until cancelled.

        Raises:
            RestartLimitExceeded: it ended more than `DEATHS_MAX` times within `DEATHS_WINDOW_MS`.
        """
        child = self._children[name]
        while True:
            await until(lambda: child.should_run)
            await child.ended()
            if not child.should_run:
                continue
            self._report(f"{name} ended: {describe_exit(child.returncode)}{_log_end(child)}")
            if self.auto_restart:
                await self._restart(child)
            else:
                child.should_run = False

    async def _restart(self, child: ChildProcess) -> None:
        delay_ms = self._count_death(child.name)
        self._report(f"{child.name} starts again in {delay_ms} ms")
        await asyncio.sleep(delay_ms / 1000)
        async with self._changing[child.name]:
            if (
                not child.should_run or child.pid is not None
            ):  # stopped or started by another task meanwhile
                return
            child.spawn()
            try:
                await child.ready(READY_S)
            except NotReady as error:
                self._report(str(error))
                child.kill_now()
            else:
                self._report(f"{child.name} is ready again: pid {child.pid}")

    def _count_death(self, name: str) -> int:
        """Count an unexpected end; return the delay before the restart, in milliseconds."""
        now_ms, deaths = self._clock.monotonic_ms(), self._deaths[name]
        deaths.append(now_ms)
        while deaths[0] <= now_ms - DEATHS_WINDOW_MS:
            deaths.popleft()
        if len(deaths) > DEATHS_MAX:
            raise RestartLimitExceeded(
                f"{name} ended {len(deaths)} times within {DEATHS_WINDOW_MS // 1000} s; "
                f"its log is {self._children[name].program.log_path}"
            )
        return self._backoff.delay_ms(len(deaths) - 1, self._random)


def _log_end(child: ChildProcess) -> str:
    lines = child.last_lines(_LOG_LINES)
    if not lines:
        return "; it printed nothing"
    return "\n".join([f"; the end of {child.program.log_path}:", *(f"    {ln}" for ln in lines)])
