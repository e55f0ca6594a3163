"""Time-outs of handlers.

Goal: what takes too long is ended when its time is over, to the millisecond, also if that time was
changed meanwhile or the run was given more; nothing else is ended or kept.
Method: many runs in virtual time.
"""

from __future__ import annotations

import asyncio

import pytest

from batonmq._consumer.handler_deadlines import HandlerCall, HandlerDeadlines
from batonmq_server.testing.virtual_time import run_virtual


async def hang(deadlines: HandlerDeadlines, *, begin_s: float = 0, extended_ms: int = 0) -> float:
    """When a run that would go on for ever has ended."""
    await asyncio.sleep(begin_s)
    run = HandlerCall(deadlines)
    with pytest.raises(TimeoutError), run:
        if extended_ms:
            run.extend(extended_ms)
        await asyncio.Event().wait()
    assert run.expired
    await asyncio.sleep(0)  # a cancellation that is left over would come now
    return asyncio.get_running_loop().time()


def test_each_run_ends_when_its_own_time_is_over() -> None:
    async def play() -> list[float]:
        begin_s, deadlines = asyncio.get_running_loop().time(), HandlerDeadlines(1_000)
        async with asyncio.TaskGroup() as tasks:
            runs = [
                tasks.create_task(hang(deadlines)),
                tasks.create_task(hang(deadlines, begin_s=0.3)),
                tasks.create_task(hang(deadlines, extended_ms=1_500)),
                tasks.create_task(hang(deadlines, begin_s=0.5, extended_ms=-200)),
            ]
        return [run.result() - begin_s for run in runs]

    assert run_virtual(play()) == pytest.approx([1, 1.3, 2.5, 1.3])


def test_time_of_a_run_is_not_that_of_one_before_which_was_given_more() -> None:
    async def play() -> list[float]:
        begin_s, deadlines = asyncio.get_running_loop().time(), HandlerDeadlines(1_000)
        async with asyncio.TaskGroup() as tasks:
            long = tasks.create_task(hang(deadlines, extended_ms=60_000))
            short = tasks.create_task(hang(deadlines, begin_s=5))
        return [run.result() - begin_s for run in (long, short)]

    assert run_virtual(play()) == pytest.approx([61, 6])


@pytest.mark.parametrize(("timeout_ms", "ended_s"), [(700, 0.7), (100, 0.4), (2_000, 2)])
def test_changed_time_holds_for_what_runs(timeout_ms: int, ended_s: float) -> None:
    async def play() -> float:
        begin_s, deadlines = asyncio.get_running_loop().time(), HandlerDeadlines(1_000)
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(hang(deadlines))
            await asyncio.sleep(0.2)
            deadlines.set(None)
            await asyncio.sleep(0.2)
            deadlines.set(timeout_ms)
        return run.result() - begin_s

    assert run_virtual(play()) == pytest.approx(ended_s)


def test_run_that_ends_in_time_is_left_alone() -> None:
    async def play() -> None:
        deadlines = HandlerDeadlines(1_000)
        for _ in range(5):
            with HandlerCall(deadlines) as run:
                await asyncio.sleep(0.9)
            assert not run.expired

    run_virtual(play())


def test_cancellation_from_outside_stays_one() -> None:
    async def play() -> None:
        async def run() -> None:
            with HandlerCall(HandlerDeadlines(1_000)):
                await asyncio.Event().wait()

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(run())
            await asyncio.sleep(0.5)
            task.cancel()
        assert task.cancelled()

    run_virtual(play())


def test_result_that_comes_after_the_time_is_known_to_be_late() -> None:
    async def play() -> None:
        task = asyncio.current_task()
        assert task is not None
        with HandlerCall(HandlerDeadlines(1_000)) as run:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(1)  # an end that takes its time
        assert run.expired
        assert task.cancelling() == 0

    run_virtual(play())
