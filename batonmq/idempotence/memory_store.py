"""A store of claims in the memory of one process."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from batonmq._common.clock import Clock


@dataclass(frozen=True, slots=True)
class _Entry:
    value: str
    expires_monotonic_ms: int


class MemoryStore:
    """A `Store` for tests and for groups with one member; it is lost when the process ends.

    Each message takes about 300 bytes for `done_ms`.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._entries: dict[str, _Entry] = {}
        self._expiries: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._entries)

    async def put(self, key: str, owner: str, value: str, keep_ms: int) -> str:
        """See `Store.put`."""
        now_ms = self._clock.monotonic_ms()
        self._expire(now_ms)
        entry = self._entries.get(key)
        if entry is not None and entry.value != owner:
            return entry.value
        self._entries[key] = _Entry(value, now_ms + keep_ms)
        heapq.heappush(self._expiries, (now_ms + keep_ms, key))
        return value

    async def remove(self, key: str, owner: str) -> None:
        """See `Store.remove`."""
        self._expire(self._clock.monotonic_ms())
        entry = self._entries.get(key)
        if entry is not None and entry.value == owner:
            del self._entries[key]

    def _expire(self, now_ms: int) -> None:
        while self._expiries and self._expiries[0][0] <= now_ms:
            _, key = heapq.heappop(self._expiries)
            entry = self._entries.get(key)
            if entry is not None and entry.expires_monotonic_ms <= now_ms:
                del self._entries[key]
