"""Helpers that asyncio lacks."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from batonmq._common import timeouts

T = TypeVar("T")
STEP_ITEMS, STEP_S = 32, 0.002
"""After so many items or so many seconds, whatever comes first, `in_steps` lets other tasks run. In
virtual time, which stands still meanwhile, the number decides."""


async def interruptible(main: Coroutine[Any, Any, T]) -> T:
    """Return the result of `main`; SIGINT, SIGTERM and SIGHUP cancel it, so that it cleans up.

    A signal that the process ignores, as under nohup, stays ignored.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, task.cancel)
    return await main


class Waitable(Protocol):
    """An `asyncio.Event`, or another object with a `wait` that returns once."""

    def wait(self) -> Coroutine[Any, Any, object]:
        """Return when the event has happened."""
        ...


def begin_task(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Begin `work` as a task of a group; if the group ends, close `work` and raise RuntimeError.

    Before Python 3.13 `create_task` leaves it open, which is reported when it is deleted.
    """
    try:
        return tasks.create_task(work)
    except RuntimeError:
        work.close()
        raise


async def in_steps(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items; other tasks run after every 32 of them, and after every 2 ms."""
    now_s = asyncio.get_running_loop().time
    begin_s, count = now_s(), 0
    for item in items:
        yield item
        count += 1
        if count == STEP_ITEMS or now_s() - begin_s >= STEP_S:
            await asyncio.sleep(0)
            begin_s, count = now_s(), 0


async def unless(event: Waitable, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; cancel `work` and return None if `event` happens first.

    If both happen, the result is returned. If what `work` waits for happens in the same turn of
    the event loop as `event`, `work` is cancelled before it learns of it. Exceptions of `work` are
    raised without a group.
    """
    results: list[T] = []
    errors: list[Exception] = []

    async def run() -> None:
        try:
            results.append(await work)
        except Exception as error:  # noqa: BLE001  raised below, without a group
            errors.append(error)

    try:
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(run())
            waiting = tasks.create_task(event.wait())
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            working.cancel()
    finally:
        work.close()  # if the task group was cancelled before the work began
    for error in errors:
        raise error
    return results[0] if results else None


async def wait_until(event: asyncio.Event, timeout_ms: int) -> bool:
    """Return whether `event` is set within `timeout_ms`."""
    try:
        async with timeouts.timeout(timeout_ms / 1000):
            await event.wait()
    except TimeoutError:
        return False
    return True


@contextmanager
def without_group() -> Iterator[None]:
    """Raise the first error of a task group without the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def only_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the only error in nested groups; the innermost group if it has several."""
    inner: BaseException = group
    while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
        inner = inner.exceptions[0]
    return inner
