"""Goal: `unless` ends work only when its event is set; long work in steps lets other tasks run.

Method: events that the tests set themselves; time stands still.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable, Iterator

import pytest

from batonmq._common.aio import (
    STEP_ITEMS,
    begin_task,
    in_steps,
    only_error,
    unless,
    wait_until,
    without_group,
)
from batonmq.errors import Held


async def turns_of(items: Iterable[int]) -> list[int]:
    """Return the number of the items that `in_steps` yields in each turn of the event loop."""
    turns, done = [0], asyncio.Event()

    async def count_turns() -> None:
        while not done.is_set():
            await asyncio.sleep(0)
            turns.append(0)

    async def work() -> None:
        async for _ in in_steps(items):
            turns[-1] += 1
        done.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(count_turns())
        tasks.create_task(work())
    return [count for count in turns if count]


async def test_other_tasks_run_after_a_number_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 0.0)
    assert await turns_of(range(2 * STEP_ITEMS + 5)) == [STEP_ITEMS, STEP_ITEMS, 5]


async def test_other_tasks_run_after_an_item_that_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s[0])

    def items() -> Iterator[int]:
        for number in range(4):
            now_s[0] += 1.0 if number == 1 else 0.0
            yield number

    assert await turns_of(items()) == [2, 2]


async def test_unless_returns_the_result_of_the_work() -> None:
    async def work() -> int:
        return 7

    assert await unless(asyncio.Event(), work()) == 7


async def test_unless_cancels_the_work_when_the_event_is_set() -> None:
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


async def test_work_that_a_group_refuses_is_closed() -> None:
    async with asyncio.TaskGroup() as tasks:
        assert await begin_task(tasks, asyncio.sleep(0, 7)) == 7
    work = asyncio.sleep(0, 7)
    with pytest.raises(RuntimeError, match="finished"):
        begin_task(tasks, work)
    with pytest.raises(RuntimeError, match="reuse"):
        await work


async def test_unless_closes_work_that_never_started() -> None:
    """As at the end of a program, when every task is cancelled; Python warns of unawaited work."""

    async def work() -> int:
        return 7

    async def outer() -> None:
        await unless(asyncio.Event(), work())

    before = asyncio.all_tasks()
    task = asyncio.get_running_loop().create_task(outer())
    await asyncio.sleep(0)  # the task has started, its work has not
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


async def test_unless_keeps_a_result_that_ignores_the_cancellation() -> None:
    event = asyncio.Event()

    async def work() -> int:
        event.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 7
        return 0

    assert await unless(event, work()) == 7


async def test_unless_raises_the_error_of_the_work_without_a_group() -> None:
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


async def test_wait_until_returns_true_when_the_event_is_set() -> None:
    event = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(wait_until(event, 60_000))
        event.set()
    assert waiting.result() is True


async def test_wait_until_returns_false_after_the_timeout() -> None:
    assert await wait_until(asyncio.Event(), 1) is False


async def test_wait_until_can_be_cancelled() -> None:
    started = asyncio.Event()

    async def work() -> bool:
        started.set()
        return await wait_until(asyncio.Event(), 60_000)

    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(work())
        await started.wait()
        waiting.cancel()
    assert waiting.cancelled()


def test_only_error_finds_the_error_in_nested_groups() -> None:
    inner = ValueError("x")
    assert only_error(ExceptionGroup("outer", [ExceptionGroup("inner", [inner])])) is inner


def test_only_error_returns_a_group_of_several_errors() -> None:
    group = ExceptionGroup("both", [ValueError("x"), KeyError("y")])
    assert only_error(group) is group
    assert only_error(ExceptionGroup("outer", [group])) is group


def test_first_error_of_a_task_group_is_raised_without_the_group() -> None:
    first = ValueError("x")
    with pytest.raises(ValueError, match="x") as raised, without_group():
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [first, KeyError("y")])])
    assert raised.value is first
