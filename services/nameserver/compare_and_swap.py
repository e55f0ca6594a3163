"""Compare-and-swap writes to etcd: read, decide, write; retry if another writer was faster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TypeVar
from weakref import WeakValueDictionary

from batonmq._common.aio import without_group
from batonmq._common.backoff import Backoff
from batonmq.errors import Overloaded
from batonmq_server.runtime.etcd.session import Compare, KeyValue

TRIES_MAX = 20
_BACKOFF = Backoff(first_ms=5, delay_ms_max=250)
Result = TypeVar("Result")


class CompareAndSwap:
    """Repeats attempts to change a key until one is not overtaken by another writer.

    The calls about one key run one after the other, so that only other replicas can overtake.
    """

    def __init__(self, random: Random, *, tries_max: int = TRIES_MAX) -> None:
        self._random, self._tries_max = random, tries_max
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, key: str, attempt: Callable[[], Awaitable[Result | None]]) -> Result:
        """Return the first result of `attempt` that is not None; None means it was overtaken.

        Raises:
            Overloaded: every attempt was overtaken.
        """
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            for failures in range(self._tries_max):
                result = await attempt()
                if result is not None:
                    return result
                await asyncio.sleep(_BACKOFF.delay_ms(failures, self._random) / 1000)
        raise Overloaded(
            f"{key} was changed by other calls {self._tries_max} times in a row",
            remedy="Repeat the call.",
            retry_after_ms=500,
            facts={"limit": self._tries_max},
        )


def unchanged(key: str, stored: KeyValue | None) -> Compare:
    """Return the condition that the key still has the value that was read, or still has none."""
    return Compare(key, mod_revision=stored.mod_revision if stored else 0)


async def run_concurrently(calls: Sequence[Callable[[], Awaitable[Result]]]) -> list[Result]:
    """Return the results of calls that run at the same time, in order.

    Raises:
        Exception: that of the first call that failed.
    """

    async def run(call: Callable[[], Awaitable[Result]]) -> Result:
        return await call()

    with without_group():
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(call)) for call in calls]
    return [task.result() for task in running]
