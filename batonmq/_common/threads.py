"""Threads that do not delay the end of the process, unlike those of `ThreadPoolExecutor`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads:
    """Runs calls in daemon threads; starts a thread when none is free.

    The caller limits the number of concurrent calls.

    Args:
        name: Prefix of the threads' names; a number follows.
    """

    def __init__(self, name: str) -> None:
        self._name, self._count = name, 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._free = threading.Semaphore(0)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` in a thread. Not thread-safe: only one thread may submit."""
        future = Future[T]()
        self._jobs.put((future, call))
        if not self._free.acquire(blocking=False):
            self._count += 1
            name = f"{self._name}_{self._count}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        return future

    def close(self) -> None:
        """End each thread after its current call. No call may be submitted afterwards."""
        for _ in range(self._count):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(*job)
            del job  # frees what the call refers to while the thread waits

    def _run(self, future: Future[Any], call: Callable[[], Any]) -> None:
        """Mark the thread free before setting the result: the waiter may submit the next call."""
        if not future.set_running_or_notify_cancel():
            self._free.release()
            return
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  raised by the future
            self._free.release()
            future.set_exception(error)
        else:
            self._free.release()
            future.set_result(result)
