"""Conditions that tasks wait for.

Goal: a task continues when its condition holds, not before, and no change is missed.
Method: tasks in the event loop, and flags that the test sets.
"""

from __future__ import annotations

import asyncio

from batonmq._common.aio import unless
from batonmq._consumer.wakeup import Condition, Wakeup


async def run_ready_tasks() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_condition_that_holds_is_not_waited_for() -> None:
    async with asyncio.timeout(1):
        await Condition(Wakeup(), lambda: True).wait()


async def test_waiting_task_continues_only_when_the_condition_holds() -> None:
    wakeup, flags = Wakeup(), {"a": False, "b": False}
    async with asyncio.timeout(1), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(Condition(wakeup, lambda: all(flags.values())).wait())
        await run_ready_tasks()
        for name in flags:
            assert not waiting.done()
            flags[name] = True
            wakeup.notify()
            await run_ready_tasks()
        assert waiting.done()


async def test_notify_wakes_every_task_that_waits() -> None:
    wakeup, flags = Wakeup(), {"a": False}
    async with asyncio.timeout(1), asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(Condition(wakeup, lambda: flags["a"]).wait())
        await run_ready_tasks()
        flags["a"] = True
        wakeup.notify()


async def test_work_is_cancelled_when_a_condition_holds() -> None:
    wakeup, flags = Wakeup(), {"stopped": False}
    stopped = Condition(wakeup, lambda: flags["stopped"])
    async with asyncio.timeout(1), asyncio.TaskGroup() as tasks:
        working = tasks.create_task(unless(stopped, asyncio.Event().wait()))
        await run_ready_tasks()
        flags["stopped"] = True
        wakeup.notify()
        assert await working is None
