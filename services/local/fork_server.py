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

from batonmq_server.local.child_process import Program, StartedProcess, start_program

NUMBER_BYTES = 4
"""Of a process id, and of a wait status."""
_END_S = 1.0
_FORKS = sys.platform == "linux"


class ForkServer(AbstractContextManager["ForkServer"]):
    """Starts processes; all that still run end with the block.

    Args:
        modules: What is imported beforehand: programs by the name that `python -m` takes, which
            do nothing at import.
        folder: Where they are looked for besides, as Python does in the folder it is started in.
    """

    def __init__(self, modules: Sequence[str], folder: Path | None = None) -> None:
        self._modules, self._folder = modules, folder
        self._requests: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Begin to import, beside whatever else is done first."""
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
        """End all that still run."""
        if self._requests is not None and self._process is not None:
            self._requests.close()
            self._process.kill()
            self._process.wait()
            self._requests = None

    def is_ready(self) -> bool:
        """Whether all is imported, so that a start does not wait for it."""
        return self._requests is None or bool(select.select([self._requests], [], [], 0)[0])

    def start(self, program: Program, log: BinaryIO) -> StartedProcess:
        """Start a program: forked if it is a module for this interpreter, else executed.

        Raises:
            OSError: it could not be started.
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
            "folder": str(Path.cwd()),
            "env": program.environment(),
        }
        forked = self._ask(request, log)
        if forked is None and self._has_ended():
            self.close()
            forked = self._ask(request, log)
        if forked is None:
            raise OSError(f"{program.name} could not be forked")
        return forked

    def _has_ended(self) -> bool:
        """Whether who forks was killed, and all that it had forked."""
        with suppress(subprocess.TimeoutExpired):
            return self._process is not None and self._process.wait(_END_S) is not None
        return False

    def _ask(self, request: object, log: BinaryIO) -> ForkedProcess | None:
        news, theirs = socket.socketpair()
        with theirs, os.fdopen(os.memfd_create("request"), "wb") as text:
            text.write(json.dumps(request).encode())
            text.flush()
            fds = [text.fileno(), log.fileno(), theirs.fileno()]
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._open(), [b"?"], fds)
        pid = int.from_bytes(news.recv(NUMBER_BYTES), "big")
        if pid:
            return ForkedProcess(pid, news)
        news.close()
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
                    pass_fds=[fd],
                    start_new_session=True,  # what a terminal sends to a group is not for it
                )
        return self._requests


class ForkedProcess:
    """A process that was forked.

    Args:
        news: Brings its wait status when it has ended.
    """

    def __init__(self, pid: int, news: socket.socket) -> None:
        self.pid, self._news = pid, news
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        if self._returncode is None:
            with suppress(BlockingIOError):
                self._ended(self._news.recv(NUMBER_BYTES, socket.MSG_DONTWAIT))
        return self._returncode

    def wait(self) -> int:
        """Exit status, once there is one."""
        if self._returncode is None:
            self._ended(self._news.recv(NUMBER_BYTES))
        assert self._returncode is not None
        return self._returncode

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:  # its id is nobody else's before its end is told
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """SIGKILL it, if it runs."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, status: bytes) -> None:
        """Note how it ended; if nobody is left to say so, see that it does."""
        if not status:
            _kill(self.pid)
        number = int.from_bytes(status, "big") if status else int(signal.SIGKILL)
        self._returncode = os.waitstatus_to_exitcode(number)
        self._news.close()


def _kill(pid: int) -> None:
    """Kill the orphan of a fork server, which is about to end anyway, and wait until it has."""
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            select.select([fd], [], [])
        finally:
            os.close(fd)
