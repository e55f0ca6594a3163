"""What arrived for a connection: for a reader that blocks, and a descriptor for an event loop."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class Delivery(NamedTuple):
    """A message that was started for a consumer.

    Attributes:
        consumer: Key of the consumer.
        tag: Delivery tag: names the message to the client process.
        redelivered: Whether a worker may have started it before.
    """

    consumer: int
    tag: int
    redelivered: bool
    body: bytes


class Inbox:
    """Deliveries of one connection. A reader thread adds them, the program takes them."""

    def __init__(self) -> None:
        self._waiting: deque[Delivery] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._reading, self._writing = os.pipe()
        self._closed = False

    def fileno(self) -> int:
        """Return a descriptor that is readable while `take` would return or raise at once."""
        return self._reading

    def put(self, delivery: Delivery) -> bool:
        """Add a delivery; return False if the inbox is closed."""
        with self._changed:
            if self._closed:
                return False
            if not self._waiting and self._error is None:
                os.write(self._writing, b"\0")
            self._waiting.append(delivery)
            self._changed.notify()
            return True

    def fail(self, error: BaseException) -> None:
        """Have every further `take` raise an error, once nothing waits."""
        with self._changed:
            if self._closed:
                return
            if not self._waiting and self._error is None:
                os.write(self._writing, b"\0")
            self._error = error
            self._changed.notify_all()

    def take(self, timeout_s: float | None) -> Delivery | None:
        """Return the next delivery; None if none arrived in time. None waits without a limit."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._error is not None, timeout_s)
            if not self._waiting:
                if self._error is not None:
                    raise self._error
                return None
            delivery = self._waiting.popleft()
            self._emptied()
            return delivery

    def remove(self, unwanted: Callable[[Delivery], bool]) -> list[Delivery]:
        """Take the deliveries that wait; no consumer receives them any more. Return them."""
        with self._changed:
            removed = [one for one in self._waiting if unwanted(one)]
            if removed:
                self._waiting = deque(one for one in self._waiting if not unwanted(one))
                self._emptied()
            return removed

    def close(self) -> None:
        """Close the descriptors; nothing is taken any more."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._waiting.clear()
                os.close(self._reading)
                os.close(self._writing)

    def _emptied(self) -> None:
        if not self._waiting and self._error is None:
            os.read(self._reading, 1)
