"""A child process that is killed when this process ends: start, watch and stop it."""

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

from batonmq._common import timeouts
from batonmq._process.environment import with_absolute_python_path

_POLL_S = 0.05
_REPORT_S = 0.002
"""Pause for the report of an exit status, which comes after the end of the process."""
_WRAPPER = Path(__file__).with_name("parent_death.py")
_LOG_BYTES_MAX = 16 * 1024 * 1024


class NotReady(Exception):
    """A child process was not ready in time, or ended before it was ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program and its environment.

    Attributes:
        name: Name of the process, for messages.
        command: Path and arguments of the program.
        log_path: File that its output is appended to.
        is_ready: Checks once whether the process serves; must not take more than about a second.
        env: Environment variables to add.
        drop: Prefixes of environment variables that the process does not inherit.
        folder: Working directory; None for that of this process. `python -m` imports from the
            working directory first, so a folder of the user's must not be one.
    """

    name: str
    command: Sequence[str]
    log_path: Path
    is_ready: Callable[[], Awaitable[bool]]
    env: Mapping[str, str] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    folder: Path | None = None

    def environment(self) -> dict[str, str]:
        """Return all environment variables of the process."""
        inherited = os.environ  # noqa: TID251  the process inherits all but what is dropped
        kept = {name: value for name, value in inherited.items() if not name.startswith(self.drop)}
        return with_absolute_python_path(kept | dict(self.env))


class StartedProcess(Protocol):
    """A started process; the methods are those of `subprocess.Popen`."""

    @property
    def pid(self) -> int:  # noqa: D102
        ...

    def poll(self) -> int | None: ...  # noqa: D102
    def wait(self) -> int: ...  # noqa: D102
    def send_signal(self, sig: int, /) -> None: ...  # noqa: D102
    def kill(self) -> None: ...  # noqa: D102


ProcessStarter = Callable[[Program, BinaryIO], StartedProcess]
"""Starts a program in a session of its own, with the given output; it is killed when this process
ends."""


def start_program(program: Program, log: BinaryIO) -> StartedProcess:
    """Start a program by fork and exec."""
    wrapper = [sys.executable, "-I", "-S", str(_WRAPPER), str(os.getpid())]
    return subprocess.Popen(
        [*wrapper, *program.command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=program.environment(),
        cwd=program.folder,
        start_new_session=True,
        umask=0o077,
    )


def open_private(path: Path) -> BinaryIO:
    """Open a file to append to it, with access for this user only; a link is not followed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "ab")


class ChildProcess:
    """A program that is running, has ended, or was not started yet.

    It has a session of its own, so Ctrl-C in a terminal does not reach it: this process decides in
    which order processes end. Start it from a thread that lives as long as the process should,
    because the kernel kills it when that thread ends.
    """

    def __init__(self, program: Program, start: ProcessStarter = start_program) -> None:
        self.program = program
        self._start = start
        self.should_run = False
        """True between `spawn` and the start of `stop`: an end in between is unexpected."""
        self._process: StartedProcess | None = None
        self._log_position = 0

    @property
    def name(self) -> str:
        """Name of the process, for messages."""
        return self.program.name

    @property
    def pid(self) -> int | None:
        """Process id; None if the process is not running."""
        return self._process.pid if self._process and self.returncode is None else None

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while running, or if never started."""
        return self._process.poll() if self._process else None

    def spawn(self) -> None:
        """Start the program, which must not be running."""
        assert self.pid is None, f"{self.name} is running already"
        log_path = self.program.log_path
        log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if log_path.exists() and log_path.stat().st_size > _LOG_BYTES_MAX:
            log_path.replace(log_path.with_suffix(".log.1"))
        with open_private(log_path) as log:
            self._log_position = log.tell()
            self._process = self._start(self.program, log)
        self.should_run = True

    async def ready(self, timeout_s: float) -> None:
        """Wait until the process serves.

        Raises:
            NotReady: it ended, or `timeout_s` passed.
        """
        try:
            async with timeouts.timeout(timeout_s):
                await until(self._serves_or_ended)
        except TimeoutError:
            raise NotReady(f"{self.name} was not ready after {timeout_s:g} s") from None
        if self.pid is None:
            how = describe_exit(self.returncode)
            raise NotReady(f"{self.name} ended ({how}) before it was ready")

    async def _serves_or_ended(self) -> bool:
        return self.pid is None or await self.program.is_ready()

    async def stop(self, grace_s: float) -> bool:
        """Send SIGTERM, and SIGKILL after `grace_s`; return False if SIGKILL was needed."""
        self.should_run = False
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)
        try:
            async with timeouts.timeout(grace_s):
                await self.ended()
        except TimeoutError:
            self.kill_now()
            return False
        return True

    async def ended(self) -> int | None:
        """Wait for the end, and return the exit status; None if the process was never started."""
        while (pid := self.pid) is not None:
            await _wait_for_end(pid)
            await asyncio.sleep(_REPORT_S)
        return self.returncode

    async def serves(self) -> bool:
        """Return whether the process is running and ready."""
        return self.pid is not None and await self.program.is_ready()

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process is running."""
        if self._process:
            self._process.send_signal(number)

    def kill_now(self) -> None:
        """Kill the process and its session, and wait for its end."""
        if self._process and self.pid is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it ended just now
                self._process.kill()
            self._process.wait()

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines that the process has printed since `spawn`."""
        try:
            with self.program.log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(self._log_position, log.tell() - 500 * count))
                return log.read().decode(errors="replace").splitlines()[-count:]
        except OSError:
            return []


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until `condition` is true, by polling."""
    while True:
        answer = condition()
        if answer if isinstance(answer, bool) else await answer:
            return
        await asyncio.sleep(_POLL_S)


async def _wait_for_end(pid: int) -> None:
    """Return when a process has ended; where the kernel tells of no end, after a moment."""
    if sys.platform != "linux":
        await asyncio.sleep(_POLL_S)
        return
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def describe_exit(returncode: int | None) -> str:
    """Return an exit status as text, such as `exit code 1` or `SIGKILL`."""
    if returncode is None:
        return "never started"
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
