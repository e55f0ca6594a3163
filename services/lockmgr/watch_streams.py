"""Who listens to what happens to its queues: one stream per client, told of keys only.

What there is to say about a key is looked up when the stream is about to say it. So nothing is said
that is out of date, a slow listener holds up nobody, and what waits for it is bounded by the queues
it owns or waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import Overloaded


class WatchStream:
    """The queues that one listener has to be told of, and whether its stream is to end."""

    def __init__(self, keys: Iterable[GroupQueue]) -> None:
        self._keys = dict.fromkeys(keys)
        self.changed = asyncio.Event()
        self.over = False

    def add(self, key: GroupQueue) -> None:
        """Note that something has happened to `key`."""
        self._keys[key] = None
        self.changed.set()

    def take(self) -> list[GroupQueue]:
        """What has been noted since the last time, in order."""
        keys = list(self._keys)
        self._keys.clear()
        self.changed.clear()
        return keys

    def end(self) -> None:
        """Let the stream end."""
        self.over = True
        self.changed.set()


class WatchStreams:
    """The listeners of one term.

    Args:
        limit: More streams than this are refused.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._watchers: dict[Incarnation, WatchStream] = {}

    def __len__(self) -> int:
        return len(self._watchers)

    @contextmanager
    def listening(
        self, incarnation: Incarnation, keys: Iterable[GroupQueue]
    ) -> Iterator[WatchStream]:
        """A listener, told of `keys` first. A client has one: an earlier one of it ends.

        Raises:
            Overloaded: too many listen already.
        """
        earlier = self._watchers.pop(incarnation, None)
        if earlier is not None:
            earlier.end()
        if len(self._watchers) >= self._limit:
            raise Overloaded(
                f"{self._limit} clients watch already",
                retry_after_ms=10_000,
                facts={"limit": self._limit},
            )
        watcher = self._watchers[incarnation] = WatchStream(keys)
        try:
            yield watcher
        finally:
            if self._watchers.get(incarnation) is watcher:
                del self._watchers[incarnation]

    def tell(self, incarnation: Incarnation, key: GroupQueue) -> None:
        """Something has happened to `key` that concerns the client, if it listens."""
        watcher = self._watchers.get(incarnation)
        if watcher is not None:
            watcher.add(key)

    def close(self) -> None:
        """End all streams."""
        for watcher in self._watchers.values():
            watcher.end()
