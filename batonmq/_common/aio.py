"""Small things asyncio lacks."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Hashable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


async def interruptible(main: Coroutine[Any, Any, T]) -> T:
    """The result of `main`, which SIGINT, SIGTERM and SIGHUP cancel, so that it ends in good order.

    A signal that the process ignores stays ignored, as under nohup.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, task.cancel)
    return await main


class Waitable(Protocol):
    """An event, or something else that can be waited for."""

    def wait(self) -> Coroutine[Any, Any, object]:
        """Return when it has happened."""
        ...


async def unless(event: Waitable, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if `event` is set first, in which case `work` is cancelled.

    If both happen, the result wins. What `work` raises is raised as it is.
    """
    results: list[T] = []
    errors: list[Exception] = []

    async def run() -> None:
        try:
            results.append(await work)
        except Exception as error:  # noqa: BLE001  raised below, outside of the group
            errors.append(error)

    try:
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(run())
            waiting = tasks.create_task(event.wait())
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            working.cancel()
    finally:
        work.close()  # who is cancelled at once has not begun it
    for error in errors:
        raise error
    return results[0] if results else None


async def wait_until(event: asyncio.Event, timeout_ms: int) -> bool:
    """Whether `event` was set within `timeout_ms`."""
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            await event.wait()
    except TimeoutError:
        return False
    return True


class KeyedLocks:
    """Those who wait under one name go on one by one, in the order in which they came.

    `name in lines` tells whether somebody is there, whom who does not line up would overtake.

    Attributes:
        count: How many are in all lines, those included whose turn it is.
    """

    def __init__(self) -> None:
        self.count = 0
        self._locks: dict[Hashable, asyncio.Lock] = {}
        self._counts: Counter[Hashable] = Counter()

    def __contains__(self, name: Hashable) -> bool:
        return name in self._locks

    @asynccontextmanager
    async def turn(self, name: Hashable) -> AsyncIterator[None]:
        """Wait for one's turn, which ends with the block."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        self.count += 1
        self._counts[name] += 1
        try:
            async with lock:
                yield
        finally:
            self.count -= 1
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name], self._locks[name]


def only_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error inside, however deep, or the group if there are several."""
    inner: BaseException = group
    while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
        inner = inner.exceptions[0]
    return inner
