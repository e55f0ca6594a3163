"""When a consumer commits the acks of all its queues, besides those that ask for a commit."""

from __future__ import annotations

from collections.abc import Callable

LONG_CALL_COMMIT_MS = 500
"""How often a consumer commits while a handler runs long."""


class CommitSchedule:
    """Decides when all queues are committed: regularly, and while a handler runs long.

    Commits of single queues in between change nothing. Times are of one monotonic clock.
    """

    def __init__(self, interval_ms: int, now_ms: int) -> None:
        self._interval_ms = interval_ms
        self._looked_ms, self._due_ms = now_ms, now_ms + interval_ms

    def wait_ms(self, now_ms: int, *, running: bool) -> int:
        """Return the time until `is_due` has to be called.

        Args:
            running: Whether a handler runs.
        """
        look_ms = self._looked_ms + LONG_CALL_COMMIT_MS
        return max(0, (min(self._due_ms, look_ms) if running else self._due_ms) - now_ms)

    def is_due(self, now_ms: int, *, running: bool, runs_long: Callable[[], bool]) -> bool:
        """Whether to commit all queues now; the next regular commit is an interval later then.

        Args:
            runs_long: Whether a handler has run for so long that it may hang. It is called at most
                every `LONG_CALL_COMMIT_MS`, as it may look at many queues.
        """
        if self.wait_ms(now_ms, running=running) > 0:
            return False
        self._looked_ms = now_ms
        if now_ms < self._due_ms and not runs_long():
            return False
        self._due_ms = now_ms + self._interval_ms
        return True
