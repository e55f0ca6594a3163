"""Cancels handler calls that take too long, with one timer for all of them.

A timer for each call would cost more than most calls.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from batonmq._consumer.message import ReceivedMessage


class HandlerDeadlines:
    """The time limit of handler calls, each of which runs in a task of its own.

    Attributes:
        timeout_ms: The limit; None for none. `set` changes it, also for calls that run.
    """

    def __init__(self, timeout_ms: int | None) -> None:
        self.timeout_ms = timeout_ms
        self.loop = asyncio.get_running_loop()
        self._calls: set[HandlerCall] = set()
        self._timer: asyncio.TimerHandle | None = None

    def set(self, timeout_ms: int | None) -> None:
        """Change the limit."""
        self.timeout_ms = timeout_ms
        self.close()
        self._expire()

    def close(self) -> None:
        """Cancel the timer; the next call starts it again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def begin(self, call: HandlerCall) -> None:
        """Limit the time of a call."""
        self._calls.add(call)
        if self.timeout_ms is not None:
            self._wake_at(self._end_s(call, self.timeout_ms))

    def end(self, call: HandlerCall) -> None:
        """Forget a call that has returned."""
        self._calls.discard(call)

    def _expire(self) -> None:
        """Cancel the expired calls, and set the timer for the next."""
        self._timer = None
        if self.timeout_ms is None:
            return
        now_s, next_s = self.loop.time(), float("inf")
        for call in self._calls:
            end_s = self._end_s(call, self.timeout_ms)
            if end_s > now_s:
                next_s = min(next_s, end_s)
            else:
                call.expire()
        if next_s < float("inf"):
            self._wake_at(next_s)

    def _wake_at(self, when_s: float) -> None:
        """Check the calls at `when_s` or earlier; an early check does no harm."""
        if self._timer is None or when_s < self._timer.when():
            self.close()
            self._timer = self.loop.call_at(when_s, self._expire)

    def _end_s(self, call: HandlerCall, timeout_ms: int) -> float:
        return call.begin_s + (timeout_ms + call.extended_ms) / 1000


class HandlerCall:
    """One handler call: the block of a `with` statement, in the current task.

    Attributes:
        begin_s: When it began, by the clock of the event loop.
        message: The message that is handled, if the object serves one call after the other;
            extensions by other messages have no effect then. None: all messages extend the call.
        expired: Whether the limit was reached and the block cancelled. If the block ends by this
            cancellation, the `with` statement raises TimeoutError, as `asyncio.timeout` does.
    """

    __slots__ = (
        "_cancelling", "_deadlines", "_task", "begin_s", "expired", "extended_ms", "message",
    )  # fmt: skip

    def __init__(self, deadlines: HandlerDeadlines) -> None:
        task = asyncio.current_task(deadlines.loop)
        assert task is not None
        self._deadlines, self._task = deadlines, task
        self._cancelling = task.cancelling()
        self.begin_s = deadlines.loop.time()
        self.message: ReceivedMessage | None = None
        self.extended_ms = 0
        self.expired = False

    def __enter__(self) -> HandlerCall:
        self._deadlines.begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._deadlines.end(self)
        if self.expired:
            own_cancellation = self._task.uncancel() <= self._cancelling
            if own_cancellation and kind is asyncio.CancelledError:
                raise TimeoutError from error

    @property
    def allowed_ms(self) -> int:
        """The time that the call may take; without a limit, only its extensions."""
        return (self._deadlines.timeout_ms or 0) + self.extended_ms

    @property
    def cancelled(self) -> bool:
        """Whether the task itself was cancelled.

        If not, a CancelledError in the block is a failure of something that the handler awaited.
        """
        return self._task.cancelling() > self._cancelling

    def uncancel(self) -> None:
        """Undo the cancellations of the task since the call began."""
        while self.cancelled:
            self._task.uncancel()

    def extend(self, message: ReceivedMessage, ms: int) -> None:
        """Give the call of a message more time; may be called in any thread."""
        self._deadlines.loop.call_soon_threadsafe(self._extend, message, ms)

    def expire(self) -> None:
        """Cancel the block, once."""
        if not self.expired:
            self.expired = True
            self._task.cancel()

    def _extend(self, message: ReceivedMessage, ms: int) -> None:
        if self.message is not None and self.message is not message:
            return  # its call has ended
        self.extended_ms += ms
        if ms < 0:  # the timer may be too late
            self._deadlines.set(self._deadlines.timeout_ms)
