"""Bounds lines of log that callers can cause: one per key and interval, with a count."""

from __future__ import annotations

from collections.abc import Callable, Hashable

KEYS_MAX = 1_000
"""Keys beyond this number share one line."""


class LogLimiter:
    """Decides which events get a line.

    Args:
        monotonic_ms: Returns the time.
        interval_ms: Time between two lines of one key.
    """

    def __init__(self, monotonic_ms: Callable[[], int], interval_ms: int) -> None:
        self._monotonic_ms, self._interval_ms = monotonic_ms, interval_ms
        self._lines: dict[Hashable, tuple[int, int]] = {}

    def count(self, key: Hashable) -> int:
        """Count one event; return the number of events for its line, or 0 if it gets none.

        The number includes the events without a line since the previous line of the key.
        """
        now_ms = self._monotonic_ms()
        if key not in self._lines and len(self._lines) >= KEYS_MAX:
            self._forget_old(now_ms)
            if len(self._lines) >= KEYS_MAX:
                key = None
        line_ms, without = self._lines.get(key, (now_ms - self._interval_ms, 0))
        if now_ms - line_ms < self._interval_ms:
            self._lines[key] = line_ms, without + 1
            return 0
        self._lines[key] = now_ms, 0
        return without + 1

    def _forget_old(self, now_ms: int) -> None:
        """Forget the keys that get a line at their next event; keep the count of unreported events.

        The shared line reports it, so no count is lost.
        """
        shared_ms, total = self._lines.pop(None, (now_ms - self._interval_ms, 0))
        kept: dict[Hashable, tuple[int, int]] = {}
        for key, (line_ms, without) in self._lines.items():
            if now_ms - line_ms < self._interval_ms:
                kept[key] = line_ms, without
            else:
                total += without
        if total or now_ms - shared_ms < self._interval_ms:
            kept[None] = shared_ms, total
        self._lines = kept
