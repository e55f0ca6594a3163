"""Processes that start by a fork instead of by half a second of imports.

One process (`forking`) imports what all of a cluster's services need, then becomes one of them
whenever it is asked to: a process of its own, with its session, output, environment and death, that
has merely not imported anything itself. Only Linux can do that and tie it to the cluster.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from batonmq.local.child import Process, Program, execute

NUMBER_BYTES = 4
"""Of a process id, and of a wait status."""
_FORKS = sys.platform.startswith("linux")


class Nursery(AbstractContextManager["Nursery"]):
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
            self._requests.close()  # it ends when nobody can ask any more, and they with it
            self._process.wait()
            self._requests = None

    def start(self, program: Program, log: BinaryIO) -> Process:
        """Start a program: forked if it is a module for this interpreter, else executed."""
        path, *words = program.command
        if path != sys.executable or "-m" not in words or not _FORKS:
            return execute(program, log)
        where = words.index("-m") + 1
        request = {
            "name": program.name,
            "module": words[where],
            "arguments": words[where + 1 :],
            "folder": str(Path.cwd()),
            "from_folder": "-P" not in words[:where],
            "env": program.environment(),
        }
        news, theirs = socket.socketpair()
        with theirs:
            message, fds = json.dumps(request).encode(), [log.fileno(), theirs.fileno()]
            try:
                socket.send_fds(self._open(), [message], fds)
            except (BrokenPipeError, ConnectionResetError):  # it was killed, and all it had forked
                self.close()
                socket.send_fds(self._open(), [message], fds)
        return _Forked(news)

    def _open(self) -> socket.socket:
        if self._requests is None:
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                fd = theirs.fileno()
                options = ["-m"] if self._folder else ["-P", "-m"]
                self._process = subprocess.Popen(
                    [sys.executable, *options, "batonmq.local.forking", str(fd), *self._modules],
                    stdin=subprocess.DEVNULL,
                    cwd=self._folder,
                    pass_fds=[fd],
                )
        return self._requests


class _Forked:
    """A process that was forked.

    Args:
        news: Brings its id, and when it has ended its wait status.
    """

    def __init__(self, news: socket.socket) -> None:
        self._news = news
        self._returncode: int | None = None
        self.pid = int.from_bytes(news.recv(NUMBER_BYTES), "big")
        if not self.pid:
            self._ended(b"")

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
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended in this moment
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """SIGKILL it, if it runs."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, status: bytes) -> None:
        """Note how it ended: with whoever forked it, if that is not said."""
        number = int.from_bytes(status, "big") if status else int(signal.SIGKILL)
        self._returncode = os.waitstatus_to_exitcode(number)
        self._news.close()
