"""Timeouts of handler calls.

Goal: a call is cancelled exactly at its deadline, to the millisecond, also if the limit was changed
or the call was extended meanwhile; no other call is cancelled or kept.
Method: many calls in virtual time.
"""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from batonmq import ReceivedMessage
from batonmq._consumer.handler_deadlines import HandlerCall, HandlerDeadlines
from batonmq_server.testing.virtual_time import run_virtual

ANY_MESSAGE = cast(ReceivedMessage, object())


async def hang(deadlines: HandlerDeadlines, *, begin_s: float = 0, extended_ms: int = 0) -> float:
    """Return when a call that would run without end was cancelled."""
    await asyncio.sleep(begin_s)
    run = HandlerCall(deadlines)
    with pytest.raises(TimeoutError), run:
        if extended_ms:
            run.extend(ANY_MESSAGE, extended_ms)
        await asyncio.Event().wait()
    assert run.expired
    await asyncio.sleep(0)  # a leftover cancellation would be raised here
    return asyncio.get_running_loop().time()


def test_each_call_is_cancelled_at_its_own_deadline() -> None:
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


def test_extension_of_one_call_does_not_extend_the_next() -> None:
    async def play() -> list[float]:
        begin_s, deadlines = asyncio.get_running_loop().time(), HandlerDeadlines(1_000)
        async with asyncio.TaskGroup() as tasks:
            long = tasks.create_task(hang(deadlines, extended_ms=60_000))
            short = tasks.create_task(hang(deadlines, begin_s=5))
        return [run.result() - begin_s for run in (long, short)]

    assert run_virtual(play()) == pytest.approx([61, 6])


@pytest.mark.parametrize(("timeout_ms", "ended_s"), [(700, 0.7), (100, 0.4), (2_000, 2)])
def test_changed_limit_applies_to_running_calls(timeout_ms: int, ended_s: float) -> None:
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


def test_call_that_ends_in_time_is_not_cancelled() -> None:
    async def play() -> None:
        deadlines = HandlerDeadlines(1_000)
        for _ in range(5):
            with HandlerCall(deadlines) as run:
                await asyncio.sleep(0.9)
            assert not run.expired

    run_virtual(play())


def test_cancellation_from_outside_is_not_turned_into_a_timeout() -> None:
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


def test_result_after_the_deadline_is_marked_as_expired() -> None:
    async def play() -> None:
        task = asyncio.current_task()
        assert task is not None
        with HandlerCall(HandlerDeadlines(1_000)) as run:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(1)  # cleanup that takes time
        assert run.expired
        assert task.cancelling() == 0

    run_virtual(play())
