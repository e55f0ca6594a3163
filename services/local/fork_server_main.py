"""The fork server process: `python -m batonmq_server.local.fork_server_main FD MODULE...`.

FD is a socket of packets. The process sends one packet when all modules are imported. Each packet
that it receives carries three file descriptors: a file with a JSON request, the output of the new
process, and a socket that gets the new process's id and, when it has ended, its wait status. The
process has one thread, because a fork copies only the calling thread.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from batonmq._core import sql_parser
from batonmq_server.local.fork_server import NUMBER_BYTES
from batonmq_server.local.parent_death import die_with_parent

PR_SET_NAME = 15
BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that the client of the fork server handles: it decides which processes end, and when."""

Request = dict[str, Any]


class RequestLoop:
    """Forks a process for each request, and reports its end.

    Args:
        requests: The socket of requests; it is closed when the client ends.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._reports: dict[int, socket.socket] = {}

    def run(self) -> Request | None:
        """Serve until the client ends, and return None; in a forked process, return its request."""
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests, selectors.EVENT_READ, self._fork)
            selector.register(self._woken, selectors.EVENT_READ, self._reap)
            while True:
                for key, _ in selector.select():
                    answer: tuple[Request | None, bool] = key.data()
                    request, over = answer
                    if over:
                        return request

    def _fork(self) -> tuple[Request | None, bool]:
        """Fork; return the request in the new process, and whether the loop is over."""
        message, fds = b"", list[int]()
        with suppress(ConnectionResetError):
            message, fds, _, _ = socket.recv_fds(self._requests, 1, 3)
        if not message:
            return None, True
        pid, report = -1, None
        try:
            text, *_, report_fd = fds  # there are fewer if too many files are open
            report = socket.socket(fileno=os.dup(report_fd))
            pid = os.fork()
        except (OSError, ValueError):  # the client sees its socket closed without an answer
            pass
        if pid:
            for fd in fds:
                os.close(fd)
            self._add(pid, report)
            return None, False
        self._detach(report, *fds)
        with os.fdopen(text, "rb") as file:
            file.seek(0)
            request: Request = json.load(file)
        return request, True

    def _add(self, pid: int, report: socket.socket | None) -> None:
        if report is None:
            return
        if pid < 0:
            report.close()
            return
        self._reports[pid] = report
        self._send(pid, pid)

    def _reap(self) -> tuple[None, bool]:
        """Report the wait status of every child that has ended."""
        self._woken.recv(4096)
        while self._reports:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                break
            exited = ended.si_code == os.CLD_EXITED
            self._send(ended.si_pid, ended.si_status << 8 if exited else ended.si_status)
            self._reports.pop(ended.si_pid).close()
            os.waitpid(ended.si_pid, 0)  # the id can be reused only after its end is reported
        return None, False

    def _send(self, pid: int, number: int) -> None:
        with suppress(BrokenPipeError):  # the client has closed its end
            self._reports[pid].send(number.to_bytes(NUMBER_BYTES, "big"))

    def _detach(self, report: socket.socket | None, _: int, log: int, report_fd: int) -> None:
        """Start a session in the new process, and close what belongs to the fork server."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._requests, self._woken, self._waker, report, *self._reports.values()):
            if end is not None:
                end.close()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.close(report_fd)


def preload(modules: list[str]) -> None:
    """Import what the programs import; the program's own module is run later, in its process."""
    for module in modules:
        with suppress(Exception):  # the program will fail in its own process, and log the error
            package = hasattr(importlib.import_module(module), "__path__")
            own = f"{module}.__main__" if package else module
            importlib.import_module(own)
            del sys.modules[own]
    sql_parser.prepare()
    gc.collect()
    gc.freeze()  # keeps the collector from writing to pages that are shared with the children


def run_program(request: Request) -> None:
    """Run the requested program in this process."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, request["name"].encode(), 0, 0, 0)
    os.chdir(request["folder"])
    sys.path.insert(0, request["folder"])
    os.environ.clear()  # noqa: TID251  the request has the whole environment
    os.environ.update(request["env"])  # noqa: TID251
    sys.argv[1:] = request["arguments"]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def main() -> None:
    """Serve requests; in a forked process, run the program."""
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    preload(sys.argv[2:])
    requests, this = socket.socket(fileno=int(sys.argv[1])), os.getpid()
    requests.send(b"!")
    request = RequestLoop(requests).run()
    if request is not None:
        die_with_parent(this)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
        run_program(request)


if __name__ == "__main__":
    main()
