"""Compare-and-swap between replicas: read, decide, write, and again if somebody was faster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TypeVar
from weakref import WeakValueDictionary

from batonmq._common.aio import only_error
from batonmq._common.backoff import Backoff
from batonmq.errors import Overloaded
from batonmq_server.runtime.etcd import Compare, Stored

TRIES_MAX = 20
_BACKOFF = Backoff(first_ms=5, delay_ms_max=250)
Outcome = TypeVar("Outcome")


class CompareAndSwap:
    """Lets the calls about one key take turns, so that only other replicas can win a race."""

    def __init__(self, random: Random, *, tries_max: int = TRIES_MAX) -> None:
        self._random, self._tries_max = random, tries_max
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def retried(self, key: str, attempt: Callable[[], Awaitable[Outcome | None]]) -> Outcome:
        """The first outcome of `attempt` that is not None: a lost race.

        Raises:
            Overloaded: every try lost.
        """
        turn = self._turns.setdefault(key, asyncio.Lock())
        async with turn:
            for failures in range(self._tries_max):
                outcome = await attempt()
                if outcome is not None:
                    return outcome
                await asyncio.sleep(_BACKOFF.delay_ms(failures, self._random) / 1000)
        raise Overloaded(
            f"{key} is changed by others all the time",
            retry_after_ms=500,
            facts={"limit": self._tries_max},
        )


def unchanged(key: str, stored: Stored | None) -> Compare:
    """The condition that the key is still as it was read."""
    return Compare(key, mod_revision=stored.mod_revision if stored else 0)


async def run_concurrently(calls: Sequence[Callable[[], Awaitable[Outcome]]]) -> list[Outcome]:
    """The outcomes of calls that run at one time, in order.

    Raises:
        Exception: what the first call that failed raised.
    """

    async def run(call: Callable[[], Awaitable[Outcome]]) -> Outcome:
        return await call()

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(call)) for call in calls]
    except BaseExceptionGroup as group:
        error = only_error(group)
        raise (error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error) from None
    return [task.result() for task in running]
