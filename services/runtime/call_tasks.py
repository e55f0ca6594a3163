"""Tasks that calls start and that may outlive them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from batonmq.errors import NotServing


class CallTasks:
    """Runs the tasks that calls start; there are none before it is open, and none after.

    Args:
        what: What is starting or stopping otherwise, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Take tasks until the block ends; if one raises, the block is cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                yield
        finally:
            self._tasks = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task.

        Raises:
            NotServing: The process is starting or stopping.
        """
        try:
            if self._tasks is not None:
                return self._tasks.create_task(work)
        except RuntimeError:  # the group is being cancelled
            pass
        work.close()
        raise NotServing(f"{self._what} is starting or stopping", retry_after_ms=100)
