"""The events of a run as text, for reports and for comparing two runs."""

from __future__ import annotations

import logging
import re
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc.aio
from google.protobuf import text_format

from batonmq.errors import BatonError
from batonmq_server.testing.memory_network import MemoryCall

TAIL = 100
_LENGTH = 300
_NOISE = re.compile(r"incarnation_id: \d+ |pull_id: \d+ |\\[0-7]{3}|batches: \"[^\"]*\" ?")
_QUEUE = re.compile(
    r'queue \{ group: "[^"]*" queue \{ topic: "[^"]*" broker: "([^"]*)" (?:queue_id: (\d+) )?\} \}'
)


class Trace(logging.Handler):
    """Keeps the last events, or all; messages are formatted only when they are read."""

    def __init__(self, now_ms: Callable[[], int], *, kept_max: int | None = 4_000) -> None:
        super().__init__(logging.ERROR)
        self._now_ms = now_ms
        self._events: deque[tuple[int, str, str, Any]] = deque(maxlen=kept_max)
        self._over = False

    def note(self, source: str, text: str, message: Any = None) -> None:
        """Add an event of the current time, with an optional message."""
        if not self._over:
            self._events.append((self._now_ms(), source, text, message))

    def end(self) -> None:
        """Ignore all later events."""
        self._over = True

    def called(self, call: MemoryCall, request: Any) -> None:
        self.note(call.source, f"#{call.number} {call.method} to {call.target}", request)

    def told(self, call: MemoryCall, answer: Any) -> None:
        self.note(call.source, f"#{call.number} {call.method} answered by {call.target}", answer)

    def emit(self, record: logging.LogRecord) -> None:
        """Add an error log line of a process."""
        self.note("log", record.getMessage(), record.exc_info[1] if record.exc_info else None)

    def lines(self) -> list[str]:
        """Return all kept events."""
        return [
            f"{ms / 1000:9.3f}  {source:<12} {text}{_words(message)}"
            for ms, source, text, message in self._events
        ]

    def tail(self) -> str:
        """Return the last events."""
        return "\n".join(self.lines()[-TAIL:])


def _words(message: Any) -> str:
    if message is None:
        return ""
    if isinstance(message, BatonError):
        return f": {message.reason} {message.message}"
    if isinstance(message, grpc.aio.AioRpcError):
        return f": {message.code()}"
    if isinstance(message, BaseException):
        return ":\n" + "".join(traceback.format_exception(message))
    text = text_format.MessageToString(message, as_one_line=True)
    text = _QUEUE.sub(lambda m: f"{m[1]}/{m[2] or 0}", _NOISE.sub("", text))
    return f": {text[:_LENGTH]}"
