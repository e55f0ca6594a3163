"""Goal: the end of a timeout is a TimeoutError, also in a task that was cancelled before.

Method: a task cleans up after its cancellation; on Python 3.11.0 to 3.11.2 `asyncio.timeout` fails.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import batonmq
import batonmq_server
from batonmq._common import timeouts


async def clean_up(outcomes: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        try:
            async with timeouts.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            outcomes.append("timeout")
        except asyncio.CancelledError:
            outcomes.append("cancelled")


async def test_timeout_ends_in_the_clean_up_of_a_cancelled_task() -> None:
    outcomes: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(clean_up(outcomes))
        await asyncio.sleep(0)
        task.cancel()
    assert outcomes == ["timeout"]


async def test_cancellation_meanwhile_is_not_a_timeout() -> None:
    outcomes: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(clean_up(outcomes))
        for _ in range(2):
            await asyncio.sleep(0)
            task.cancel()
    assert outcomes == ["cancelled"]


async def test_timeout_can_be_moved() -> None:
    now = asyncio.get_running_loop().time()
    async with timeouts.timeout_at(None) as limit:
        limit.reschedule(now + 1_000)
        assert limit.when() == now + 1_000
    assert not limit.expired()


def test_library_and_services_use_no_other_timeouts() -> None:
    packages = [Path(str(module.__file__)).parent for module in (batonmq, batonmq_server)]
    used = [
        str(file)
        for package in packages
        for file in package.rglob("*.py")
        if re.search(r"(?<!`)asyncio\.timeout(_at)?\(", file.read_text())
    ]
    assert used == []
