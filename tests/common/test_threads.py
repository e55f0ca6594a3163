"""Goal: calls run in threads that are used again, and that nobody has to wait for.

Method: real threads, which events hold up.
"""

from __future__ import annotations

import threading

import pytest

from batonmq._common.threads import DaemonThreads

TIMEOUT_S = 10


def test_thread_that_is_free_takes_the_next_call() -> None:
    threads = DaemonThreads("t")
    ran = [threads.submit(threading.current_thread).result(TIMEOUT_S) for _ in range(3)]
    assert {(thread.name, thread.daemon) for thread in ran} == {("t_1", True)}
    threads.close()
    ran[0].join(TIMEOUT_S)
    assert not ran[0].is_alive()


def test_call_that_hangs_holds_up_no_other() -> None:
    threads, go_on = DaemonThreads("t"), threading.Event()
    hangs = threads.submit(lambda: go_on.wait(TIMEOUT_S))
    assert threads.submit(lambda: 7).result(TIMEOUT_S) == 7
    assert not hangs.done()
    threads.close()
    go_on.set()
    assert hangs.result(TIMEOUT_S)


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_what_a_call_raises_is_raised_to_who_waits(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("bad")

    threads = DaemonThreads("t")
    with pytest.raises(error, match="bad"):
        threads.submit(fail).result(TIMEOUT_S)
    assert threads.submit(lambda: 7).result(TIMEOUT_S) == 7
    threads.close()
