"""Open Watch streams, one per client; a stream sends keys only.

The notice for a key is made when the stream is about to send it. So no notice is out of date, a
slow client delays no other, and the memory of a stream is bounded by the queues that its client
owns or waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import Overloaded


class WatchStream:
    """The queues whose state a client has to be told of, and whether its stream has to end."""

    def __init__(self, keys: Iterable[GroupQueue]) -> None:
        self._keys = dict.fromkeys(keys)
        self.changed = asyncio.Event()
        self.ended = False

    def add(self, key: GroupQueue) -> None:
        """Note that the state of `key` has changed."""
        self._keys[key] = None
        self.changed.set()

    def take_keys(self) -> list[GroupQueue]:
        """Return and forget the noted keys, in order."""
        keys = list(self._keys)
        self._keys.clear()
        self.changed.clear()
        return keys

    def end(self) -> None:
        """Make the stream end."""
        self.ended = True
        self.changed.set()


class WatchStreams:
    """The streams of one term.

    Args:
        limit: Greatest number of open streams.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._streams: dict[Incarnation, WatchStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @contextmanager
    def open(self, incarnation: Incarnation, keys: Iterable[GroupQueue]) -> Iterator[WatchStream]:
        """Yield a new stream, to be told of `keys` first. An earlier one of the client ends.

        Raises:
            Overloaded: the limit is reached.
        """
        earlier = self._streams.pop(incarnation, None)
        if earlier is not None:
            earlier.end()
        if len(self._streams) >= self._limit:
            raise Overloaded(
                f"the limit of {self._limit} Watch streams is reached",
                retry_after_ms=10_000,
                facts={"limit": self._limit},
            )
        stream = self._streams[incarnation] = WatchStream(keys)
        try:
            yield stream
        finally:
            if self._streams.get(incarnation) is stream:
                del self._streams[incarnation]

    def notify(self, incarnation: Incarnation, key: GroupQueue) -> None:
        """Tell the client, if it has a stream, that the state of `key` has changed."""
        watched = [incarnation] if incarnation in self._streams or incarnation.owner else None
        for one in watched or filter(incarnation.matches, self._streams):
            if (stream := self._streams.get(one)) is not None:
                stream.add(key)

    def close(self) -> None:
        """End all streams."""
        for stream in self._streams.values():
            stream.end()
