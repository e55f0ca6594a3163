"""Keeps children running: says when one ends, starts it again, gives up when that is no use."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from random import Random

from batonmq._common.backoff import Backoff
from batonmq._common.clock import Clock
from batonmq_server.local.child_process import ChildProcess, NotReady, describe_exit, until

READY_S = 45.0
STOP_GRACE_S = 15.0
DEATHS_MAX = 5
DEATHS_WINDOW_MS = 60_000
_LOG_LINES = 12


class RestartLimitExceeded(Exception):
    """A child keeps ending."""


class Supervisor:
    """Children by name. An end that nobody asked for is never kept quiet.

    Args:
        report: Takes what a person should know at once, one message a call.
        auto_restart: Start a child again that ended unasked; may be changed at any time.
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
        """Names of the children."""
        return iter(self._children)

    def add(self, child: ChildProcess) -> None:
        """Start a child for the first time."""
        self._children[child.name] = child
        self._changing[child.name] = asyncio.Lock()
        self._deaths[child.name] = deque()
        child.spawn()

    def pid(self, name: str) -> int | None:
        """Process id; None if it does not run or there is no such child."""
        child = self._children.get(name)
        return child.pid if child else None

    async def ready(self, name: str) -> None:
        """Wait until a child that was just started serves.

        Raises:
            NotReady: It ended or does not answer; with the end of its log.
        """
        child = self._children[name]
        try:
            await child.ready(READY_S)
        except NotReady as error:
            raise NotReady(f"{error}{_log_end(child)}") from error

    async def serving(self, name: str) -> None:
        """Wait until a child serves, whatever happens to it meanwhile.

        Raises:
            TimeoutError: It does not.
        """
        async with asyncio.timeout(READY_S):
            await until(self._children[name].serves)

    async def start(self, name: str) -> None:
        """Start a child that does not run, and wait until it serves.

        Raises:
            NotReady: It ended or does not answer; with the end of its log.
        """
        async with self._changing[name]:
            self._children[name].spawn()
            await self.ready(name)

    async def stop(self, name: str) -> None:
        """End a child in good order; it stays away until `start`."""
        async with self._changing[name]:
            if not await self._children[name].stop(STOP_GRACE_S):
                self._report(f"{name} did not end within {STOP_GRACE_S:g} s and was killed")

    async def stop_all(self, order: Sequence[Sequence[str]]) -> None:
        """End the children in waves; killed all at once if that is cancelled."""
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
        """SIGKILL a child and wait for its death, which counts as unasked for."""
        pid = self.pid(name)
        self.send(name, signal.SIGKILL)
        await until(lambda: pid is None or self.pid(name) != pid)

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a child, if it runs."""
        self._children[name].send(number)

    async def watch(self, name: str) -> None:
        """See to one child for ever; to be run as one task.

        Raises:
            RestartLimitExceeded: It ended more than `DEATHS_MAX` times within `DEATHS_WINDOW_MS`.
        """
        child = self._children[name]
        while True:
            await until(lambda: child.wanted and child.pid is None)
            self._report(f"{name} ended: {describe_exit(child.returncode)}{_log_end(child)}")
            if self.auto_restart:
                await self._revive(child)
            else:
                child.wanted = False

    async def _revive(self, child: ChildProcess) -> None:
        delay_ms = self._count_death(child.name)
        self._report(f"{child.name} starts again in {delay_ms} ms")
        await asyncio.sleep(delay_ms / 1000)
        async with self._changing[child.name]:
            if not child.wanted or child.pid is not None:  # somebody else saw to it meanwhile
                return
            child.spawn()
            try:
                await child.ready(READY_S)
            except NotReady as error:
                self._report(str(error))
                child.kill_now()
            else:
                self._report(f"{child.name} serves again: pid {child.pid}")

    def _count_death(self, name: str) -> int:
        """How long to wait before the next start, in milliseconds."""
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
        return "; it has printed nothing"
    return "\n".join([f"; the end of {child.program.log_path}:", *(f"    {ln}" for ln in lines)])
