"""The process that imports and forks: `python -m batonmq_server.local.fork_server_main FD MODULE…`.

FD is a socket of packets. One goes out when all is imported. Each that comes in has three file
descriptors: a file with a request in JSON, where the new process is to write, and a socket that is
told its id and, when it has ended, its wait status. It has one thread, as who forks must.
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
OTHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals for whoever asks, who decides what ends and when; not for this process."""

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
        message, fds = b"", list[int]()
        with suppress(ConnectionResetError):
            message, fds, _, _ = socket.recv_fds(self._requests, 1, 3)
        if not message:
            return None, True
        pid, told = -1, None
        try:
            text, *_, news = fds  # fewer if there were too many files
            told = socket.socket(fileno=os.dup(news))
            pid = os.fork()
        except (OSError, ValueError):  # whoever asks gets no answer
            pass
        if pid:
            for fd in fds:
                os.close(fd)
            self._note(pid, told)
            return None, False
        self._leave(told, *fds)
        with os.fdopen(text, "rb") as file:
            file.seek(0)
            request: Request = json.load(file)
        return request, True

    def _note(self, pid: int, told: socket.socket | None) -> None:
        if told is None:
            return
        if pid < 0:
            told.close()
            return
        self._news[pid] = told
        self._tell(pid, pid)

    def _bury(self) -> tuple[None, bool]:
        self._woken.recv(4096)
        while self._news:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                break
            exited = ended.si_code == os.CLD_EXITED
            self._tell(ended.si_pid, ended.si_status << 8 if exited else ended.si_status)
            self._news.pop(ended.si_pid).close()
            os.waitpid(ended.si_pid, 0)  # its id is free only once its end is told
        return None, False

    def _tell(self, pid: int, number: int) -> None:
        with suppress(BrokenPipeError):  # nobody wants to know
            self._news[pid].send(number.to_bytes(NUMBER_BYTES, "big"))

    def _leave(self, told: socket.socket | None, _: int, log: int, news: int) -> None:
        """Be on one's own: nothing of this process but what it has imported."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._requests, self._woken, self._waker, told, *self._news.values()):
            if end is not None:
                end.close()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.close(news)


def learn(modules: list[str]) -> None:
    """Import what each program imports; what it is itself is run by whoever becomes it."""
    for module in modules:
        with suppress(Exception):  # whoever becomes it fails by itself, and tells it in its log
            package = hasattr(importlib.import_module(module), "__path__")
            own = f"{module}.__main__" if package else module
            importlib.import_module(own)
            del sys.modules[own]
    sql_parser.prepare()
    gc.collect()
    gc.freeze()  # pages that are not written to are shared


def become(request: Request) -> None:
    """Be the program that was asked for."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, request["name"].encode(), 0, 0, 0)
    os.chdir(request["folder"])
    sys.path.insert(0, request["folder"])
    os.environ.clear()  # noqa: TID251  it is given all of its environment
    os.environ.update(request["env"])  # noqa: TID251
    sys.argv[1:] = request["arguments"]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def main() -> None:
    """Fork whatever is asked for; in a forked process, be it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, OTHERS)
    learn(sys.argv[2:])
    requests, this = socket.socket(fileno=int(sys.argv[1])), os.getpid()
    requests.send(b"!")
    request = Forks(requests).run()
    if request is not None:
        die_with_parent(this)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, OTHERS)
        become(request)


if __name__ == "__main__":
    main()
