"""Goal: the first signal stops, the second one ends, and handlers of a program stay in force.

Method: signals that this process sends to itself; each test begins and ends with the handlers of
Python. A forked process for the last test.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from batonmq._common.stop_signals import NUMBERS, StopSignals


@pytest.fixture(autouse=True)
def handlers_of_python() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def in_force() -> list[object]:
    return [signal.getsignal(number) for number in NUMBERS]


DEFAULTS: list[object] = [signal.SIG_DFL, signal.default_int_handler]


@pytest.mark.parametrize("number", NUMBERS)
def test_first_signal_stops_every_consumer_and_restores_the_earlier_handlers(
    number: signal.Signals,
) -> None:
    signals, stopped = StopSignals(), list[str]()
    signals.add("a", lambda: stopped.append("a"))
    signals.add("b", lambda: stopped.append("b"))
    signal.raise_signal(number)
    assert stopped == ["a", "b"]
    assert in_force() == DEFAULTS


def test_second_interrupt_is_a_keyboard_interrupt() -> None:
    signals = StopSignals()
    signals.add("a", lambda: None)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_earlier_handlers_are_restored_when_the_last_consumer_closes() -> None:
    signals = StopSignals()
    signals.add("a", lambda: None)
    signals.add("b", lambda: None)
    signals.remove("a")
    assert in_force() != DEFAULTS
    signals.remove("b")
    assert in_force() == DEFAULTS
    signals.remove("b")


def test_handler_of_a_framework_stays_in_force() -> None:
    received = list[int]()

    def of_framework(number: int, _: FrameType | None) -> None:
        received.append(number)

    signal.signal(signal.SIGTERM, of_framework)
    signals, stopped = StopSignals(), list[str]()
    signals.add("a", lambda: stopped.append("a"))
    signal.raise_signal(signal.SIGTERM)
    assert (received, stopped) == ([signal.SIGTERM], [])
    assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
    signals.remove("a")


def test_handler_that_the_program_sets_later_stays_in_force() -> None:
    signals = StopSignals()
    signals.add("a", lambda: None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signals.remove("a")
    assert in_force() == [signal.SIG_IGN, signal.default_int_handler]


def test_handler_of_an_event_loop_stays_in_force() -> None:
    async def check() -> None:
        stopped, received = list[str](), asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, received.set)
        signals = StopSignals()
        signals.add("a", lambda: stopped.append("a"))
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(received.wait(), 30)
        assert stopped == []
        signals.remove("a")

    asyncio.run(check())


def test_signal_that_the_process_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals, stopped = StopSignals(), list[str]()
    signals.add("a", lambda: stopped.append("a"))
    signal.raise_signal(signal.SIGINT)
    assert stopped == []
    signals.remove("a")


def test_interrupt_under_asyncio_run_stops_before_it_cancels() -> None:
    async def check() -> list[str]:
        signals, stopped = StopSignals(), list[str]()
        signals.add("a", lambda: stopped.append("a"))
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        return stopped

    assert asyncio.run(check()) == ["a"]


def test_handlers_are_not_changed_outside_the_main_thread() -> None:
    signals = StopSignals()
    thread = threading.Thread(target=lambda: signals.add("a", lambda: None))
    thread.start()
    thread.join()
    assert in_force() == DEFAULTS


def test_forked_process_ends_by_its_first_signal() -> None:
    signals = StopSignals()
    signals.add("a", lambda: None)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    signals.remove("a")
    assert os.WTERMSIG(status) == signal.SIGTERM
