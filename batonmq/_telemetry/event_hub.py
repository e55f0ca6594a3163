"""What a process tells live of itself: events, bounded buffers, and the batches they go out in."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq.errors import Overloaded

VOCABULARY = 1
EVENTS_MAX = 10_000
"""Events that wait for one listener; beyond, the oldest are dropped and counted."""
EVENT_BYTES_MAX = 8 * 1024 * 1024
"""And so many bytes of them."""
BATCH_BYTES_MAX = 256 * 1024
"""A batch of more than one event is not longer, about."""
WATCHERS_MAX = 16
BATCH_INTERVAL_S = 1.0

Gather = Callable[[], Iterable[pb.MetricEvent]]


class EventHub:
    """Takes events and hands each to every listener. Publishing never waits.

    What happens too often for an event of its own is counted where it happens, while `watched`,
    and gathered about once a second by whoever empties a listener.

    Args:
        source: Service and node, "storage/broker-a".
        incarnation_id: Random number of this life of the source.

    Attributes:
        gatherers: Each is asked for the events of what it has counted since the last time.
        watched: Whether anybody listens; callers need not build events otherwise.
    """

    def __init__(self, source: str, incarnation_id: int, clock: Clock) -> None:
        self.source, self.incarnation_id, self._clock = source, incarnation_id, clock
        self.gatherers: list[Gather] = []
        self.watched = False
        self._listeners: dict[EventBuffer, None] = {}
        self._watcher_count, self._gathered_s = 0, 0.0

    def publish(self, event: pb.MetricEvent) -> None:
        """Stamp the event with the time and hand it to the listeners."""
        if self._listeners:
            event.unix_ms = self._clock.unix_ms()
            size = event.ByteSize()
            for listener in self._listeners:
                listener.add(event, size)

    def gather(self) -> None:
        """Publish what was counted since the last time."""
        self._gathered_s = asyncio.get_running_loop().time()
        for gatherer in self.gatherers:
            for event in gatherer():
                self.publish(event)

    def gather_if_due(self) -> None:
        """`gather`, unless another listener has just made us do so."""
        if asyncio.get_running_loop().time() >= self._gathered_s + BATCH_INTERVAL_S / 2:
            self.gather()

    @contextmanager
    def listen(self) -> Iterator[EventBuffer]:
        """A buffer that takes the events from now on until the block ends."""
        listener = EventBuffer()
        self._listeners[listener] = None
        self.watched = True
        try:
            yield listener
        finally:
            del self._listeners[listener]
            self.watched = bool(self._listeners)

    def batch(self, seq: int, listener: EventBuffer) -> pb.MetricBatch:
        """The oldest events that wait for a listener, taken out of its buffer, as batch `seq`."""
        return pb.MetricBatch(
            source=self.source,
            incarnation_id=self.incarnation_id,
            seq=seq,
            events=listener.take(BATCH_BYTES_MAX),
            dropped_count=listener.dropped_count,
            vocabulary=VOCABULARY,
        )

    async def watch(self) -> AsyncIterator[pb.MetricBatch]:
        """Batches of events from now on.

        Raises:
            Overloaded: too many watch already.
        """
        if self._watcher_count >= WATCHERS_MAX:
            raise Overloaded(
                f"{WATCHERS_MAX} watchers already",
                retry_after_ms=10_000,
                facts={"limit": WATCHERS_MAX},
            )
        seq = 0
        self._watcher_count += 1
        try:
            with self.listen() as listener:
                while True:
                    await asyncio.sleep(BATCH_INTERVAL_S)
                    self.gather_if_due()
                    while listener.waiting:
                        seq += 1
                        yield self.batch(seq, listener)
        finally:
            self._watcher_count -= 1


class EventBuffer:
    """A bounded buffer of events.

    Attributes:
        dropped_count: Events that it had no room for, so far.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[pb.MetricEvent, int]] = deque()
        self._bytes = 0
        self.dropped_count = 0

    @property
    def waiting(self) -> bool:
        """Whether there is an event."""
        return bool(self._events)

    def add(self, event: pb.MetricEvent, size: int) -> None:
        """Take an event of `size` bytes; the oldest goes if there is no room."""
        self._events.append((event, size))
        self._bytes += size
        while len(self._events) > EVENTS_MAX or self._bytes > EVENT_BYTES_MAX:
            self._bytes -= self._events.popleft()[1]
            self.dropped_count += 1

    def take(self, bytes_max: int) -> list[pb.MetricEvent]:
        """The oldest events, of so many bytes, but one at least if there is any."""
        taken: list[pb.MetricEvent] = []
        room = bytes_max
        while self._events and (not taken or self._events[0][1] <= room):
            event, size = self._events.popleft()
            room -= size
            self._bytes -= size
            taken.append(event)
        return taken
