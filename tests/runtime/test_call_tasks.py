from __future__ import annotations

import asyncio

import pytest

from batonmq.errors import NotServing
from batonmq_server.runtime.call_tasks import CallTasks


async def nothing() -> None:
    """Stand for the work of a call."""


async def test_takes_tasks_only_while_it_is_open() -> None:
    tasks = CallTasks("the node")
    with pytest.raises(NotServing, match="the node is starting or stopping"):
        tasks.spawn(nothing())
    async with tasks.open():
        await tasks.spawn(nothing())
    with pytest.raises(NotServing):
        tasks.spawn(nothing())


async def test_a_call_that_comes_while_its_tasks_end_is_refused() -> None:
    tasks, refusals = CallTasks("the node"), []
    began = asyncio.Event()

    async def lasting() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            with pytest.raises(NotServing) as refused:
                tasks.spawn(nothing())
            refusals.append(refused.value.retry_after_ms)

    async def serving() -> None:
        async with tasks.open():
            tasks.spawn(lasting())
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        server = group.create_task(serving())
        await began.wait()
        server.cancel()
    assert refusals == [100]
