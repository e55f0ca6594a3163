"""Changes under way, at most one per queue; each runs to its end whoever waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError, NotLeader

CHANGE_WAIT_S = 5.0
"""How long a call waits for a change whose outcome is not known yet."""

T = TypeVar("T")


def term_ended() -> NotLeader:
    """The term is over. A new one each time: an error that is raised keeps the frames it passed."""
    return NotLeader("this node has stopped leading", retry_after_ms=200)


class EntryChanges:
    """What is being changed.

    Args:
        tasks: Lives as long as the term.
    """

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.tasks = tasks
        self._under_way: dict[GroupQueue, asyncio.Task[Any]] = {}

    def start(self, key: GroupQueue, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Carry out `work`, the change of `key`; no other one may be under way."""

        async def run() -> T:
            try:
                return await work
            finally:
                del self._under_way[key]

        assert key not in self._under_way, f"{key} is being changed already"
        task = self._under_way[key] = self.tasks.create_task(run())
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry `work` out to its end, even if the caller goes away; what it raises is raised.

        Raises:
            NotLeader: the term ended meanwhile.
        """

        async def run() -> T | BatonError:
            try:
                return await work
            except BatonError as error:
                return error

        outcome = await _result(self.tasks.create_task(run()))
        if isinstance(outcome, BatonError):
            raise outcome
        return outcome

    async def over(self, key: GroupQueue) -> None:
        """Until no change of `key` is under way."""
        while (change := self._under_way.get(key)) is not None:
            await asyncio.wait({change})

    async def settle(self) -> None:
        """Wait, but not for long, until no change is under way."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHANGE_WAIT_S):
                while self._under_way:
                    await asyncio.wait(self._under_way.values())


async def wait_for_outcome(change: asyncio.Task[T]) -> T | None:
    """What the change comes to; None if that is not known soon, and it goes on.

    Raises:
        NotLeader: the term ended meanwhile.
    """
    done, _ = await asyncio.wait({change}, timeout=CHANGE_WAIT_S)
    return await _result(change) if done else None


async def _result(task: asyncio.Task[T]) -> T:
    await asyncio.wait({task})
    if task.cancelled():
        raise term_ended()
    return task.result()
