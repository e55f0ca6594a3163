"""The newest offset of each key, for a bounded number of keys: sorted columns, 24 bytes per key."""

from __future__ import annotations

import numpy as np

from batonmq_server.storage.core.key_digests import Digests, Int64Array, UInt64Array

BYTES_PER_KEY = 24
"""Two columns of a digest, and one of offsets."""
PEAK_BYTES_PER_KEY = 96
"""With what a merge needs at the same time."""
PENDING_MIN = 65_536
"""Messages that are collected before they are merged, at least."""


class NewestOffsets:
    """The newest offset of each key among the added messages.

    Args:
        keys_max: Maximum number of keys; the caller asks `has_room` first.
    """

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._keys = Digests(np.empty(0, np.uint64), np.empty(0, np.uint64))
        self._offsets = np.empty(0, np.int64)
        self._pending: list[tuple[Digests, Int64Array]] = []
        self._pending_count = 0

    def __len__(self) -> int:
        """Number of keys."""
        self._merge()
        return len(self._keys)

    @property
    def bytes_count(self) -> int:
        """Bytes of the columns, without messages that are not merged yet."""
        return BYTES_PER_KEY * len(self._keys)

    def has_room(self, count: int) -> bool:
        """Return whether as many messages of any keys may be added."""
        if len(self._keys) + self._pending_count + count > self._keys_max:
            self._merge()
        return len(self._keys) + count <= self._keys_max

    def add(self, keys: Digests, offsets: Int64Array) -> None:
        """Add messages; their offsets are greater than those added before."""
        self._pending.append((keys, offsets))
        self._pending_count += len(offsets)
        if self._pending_count > max(PENDING_MIN, len(self._keys) // 4):
            self._merge()

    def find(self, keys: Digests) -> Int64Array:
        """Return the newest offset of each key; -1 if no message of it was added."""
        self._merge()
        found = np.full(len(keys), -1, np.int64)
        first = np.searchsorted(self._keys.high, keys.high, "left")
        last = np.searchsorted(self._keys.high, keys.high, "right")
        for step in range(int((last - first).max(initial=0))):  # more than 1 only by chance
            at = first + step
            same = np.flatnonzero(at < last)
            same = same[self._keys.low[at[same]] == keys.low[same]]
            found[same] = self._offsets[at[same]]
        return found

    def _merge(self) -> None:
        if not self._pending:
            return
        high: UInt64Array = np.concatenate([self._keys.high, *(k.high for k, _ in self._pending)])
        low: UInt64Array = np.concatenate([self._keys.low, *(k.low for k, _ in self._pending)])
        offsets = np.concatenate([self._offsets, *(one for _, one in self._pending)])
        self._pending, self._pending_count = [], 0
        order = np.lexsort((offsets, low, high))
        high, low, offsets = high[order], low[order], offsets[order]
        newest = np.append((high[1:] != high[:-1]) | (low[1:] != low[:-1]), True)
        self._keys, self._offsets = Digests(high[newest], low[newest]), offsets[newest]
