"""Threads that do not delay the end of the process, unlike those of `ThreadPoolExecutor`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from batonmq._common.outside_call import OutsideCall

T = TypeVar("T")
_Return = Callable[[Any, BaseException | None], None]


class DaemonThreads:
    """Runs calls in daemon threads; starts a thread when none is free.

    The caller limits the number of concurrent calls.

    Args:
        name: Prefix of the threads' names; a number follows.
    """

    def __init__(self, name: str) -> None:
        self._name, self._count = name, 0
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._free = threading.Semaphore(0)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` in a thread. Not thread-safe: only one thread may submit."""
        future = Future[T]()
        self._start(partial(self._run_for_future, future, call))
        return future

    def begin(self, call: Callable[[], T]) -> OutsideCall[T]:
        """Run `call` in a thread, for the running event loop. Not thread-safe, as `submit`.

        When it returns, the loop makes one callback before the waiting task continues: two with a
        future of `submit`, four with an executor in `asyncio.shield`.
        """
        begun = OutsideCall[T]()
        self._start(partial(self._run, call, begun.returned))
        return begun

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` in a thread and wait until it has returned, even if cancelled meanwhile.

        An error that `call` raises after the cancellation is lost.
        """
        return await self.begin(call).finish()

    def close(self) -> None:
        """End each thread after its current call. No call may be submitted afterwards."""
        for _ in range(self._count):
            self._jobs.put(None)

    def _start(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if not self._free.acquire(blocking=False):
            self._count += 1
            name = f"{self._name}_{self._count}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # frees what the call refers to while the thread waits

    def _run_for_future(self, future: Future[Any], call: Callable[[], Any]) -> None:
        if future.set_running_or_notify_cancel():
            self._run(partial(without_stop_iteration, call), partial(_settle, future))
        else:
            self._free.release()

    def _run(self, call: Callable[[], Any], returned: _Return) -> None:
        """Mark the thread free before returning the result: the waiter may submit the next call."""
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  raised where the result is awaited
            self._free.release()
            returned(None, error)
        else:
            self._free.release()
            returned(result, None)
        finally:
            del call, returned  # an error refers to this frame


async def run_in_thread(call: Callable[..., T], *args: object) -> T:
    """As `asyncio.to_thread`, for functions of the application."""
    return await asyncio.to_thread(without_stop_iteration, call, *args)


def without_stop_iteration(call: Callable[..., T], *args: object) -> T:
    """Call a function; raise RuntimeError if it raises StopIteration.

    Before Python 3.12 a future of asyncio does not take a StopIteration: the task that waits for
    the thread would wait for ever.
    """
    try:
        return call(*args)
    except StopIteration as error:
        raise RuntimeError(f"{error!r} left the function") from error


def _settle(future: Future[Any], result: Any, error: BaseException | None) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
