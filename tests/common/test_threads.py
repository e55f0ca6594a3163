"""Goal: calls run in reused daemon threads, and a call that hangs delays no other.

Method: real threads, blocked by events.
"""

from __future__ import annotations

import threading

import pytest

from batonmq._common.threads import DaemonThreads

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
