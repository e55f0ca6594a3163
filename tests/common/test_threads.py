"""Goal: calls run in reused daemon threads, and a call that hangs delays no other. A call goes on
when the task that waits for it is cancelled.

Method: real threads, blocked by events.
"""

from __future__ import annotations

import asyncio
import threading

import pytest

from batonmq._common.threads import DaemonThreads, run_in_thread

TIMEOUT_S = 10


def test_free_thread_runs_the_next_call() -> None:
    threads = DaemonThreads("t")
    ran = [threads.submit(threading.current_thread).result(TIMEOUT_S) for _ in range(3)]
    assert {(thread.name, thread.daemon) for thread in ran} == {("t_1", True)}
    threads.close()
    ran[0].join(TIMEOUT_S)
    assert not ran[0].is_alive()


def test_call_that_hangs_delays_no_other() -> None:
    threads, go_on = DaemonThreads("t"), threading.Event()
    hangs = threads.submit(lambda: go_on.wait(TIMEOUT_S))
    assert threads.submit(lambda: 7).result(TIMEOUT_S) == 7
    assert not hangs.done()
    threads.close()
    go_on.set()
    assert hangs.result(TIMEOUT_S)


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_error_of_a_call_is_raised_by_its_future(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("bad")

    threads = DaemonThreads("t")
    with pytest.raises(error, match="bad"):
        threads.submit(fail).result(TIMEOUT_S)
    assert threads.submit(lambda: 7).result(TIMEOUT_S) == 7
    threads.close()


async def test_stop_iteration_reaches_the_task_that_waits_as_a_runtime_error() -> None:
    def fail() -> None:
        next(iter(()))

    threads = DaemonThreads("t")
    waits = asyncio.wrap_future(threads.submit(fail)), run_in_thread(fail)
    for one in waits:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(one, TIMEOUT_S)
    threads.close()


async def test_result_or_error_of_a_begun_call_is_awaited() -> None:
    def fail() -> None:
        raise ValueError("bad")

    threads = DaemonThreads("t")
    assert await threads.begin(lambda: 7).result() == 7
    assert await threads.run(lambda: 8) == 8
    with pytest.raises(ValueError, match="bad"):
        await threads.run(fail)
    threads.close()


async def test_begun_call_goes_on_when_its_waiter_is_cancelled() -> None:
    threads, go_on = DaemonThreads("t"), threading.Event()
    async with asyncio.TaskGroup() as tasks:
        call = threads.begin(lambda: go_on.wait(TIMEOUT_S))
        waiting = tasks.create_task(call.result())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert not call.ended
        go_on.set()
        await call.wait()
        assert call.ended
    threads.close()


async def test_run_ends_with_its_call_however_often_it_is_cancelled() -> None:
    threads, go_on = DaemonThreads("t"), threading.Event()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(threads.run(lambda: go_on.wait(TIMEOUT_S)))
        for _ in range(3):
            await asyncio.sleep(0)
            running.cancel()
        await asyncio.sleep(0)
        assert not running.done()
        go_on.set()
    assert running.cancelled()
    threads.close()


def test_call_that_outlives_its_loop_is_forgotten() -> None:
    threads, go_on = DaemonThreads("t"), threading.Event()

    async def begin() -> None:
        threads.begin(lambda: go_on.wait(TIMEOUT_S))

    asyncio.run(begin())
    go_on.set()
    assert threads.submit(lambda: 7).result(TIMEOUT_S) == 7
    threads.close()
