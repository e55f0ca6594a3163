"""Waits until a condition is true, instead of for a fixed time."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

WAIT_S = 45
"""Default timeout: generous, because a busy machine may delay a process by many seconds."""

POLL_S_MIN, POLL_S_MAX = 0.01, 0.05


async def until(
    condition: Callable[[], object | Awaitable[object]], timeout_s: float = WAIT_S
) -> None:
    """Return once `condition`, plain or awaitable, is true; TimeoutError after `timeout_s`.

    The longer it waits, the less often it evaluates an awaitable condition: most are calls, which
    cost CPU time.
    """
    clock = asyncio.get_running_loop().time
    begin_s = clock()
    async with asyncio.timeout(timeout_s):
        while True:
            answer, pause_s = condition(), POLL_S_MIN
            if inspect.isawaitable(answer):
                answer = await answer
                pause_s = min(max(POLL_S_MIN, (clock() - begin_s) / 20), POLL_S_MAX)
            if answer:
                return
            await asyncio.sleep(pause_s)


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
    return _state(pid) not in ("", "Z")


def waits(pid: int) -> bool:
    """Return whether the main thread of a process waits, and is in the middle of nothing."""
    return _state(pid) == "S"


def _state(pid: int) -> str:
    """Return the letter of proc(5) for the state of the main thread; "" if there is no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
