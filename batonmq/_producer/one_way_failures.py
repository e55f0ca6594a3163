"""Failures of one-way messages, for which the sender gets no receipt."""

from __future__ import annotations

import logging

from batonmq.errors import BatonError

log = logging.getLogger(__name__)

LOG_INTERVAL_MS = 10_000


class OneWayFailures:
    """Counts failed one-way messages and logs them, at most once per `LOG_INTERVAL_MS`.

    Attributes:
        count: Messages that have failed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._logged_count = 0
        self._logged_ms: int | None = None

    def add(self, count: int, error: BatonError, now_ms: int) -> None:
        """Count `count` messages that failed with `error`.

        Args:
            now_ms: Monotonic time.
        """
        self.count += count
        recently = self._logged_ms is not None and now_ms < self._logged_ms + LOG_INTERVAL_MS
        if not count or recently:
            return
        log.warning(
            "one-way messages failed count=%d total=%d error=%s",
            self.count - self._logged_count,
            self.count,
            error,
        )
        self._logged_count, self._logged_ms = self.count, now_ms
