"""Threads that the end of the process does not wait for, unlike those of `ThreadPoolExecutor`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads:
    """Starts a thread for a call when none is free; the caller bounds how many calls run.

    Args:
        name: What the threads are called, with a number.
    """

    def __init__(self, name: str) -> None:
        self._name, self._count = name, 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._free = threading.Semaphore(0)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Call it in a thread. To be used by one thread."""
        future = Future[T]()
        self._jobs.put((future, call))
        if not self._free.acquire(blocking=False):
            self._count += 1
            name = f"{self._name}_{self._count}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        return future

    def close(self) -> None:
        """Let the threads end when their calls have ended; nothing is submitted any more."""
        for _ in range(self._count):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(*job)
            del job  # what was called may hold a lot

    def _run(self, future: Future[Any], call: Callable[[], Any]) -> None:
        """Free again before who waits hears of the result, and submits the next."""
        if not future.set_running_or_notify_cancel():
            self._free.release()
            return
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  raised where the result is waited for
            self._free.release()
            future.set_exception(error)
        else:
            self._free.release()
            future.set_result(result)
