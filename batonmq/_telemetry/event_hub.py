"""The metric events of a process: bounded buffers, and batches for readers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._common.aio import in_steps
from batonmq._common.clock import Clock
from batonmq.errors import Overloaded

VOCABULARY = 1
EVENTS_MAX = 10_000
"""Most events in one buffer; beyond it the oldest are dropped and counted."""
EVENT_BYTES_MAX = 8 * 1024 * 1024
"""Most bytes of events in one buffer."""
BATCH_BYTES_MAX = 256 * 1024
"""Approximate size limit of a batch with more than one event."""
WATCHERS_MAX = 16
BATCH_INTERVAL_S = 1.0
UNREAD_S_MAX = 30.0
"""A watcher that takes longer to read a batch is dropped. While it reads nothing, no task gathers
the counts for it, and they grow."""

Gather = Callable[[], Iterable[pb.MetricEvent]]


class EventHub:
    """Distributes events to every buffer. Publishing never waits.

    Frequent actions have no event of their own: gatherers count them while `watched`, and the
    reader of a buffer gathers the counts as events about once a second.

    Args:
        source: Service and node, such as "storage/broker-a".
        incarnation_id: Random number of this run of the source.

    Attributes:
        gatherers: Each returns an iterator of events with its counts since its last call.
        watched: Whether there is a buffer; if not, callers need not build events.
    """

    def __init__(self, source: str, incarnation_id: int, clock: Clock) -> None:
        self.source, self.incarnation_id, self._clock = source, incarnation_id, clock
        self.gatherers: list[Gather] = []
        self.watched = False
        self._listeners: dict[EventBuffer, None] = {}
        self._watchers: set[EventBuffer] = set()
        self._gathered_s = 0.0
        self._gathering: Iterator[pb.MetricEvent] = iter(())
        self._counts_are_old = False  # those since the last gathering are of a former reader

    def publish(self, event: pb.MetricEvent) -> None:
        """Set the time of the event and add it to the buffers."""
        if self._listeners:
            event.unix_ms = self._clock.unix_ms()
            size = event.ByteSize()
            for listener in self._listeners:
                listener.add(event, size)

    def gather(self) -> None:
        """Publish the counts until now as events, and those that `gather_if_due` has left."""
        for event in self._events():
            self.publish(event)

    async def gather_if_due(self) -> None:
        """Publish the counts until now, in steps.

        If another reader has just begun to do so, help it, so that the buffers have all of them.
        """
        now_s = asyncio.get_running_loop().time()
        due = now_s >= self._gathered_s + BATCH_INTERVAL_S / 2
        async for event in in_steps(self._events() if due else self._gathering):
            self.publish(event)

    def _events(self) -> Iterator[pb.MetricEvent]:
        """Return what is left of the gathering in progress, and then the counts since."""
        self._gathered_s = asyncio.get_running_loop().time()
        counted = (event for gatherer in self.gatherers for event in gatherer())
        self._gathering = chain(self._gathering, counted)
        return self._gathering

    async def _drop_counts(self) -> None:
        """Drop the counts until now, in steps."""
        self._counts_are_old = False
        async for _ in in_steps(self._events()):
            pass

    @contextmanager
    def listen(self) -> Iterator[EventBuffer]:
        """Return a buffer that receives the events until the block ends."""
        listener = self.add_buffer()
        try:
            yield listener
        finally:
            self.remove_buffer(listener)

    def add_buffer(self) -> EventBuffer:
        """Return a buffer that receives the events until `remove_buffer`."""
        listener = EventBuffer()
        self._add(listener)
        return listener

    def _add(self, listener: EventBuffer) -> None:
        self._listeners[listener] = None
        self.watched, self._counts_are_old = True, False

    def remove_buffer(self, listener: EventBuffer) -> None:
        """Add no more events to a buffer, if it receives any."""
        if self._listeners.pop(listener, listener) is not listener:
            self.watched = bool(self._listeners)
            self._counts_are_old = not self.watched

    def batch(self, seq: int, listener: EventBuffer) -> pb.MetricBatch:
        """Take the oldest events out of a buffer and return them as batch `seq`."""
        return pb.MetricBatch(
            source=self.source,
            incarnation_id=self.incarnation_id,
            seq=seq,
            events=listener.take(BATCH_BYTES_MAX),
            dropped_count=listener.dropped_count,
            vocabulary=VOCABULARY,
        )

    async def watch(self) -> AsyncIterator[pb.MetricBatch]:
        """Yield batches of events from now on.

        Raises:
            Overloaded: There are `WATCHERS_MAX` watchers already, or this one has not read a batch
                for `UNREAD_S_MAX`.
        """
        if len(self._watchers) >= WATCHERS_MAX:
            raise Overloaded(
                f"limit of {WATCHERS_MAX} watchers reached",
                retry_after_ms=10_000,
                facts={"limit": WATCHERS_MAX},
            )
        seq, listener = 0, EventBuffer()
        self._watchers.add(listener)
        try:
            if self._counts_are_old:
                await self._drop_counts()
            self._add(listener)
            while True:
                await asyncio.sleep(BATCH_INTERVAL_S)
                await self.gather_if_due()
                while listener.waiting:
                    seq += 1
                    with self._dropped_if_unread(listener):
                        yield self.batch(seq, listener)
                    if listener not in self._watchers:
                        raise _unread()
        finally:
            self._drop_watcher(listener)

    @contextmanager
    def _dropped_if_unread(self, watcher: EventBuffer) -> Iterator[None]:
        """Drop the watcher if it does not read a batch in time."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(UNREAD_S_MAX, self._drop_watcher, watcher)
        try:
            yield
        finally:
            timer.cancel()

    def _drop_watcher(self, watcher: EventBuffer) -> None:
        self._watchers.discard(watcher)
        self.remove_buffer(watcher)


def _unread() -> Overloaded:
    return Overloaded(
        f"the watcher has not read a batch for {UNREAD_S_MAX:g} s: its stream ends",
        remedy="Read the stream faster, and open it again.",
        retry_after_ms=1_000,
        facts={"limit_s": str(UNREAD_S_MAX)},
    )


class EventBuffer:
    """A bounded buffer of events.

    Attributes:
        dropped_count: Number of events dropped because the buffer was full.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[pb.MetricEvent, int]] = deque()
        self._bytes = 0
        self.dropped_count = 0

    @property
    def waiting(self) -> bool:
        """Whether the buffer has an event."""
        return bool(self._events)

    def add(self, event: pb.MetricEvent, size: int) -> None:
        """Add an event of `size` bytes; drop the oldest events if the buffer is full."""
        self._events.append((event, size))
        self._bytes += size
        while len(self._events) > EVENTS_MAX or self._bytes > EVENT_BYTES_MAX:
            self._bytes -= self._events.popleft()[1]
            self.dropped_count += 1

    def take(self, bytes_max: int) -> list[pb.MetricEvent]:
        """Take the oldest events, at most `bytes_max` bytes, but at least one if there is any."""
        taken: list[pb.MetricEvent] = []
        room = bytes_max
        while self._events and (not taken or self._events[0][1] <= room):
            event, size = self._events.popleft()
            room -= size
            self._bytes -= size
            taken.append(event)
        return taken
