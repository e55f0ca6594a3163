"""Ends what takes too long: one timer for all that runs, so quick runs pay next to nothing."""

from __future__ import annotations

import asyncio
from types import TracebackType


class HandlerDeadlines:
    """Gives each run, in a task of its own, so much time.

    Attributes:
        timeout_ms: That time; None for any. `set` changes it, for what runs already too.
    """

    def __init__(self, timeout_ms: int | None) -> None:
        self.timeout_ms = timeout_ms
        self.loop = asyncio.get_running_loop()
        self._running: set[HandlerCall] = set()
        self._timer: asyncio.TimerHandle | None = None

    def set(self, timeout_ms: int | None) -> None:
        """Change the time."""
        self.timeout_ms = timeout_ms
        self.close()
        self._expire()

    def close(self) -> None:
        """Drop the timer; it comes again with the next run."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def begin(self, run: HandlerCall) -> None:
        """Watch a run."""
        self._running.add(run)
        if self.timeout_ms is not None:
            self._wake_at(self._end_s(run, self.timeout_ms))

    def end(self, run: HandlerCall) -> None:
        """The run is over."""
        self._running.discard(run)

    def _expire(self) -> None:
        """End the runs whose time is over, and come back for the next."""
        self._timer = None
        if self.timeout_ms is None:
            return
        now_s, next_s = self.loop.time(), float("inf")
        for run in self._running:
            end_s = self._end_s(run, self.timeout_ms)
            if end_s > now_s:
                next_s = min(next_s, end_s)
            else:
                run.expire()
        if next_s < float("inf"):
            self._wake_at(next_s)

    def _wake_at(self, when_s: float) -> None:
        """Look after the runs then at the latest; to look too early does no harm."""
        if self._timer is None or when_s < self._timer.when():
            self.close()
            self._timer = self.loop.call_at(when_s, self._expire)

    def _end_s(self, run: HandlerCall, timeout_ms: int) -> float:
        return run.begin_s + (timeout_ms + run.extended_ms) / 1000


class HandlerCall:
    """What the current task does inside of `with`.

    Attributes:
        expired: Whether its time was over. It is cancelled then, and TimeoutError raised outside,
            as by `asyncio.timeout`; unless it ends in another way.
    """

    __slots__ = ("_cancelling", "_deadlines", "_task", "begin_s", "expired", "extended_ms")

    def __init__(self, deadlines: HandlerDeadlines) -> None:
        task = asyncio.current_task(deadlines.loop)
        assert task is not None
        self._deadlines, self._task = deadlines, task
        self._cancelling = task.cancelling()
        self.begin_s = deadlines.loop.time()
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
            ours = self._task.uncancel() <= self._cancelling
            if ours and kind is asyncio.CancelledError:
                raise TimeoutError from error

    @property
    def allowed_ms(self) -> int:
        """How long it may take; without a bound only what it was extended by."""
        return (self._deadlines.timeout_ms or 0) + self.extended_ms

    @property
    def cancelled(self) -> bool:
        """Whether the task is to end, and not only what it does here.

        Else a CancelledError is the failure of something else that was waited for.
        """
        return self._task.cancelling() > self._cancelling

    def extend(self, ms: int) -> None:
        """Give it so much more time; from any thread."""
        self._deadlines.loop.call_soon_threadsafe(self._extend, ms)

    def expire(self) -> None:
        """End it, once."""
        if not self.expired:
            self.expired = True
            self._task.cancel()

    def _extend(self, ms: int) -> None:
        self.extended_ms += ms
        if ms < 0:  # then the timer may be too late
            self._deadlines.set(self._deadlines.timeout_ms)
