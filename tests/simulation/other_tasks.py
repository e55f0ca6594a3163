"""The end of a run: no task may be left, or the loop can't close."""

from __future__ import annotations

import asyncio


async def cancel_other_tasks() -> None:
    """Cancel all tasks but this one, also those of killed processes, until they have ended."""
    this = asyncio.current_task()
    while left := [task for task in asyncio.all_tasks() if task is not this]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=5)
