"""Messages that were lost and that nobody waits for."""

from __future__ import annotations

import logging

from batonmq.errors import BatonError

log = logging.getLogger(__name__)

LOG_INTERVAL_MS = 10_000


class OneWayFailures:
    """Counts them, and tells the log from time to time.

    Attributes:
        count: How many there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._told_count = 0
        self._told_ms: int | None = None

    def add(self, count: int, error: BatonError, now_ms: int) -> None:
        """Some more were lost, of `error`.

        Args:
            now_ms: Monotonic.
        """
        self.count += count
        recently = self._told_ms is not None and now_ms < self._told_ms + LOG_INTERVAL_MS
        if not count or recently:
            return
        log.warning(
            "one-way messages failed count=%d total=%d error=%s",
            self.count - self._told_count,
            self.count,
            error,
        )
        self._told_count, self._told_ms = self.count, now_ms
