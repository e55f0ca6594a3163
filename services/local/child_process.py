"""One child process: start it tied to this one, watch it, end it.

Knows processes and signals, nothing of what the program does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

_POLL_S = 0.05
_WRAPPER = Path(__file__).with_name("parent_death.py")
_LOG_BYTES_MAX = 16 * 1024 * 1024


class NotReady(Exception):
    """A child did not become ready in time, or ended before it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a child runs.

    Attributes:
        command: The program's path and its arguments.
        drop: Variables of this process's environment that start with one of these are not
            passed on.
        env: Variables to add.
        log_path: Where its output goes, appended to.
        is_ready: Asks once whether it serves; must not take more than a second or so.
    """

    name: str
    command: Sequence[str]
    log_path: Path
    is_ready: Callable[[], Awaitable[bool]]
    env: Mapping[str, str] = field(default_factory=dict)
    drop: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """All variables it is given."""
        inherited = os.environ  # noqa: TID251  a child inherits what is not ours to decide
        kept = {name: value for name, value in inherited.items() if not name.startswith(self.drop)}
        return kept | dict(self.env)


class StartedProcess(Protocol):
    """A process that was started; see `subprocess.Popen` for what each of these does."""

    @property
    def pid(self) -> int:  # noqa: D102
        ...

    def poll(self) -> int | None: ...  # noqa: D102
    def wait(self) -> int: ...  # noqa: D102
    def send_signal(self, sig: int, /) -> None: ...  # noqa: D102
    def kill(self) -> None: ...  # noqa: D102


ProcessStarter = Callable[[Program, BinaryIO], StartedProcess]
"""Starts a program that leads a session of its own, writes where it is told, and dies with the
process that asks for it."""


def start_program(program: Program, log: BinaryIO) -> StartedProcess:
    """Start a program by fork and exec."""
    wrapper = [sys.executable, "-I", "-S", str(_WRAPPER), str(os.getpid())]
    return subprocess.Popen(
        [*wrapper, *program.command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=program.environment(),
        start_new_session=True,
    )


class ChildProcess:
    """A program that runs, has ended, or was not started yet.

    It leads a session of its own, so a terminal's Ctrl-C does not reach it: whoever started it
    decides in which order things end. To be started from a thread that lives as long as it is
    to live, since it dies with that thread.
    """

    def __init__(self, program: Program, start: ProcessStarter = start_program) -> None:
        self.program = program
        self._start = start
        self.wanted = False
        """True between `spawn` and the beginning of `stop`: an end in between is unasked for."""
        self._process: StartedProcess | None = None
        self._log_position = 0

    @property
    def name(self) -> str:
        """Name of the program, for people."""
        return self.program.name

    @property
    def pid(self) -> int | None:
        """Process id; None if it does not run."""
        return self._process.pid if self._process and self.returncode is None else None

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs or was never started."""
        return self._process.poll() if self._process else None

    def spawn(self) -> None:
        """Start the program; it must not run already."""
        assert self.pid is None, f"{self.name} runs already"
        log_path = self.program.log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        if log_path.exists() and log_path.stat().st_size > _LOG_BYTES_MAX:
            log_path.replace(log_path.with_suffix(".log.1"))
        with log_path.open("ab") as log:
            self._log_position = log.tell()
            self._process = self._start(self.program, log)
        self.wanted = True

    async def ready(self, timeout_s: float) -> None:
        """Return once the program serves.

        Raises:
            NotReady: It ended, or `timeout_s` passed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await until(self._serves_or_ended)
        except TimeoutError:
            raise NotReady(f"{self.name} does not serve after {timeout_s:g} s") from None
        if self.pid is None:
            how = describe_exit(self.returncode)
            raise NotReady(f"{self.name} ended ({how}) before it served")

    async def _serves_or_ended(self) -> bool:
        return self.pid is None or await self.program.is_ready()

    async def stop(self, grace_s: float) -> bool:
        """Ask the program to end, and kill it after `grace_s`; True if it ended by itself."""
        self.wanted = False
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)
        try:
            async with asyncio.timeout(grace_s):
                await self.ended()
        except TimeoutError:
            self.kill_now()
            return False
        return True

    async def ended(self) -> int | None:
        """The exit status, once there is one; None if it was never started."""
        await until(lambda: self.pid is None)
        return self.returncode

    async def serves(self) -> bool:
        """Whether it runs and is ready."""
        return self.pid is not None and await self.program.is_ready()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process:
            self._process.send_signal(number)

    def kill_now(self) -> None:
        """Kill the program and everything in its session, and wait for its death."""
        if self._process and self.pid is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it ended in this moment
                self._process.kill()
            self._process.wait()

    def last_lines(self, count: int) -> list[str]:
        """The end of what it has printed since the last `spawn`."""
        try:
            with self.program.log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(self._log_position, log.tell() - 500 * count))
                return log.read().decode(errors="replace").splitlines()[-count:]
        except OSError:
            return []


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Return once `condition` is true. Polls: nothing portable tells of a child's death."""
    while True:
        answer = condition()
        if answer if isinstance(answer, bool) else await answer:
            return
        await asyncio.sleep(_POLL_S)


def describe_exit(returncode: int | None) -> str:
    """`exit code 1`, or `SIGKILL`."""
    if returncode is None:
        return "never started"
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
