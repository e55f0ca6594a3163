"""The process that imports and forks: `python -m batonmq.local.forking FD MODULE…`.

FD is a socket of packets. Each is a request in JSON and two file descriptors: where the new process
writes, and a socket that is told its id and, when it has ended, its wait status. It has one thread,
as who forks must.
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

from batonmq.core import sql_parser
from batonmq.local.nursery import NUMBER_BYTES
from batonmq.local.tether import tie

REQUEST_BYTES_MAX = 1 << 18
PR_SET_NAME = 15

Request = dict[str, Any]


class Forks:
    """Forks what is asked for, and tells of its end.

    Args:
        requests: Ends with the process at the other end.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._news: dict[int, socket.socket] = {}

    def run(self) -> Request | None:
        """Serve until nobody can ask any more; in a forked process, return what it is to be."""
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests, selectors.EVENT_READ, self._fork)
            selector.register(self._woken, selectors.EVENT_READ, self._bury)
            while True:
                for key, _ in selector.select():
                    answer: tuple[Request | None, bool] = key.data()
                    request, over = answer
                    if over:
                        return request

    def _fork(self) -> tuple[Request | None, bool]:
        message, fds, _, _ = socket.recv_fds(self._requests, REQUEST_BYTES_MAX, 2)
        if not message:
            return None, True
        log, news = fds
        pid = os.fork()
        if not pid:
            self._leave(log, news)
            request: Request = json.loads(message)
            return request, True
        os.close(log)
        self._news[pid] = socket.socket(fileno=news)
        self._tell(pid, pid)
        return None, False

    def _bury(self) -> tuple[None, bool]:
        self._woken.recv(4096)
        while self._news:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            self._tell(pid, status)
            self._news.pop(pid).close()
        return None, False

    def _tell(self, pid: int, number: int) -> None:
        with suppress(BrokenPipeError):  # nobody wants to know
            self._news[pid].send(number.to_bytes(NUMBER_BYTES, "big"))

    def _leave(self, log: int, news: int) -> None:
        """Be on one's own: nothing of this process but what it has imported."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._requests, self._woken, self._waker, *self._news.values()):
            end.close()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        for fd in (null, log, news):
            os.close(fd)


def learn(modules: list[str]) -> None:
    """Import what each program imports; what it is itself is run by whoever becomes it."""
    for module in modules:
        own = (
            f"{module}.__main__" if hasattr(importlib.import_module(module), "__path__") else module
        )
        importlib.import_module(own)
        del sys.modules[own]
    sql_parser.prepare()
    gc.collect()
    gc.freeze()  # pages that are not written to are shared


def become(request: Request) -> None:
    """Be the program that was asked for."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, request["name"].encode(), 0, 0, 0)
    os.chdir(request["folder"])
    if request["from_folder"]:
        sys.path.insert(0, request["folder"])
    os.environ.clear()  # noqa: TID251  it is given all of its environment
    os.environ.update(request["env"])  # noqa: TID251
    sys.argv[1:] = request["arguments"]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def main() -> None:
    """Fork whatever is asked for; in a forked process, be it."""
    parent = os.getppid()
    tie(parent)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks decides when to end
    learn(sys.argv[2:])
    this = os.getpid()
    request = Forks(socket.socket(fileno=int(sys.argv[1]))).run()
    if request is not None:
        tie(this)
        signal.signal(signal.SIGINT, interrupt)
        become(request)


if __name__ == "__main__":
    main()
