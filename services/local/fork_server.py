"""Start Python services by fork, which saves the imports of about half a second per process.

A fork server process (`fork_server_main`) imports the modules of all services of a cluster once.
For each start it forks, and the child runs the requested module with a session, an output, an
environment and an exit status of its own. Linux only: elsewhere programs are executed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from batonmq._process.environment import with_absolute_python_path
from batonmq_server.local.child_process import (
    Program,
    StartedProcess,
    start_program,
)

NUMBER_BYTES = 4
"""Size of a process id, and of a wait status, on a report socket."""
_END_S = 1.0
_FORKS = sys.platform == "linux"


class ForkServer(AbstractContextManager["ForkServer"]):
    """Starts programs by fork; those that are still running are killed at the end of the block.

    Args:
        modules: Programs to import in advance, by the names that `python -m` takes. They must do
            nothing when they are imported.
        folder: Working directory of the fork server, from which Python imports first; None for
            that of this process.
    """

    def __init__(self, modules: Sequence[str], folder: Path | None = None) -> None:
        self._modules, self._folder = modules, folder
        self._requests: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the fork server, which imports the modules in the background."""
        if _FORKS:
            self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the fork server; the kernel then kills the processes it has forked."""
        if self._requests is not None and self._process is not None:
            self._requests.close()
            self._process.kill()
            self._process.wait()
            self._requests = None

    def is_ready(self) -> bool:
        """Return whether all modules are imported, so that a start does not wait for them."""
        return self._requests is None or bool(select.select([self._requests], [], [], 0)[0])

    def start(self, program: Program, log: BinaryIO) -> StartedProcess:
        """Start a program: by fork if it is a module of this interpreter, otherwise by exec.

        Raises:
            OSError: the program could not be started.
        """
        match program.command if _FORKS else ():
            case [sys.executable, "-m", module, *arguments]:
                pass
            case _:
                return start_program(program, log)
        request = {
            "name": program.name,
            "module": module,
            "arguments": arguments,
            "folder": str(program.folder or Path.cwd()),
            "env": program.environment(),
        }
        forked = self._request(request, log)
        if forked is None and self._has_ended():
            self.close()
            forked = self._request(request, log)
        if forked is None:
            raise OSError(f"{program.name} could not be forked")
        return forked

    def _has_ended(self) -> bool:
        """Return whether the fork server was killed, and with it all that it had forked."""
        with suppress(subprocess.TimeoutExpired):
            return self._process is not None and self._process.wait(_END_S) is not None
        return False

    def _request(self, request: object, log: BinaryIO) -> ForkedProcess | None:
        report, theirs = socket.socketpair()
        with theirs, os.fdopen(os.memfd_create("request"), "wb") as text:
            text.write(json.dumps(request).encode())
            text.flush()
            fds = [text.fileno(), log.fileno(), theirs.fileno()]
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._open(), [b"?"], fds)
        pid = int.from_bytes(report.recv(NUMBER_BYTES), "big")
        if pid:
            return ForkedProcess(pid, report)
        report.close()
        return None

    def _open(self) -> socket.socket:
        if self._requests is None:
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                fd = theirs.fileno()
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "batonmq_server.local.fork_server_main",
                        str(fd),
                        *self._modules,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=None if sys.stderr else subprocess.DEVNULL,
                    cwd=self._folder,
                    env=with_absolute_python_path(os.environ),  # noqa: TID251  inherited
                    pass_fds=[fd],
                    start_new_session=True,  # Ctrl-C in a terminal does not reach it
                )
        return self._requests


class ForkedProcess:
    """A process that the fork server has forked.

    Args:
        report: Socket that delivers the wait status when the process has ended.
    """

    def __init__(self, pid: int, report: socket.socket) -> None:
        self.pid, self._report = pid, report
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process is running."""
        if self._returncode is None:
            with suppress(BlockingIOError):
                self._ended(self._report.recv(NUMBER_BYTES, socket.MSG_DONTWAIT))
        return self._returncode

    def wait(self) -> int:
        """Wait for the end, and return the exit status, negative for a signal."""
        if self._returncode is None:
            self._ended(self._report.recv(NUMBER_BYTES))
        assert self._returncode is not None
        return self._returncode

    def send_signal(self, sig: int, /) -> None:
        """Send a signal if the process is running."""
        if self.poll() is None:  # the id is not reused before the end is reported
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL if the process is running."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, status: bytes) -> None:
        """Store the wait status; if the fork server has ended without one, kill the process."""
        if not status:
            _kill(self.pid)
        number = int.from_bytes(status, "big") if status else int(signal.SIGKILL)
        self._returncode = os.waitstatus_to_exitcode(number)
        self._report.close()


def _kill(pid: int) -> None:
    """Kill a process after the end of its fork server, and wait for its end."""
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            select.select([fd], [], [])
        finally:
            os.close(fd)
