"""Waits until a condition is true, instead of for a fixed time."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

WAIT_S = 45
"""Default timeout: generous, because a busy machine may delay a process by many seconds."""


async def until(
    condition: Callable[[], object | Awaitable[object]], timeout_s: float = WAIT_S
) -> None:
    """Return once `condition`, plain or awaitable, is true; TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while True:
            answer = condition()
            if inspect.isawaitable(answer):
                answer = await answer
            if answer:
                return
            await asyncio.sleep(0.01)


def until_now(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """`until` for a test without an event loop."""
    pause = threading.Event()
    for _ in range(round(timeout_s * 100)):
        if condition():
            return
        pause.wait(0.01)
    raise TimeoutError


def lives(pid: int) -> bool:
    """Return whether a process runs; a zombie process does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
