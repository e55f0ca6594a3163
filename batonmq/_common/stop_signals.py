"""SIGTERM and SIGINT, which ask a program to end: the first one drains, the second one ends it.

A signal with a handler of the program or of a framework, such as a web server, is left alone, and
so is a signal that the process ignores. Only the main thread can set handlers.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Calls the functions that were added when the first of the signals arrives.

    From that moment on, and when the last function is removed, the earlier handlers are in force
    again: the second signal does what it would do without this class.
    """

    def __init__(self) -> None:
        self._stops: dict[object, Callable[[], object]] = {}
        self._earlier: dict[int, Any] = {}
        self._pid = 0

    def add(self, owner: object, stop: Callable[[], object]) -> None:
        """Call `stop` when a signal arrives, until `remove`; no effect outside the main thread.

        Args:
            stop: Runs in a signal handler: it may only notify a loop.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._stops[owner] = stop
        self._pid = os.getpid()
        for number in NUMBERS:
            handler = signal.getsignal(number)
            if _is_default(handler):
                self._earlier[number] = handler
                signal.signal(number, self._received)

    def remove(self, owner: object) -> None:
        """Undo `add`."""
        if self._stops.pop(owner, None) is not None and not self._stops:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._earlier.items():
            if signal.getsignal(number) == self._received:  # else the program has set its own
                signal.signal(number, handler)
        self._earlier.clear()

    def _received(self, number: int, _: FrameType | None) -> None:
        self._restore()
        if os.getpid() != self._pid:  # a forked process has no consumer, and ends by the signal
            os.kill(os.getpid(), number)
            return
        for stop in list(self._stops.values()):
            stop()


def _is_default(handler: object) -> bool:
    """Return whether a handler is that of Python or of `asyncio.run`."""
    if isinstance(handler, partial):
        return str(handler.func.__module__).startswith("asyncio.")
    return handler in (signal.SIG_DFL, signal.default_int_handler)


STOP_SIGNALS = StopSignals()
"""The only object of this class in a process, as signal handlers belong to the process."""
