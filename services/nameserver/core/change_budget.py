"""Bounds the changes of groups: by identity in number, by group in bytes."""

from __future__ import annotations

from collections import OrderedDict

KEYS_MAX = 10_000


class ChangeBudget:
    """Token buckets: each key may change `rate` times per second, and `burst` times at once.

    The buckets of the keys that were used longest ago are forgotten beyond 10,000: they are full
    unless more than 10,000 keys make changes at once.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._buckets: OrderedDict[int, tuple[float, int]] = OrderedDict()

    def wait_ms(self, key: int, now_ms: int) -> int:
        """Take one change of `key`; return 0, or the time in ms until there is one to take."""
        left, then_ms = self._buckets.pop(key, (self._burst, now_ms))
        left = min(self._burst, left + (now_ms - then_ms) * self._rate / 1000)
        wait_ms = 0 if left >= 1 else max(1, round((1 - left) / self._rate * 1000))
        self._buckets[key] = (left if wait_ms else left - 1), now_ms
        if len(self._buckets) > KEYS_MAX:
            self._buckets.popitem(last=False)
        return wait_ms


class WritePace:
    """The times at which groups may be written again, so that each writes at most `rate` bytes/s.

    Requests that arrive before are carried out together, by one write.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._ready_ms: dict[str, int] = {}

    def wait_ms(self, group: str, now_ms: int) -> int:
        """Return the time in ms until the group may be written; 0 if it may be."""
        return max(0, self._ready_ms.get(group, 0) - now_ms)

    def written(self, group: str, size: int, now_ms: int) -> None:
        """Record a write of `size` bytes; forget groups that may be written."""
        self._ready_ms = {name: at for name, at in self._ready_ms.items() if at > now_ms}
        self._ready_ms[group] = now_ms + size * 1000 // self._bytes_per_s
