"""Changes of lock entries in progress: at most one per queue.

A change runs to its end even if the call that began it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from batonmq._common import timeouts
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError, NotLeader

CHANGE_WAIT_S = 5.0
"""A call waits for the outcome of a change at most this long."""

T = TypeVar("T")


def term_ended() -> NotLeader:
    """Return the error for calls that outlive the term; a new one each time, as it is raised."""
    return NotLeader("this node has stopped leading", retry_after_ms=200)


class EntryChanges:
    """The changes in progress.

    Args:
        tasks: Lives as long as the term.
    """

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._in_progress: dict[GroupQueue, asyncio.Task[Any]] = {}

    def start(self, key: GroupQueue, change: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        """Run `change`, which changes `key`, in the background; no other may be in progress.

        `change` is not called if the term ends before the task's first step.

        Raises:
            NotLeader: the term has ended.
        """

        async def run() -> T:
            try:
                return await change()
            finally:
                self._in_progress.pop(key)

        def forget_unless_run(task: asyncio.Task[T]) -> None:
            if self._in_progress.get(key) is task:
                del self._in_progress[key]

        assert key not in self._in_progress, f"{key} is being changed already"
        task = self._in_progress[key] = self.create_task(run())
        task.add_done_callback(forget_unless_run)
        return task

    async def run_to_end(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`, which continues if the caller is cancelled.

        Raises:
            NotLeader: the term ended meanwhile.
            BatonError: raised by `work`.
        """

        async def run() -> T | BatonError:
            try:
                return await work()
            except BatonError as error:
                return error

        outcome = await _result(self.create_task(run()))
        if isinstance(outcome, BatonError):
            raise outcome
        return outcome

    def create_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` as a task of the term.

        Raises:
            NotLeader: the term has ended.
        """
        try:
            return self._tasks.create_task(work)
        except RuntimeError as error:  # the task group is ending
            work.close()
            raise term_ended() from error

    async def wait_for(self, key: GroupQueue) -> None:
        """Return once no change of `key` is in progress."""
        while (change := self._in_progress.get(key)) is not None:
            await asyncio.wait({change})

    async def wait_for_some(self, wanted: Callable[[GroupQueue], bool]) -> bool:
        """Wait until the present changes of the wanted queues have ended.

        Returns:
            False if one of them continues for more than `CHANGE_WAIT_S`.
        """
        changes = [change for key, change in self._in_progress.items() if wanted(key)]
        if not changes:
            return True
        _, open_changes = await asyncio.wait(changes, timeout=CHANGE_WAIT_S)
        return not open_changes

    async def wait_for_all(self) -> None:
        """Return once no change is in progress, or after `CHANGE_WAIT_S`."""
        with contextlib.suppress(TimeoutError):
            async with timeouts.timeout(CHANGE_WAIT_S):
                while self._in_progress:
                    await asyncio.wait(self._in_progress.values())


async def wait_for_outcome(change: asyncio.Task[T]) -> T | None:
    """Return the result of the change; None if it continues for more than `CHANGE_WAIT_S`.

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
