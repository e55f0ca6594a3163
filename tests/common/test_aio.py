"""Small things asyncio lacks.

Goal: work ends with the event that makes it pointless, and with nothing else; its errors arrive
as they are; nobody overtakes in a line.
Method: events that the tests set themselves.
"""

from __future__ import annotations

import asyncio
import gc

import pytest

from batonmq._common.aio import KeyedLocks, only_error, unless, wait_until
from batonmq.errors import Held


async def test_unless_gives_the_result_of_the_work() -> None:
    async def work() -> int:
        return 7

    assert await unless(asyncio.Event(), work()) == 7


async def test_unless_cancels_the_work_when_the_event_comes() -> None:
    event, ended = asyncio.Event(), list[str]()

    async def work() -> int:
        try:
            event.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return 7

    assert await unless(event, work()) is None
    assert ended == ["cancelled"]


async def test_unless_leaves_no_work_behind_that_was_never_begun() -> None:
    """As at the end of a program, when every task is cancelled; it would be warned of."""

    async def work() -> int:
        return 7

    async def outer() -> None:
        await unless(asyncio.Event(), work())

    before = asyncio.all_tasks()
    task = asyncio.get_running_loop().create_task(outer())
    await asyncio.sleep(0)  # it has begun, and its work has not
    for each in asyncio.all_tasks() - before:
        each.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    del task
    gc.collect()


async def test_unless_prefers_the_result_if_both_happen() -> None:
    event = asyncio.Event()

    async def work() -> int:
        event.set()
        return 7

    assert await unless(event, work()) == 7


async def test_unless_keeps_a_result_that_cancelling_could_not_stop() -> None:
    event = asyncio.Event()

    async def work() -> int:
        event.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 7
        return 0

    assert await unless(event, work()) == 7


async def test_unless_raises_what_the_work_raises_and_not_a_group() -> None:
    async def work() -> int:
        raise Held("by another")

    with pytest.raises(Held, match="by another"):
        await unless(asyncio.Event(), work())


async def test_unless_passes_its_own_cancellation_to_the_work() -> None:
    started, ended = asyncio.Event(), list[str]()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(unless(asyncio.Event(), work()))
        await started.wait()
        task.cancel()
    assert task.cancelled()
    assert ended == ["ended"]


async def test_wait_until_tells_of_the_event() -> None:
    event = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(wait_until(event, 60_000))
        event.set()
    assert waiting.result() is True


async def test_wait_until_tells_of_the_timeout() -> None:
    assert await wait_until(asyncio.Event(), 1) is False


async def test_wait_until_is_cancelled_like_anything_else() -> None:
    started = asyncio.Event()

    async def work() -> bool:
        started.set()
        return await wait_until(asyncio.Event(), 60_000)

    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(work())
        await started.wait()
        waiting.cancel()
    assert waiting.cancelled()


async def test_those_in_a_line_go_on_in_the_order_in_which_they_came() -> None:
    lines, gone = KeyedLocks(), list[str]()

    async def wait(line: str, name: str) -> None:
        async with lines.turn(line):
            await asyncio.sleep(0)
            gone.append(name)

    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(wait("a", name)) for name in "123"]
        await asyncio.sleep(0)
        assert "a" in lines
        assert "b" not in lines
        assert lines.count == 3
        waiting[1].cancel()
        tasks.create_task(wait("a", "4"))
    assert gone == ["1", "3", "4"]
    assert "a" not in lines
    assert lines.count == 0


async def test_lines_do_not_wait_for_each_other() -> None:
    lines = KeyedLocks()
    async with lines.turn("a"), asyncio.timeout(10), lines.turn("b"):
        assert "a" in lines


def test_only_error_is_the_one_inside() -> None:
    inner = ValueError("x")
    assert only_error(ExceptionGroup("outer", [ExceptionGroup("inner", [inner])])) is inner


def test_only_error_leaves_several_together() -> None:
    group = ExceptionGroup("both", [ValueError("x"), KeyError("y")])
    assert only_error(group) is group
    assert only_error(ExceptionGroup("outer", [group])) is group
