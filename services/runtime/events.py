"""What a service tells live of itself: a bounded buffer and the stream that empties it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import grpc.aio
from baton.metrics.v1 import metrics_service_pb2 as pb
from baton.metrics.v1 import metrics_service_pb2_grpc as pb_grpc

from batonmq.common.clock import Clock
from batonmq.common.errors import Overloaded

EVENTS_MAX = 10_000
"""Events that wait for one watcher; beyond, the oldest are dropped and counted."""
WATCHERS_MAX = 16
BATCH_INTERVAL_S = 1.0


class EventHub:
    """Takes events and hands each to every watcher. Publishing never waits.

    Args:
        source: Service and node, "storage/broker-a".
        incarnation_id: Random number of this process life.
    """

    def __init__(self, source: str, incarnation_id: int, clock: Clock) -> None:
        self.source, self.incarnation_id, self._clock = source, incarnation_id, clock
        self._watchers: set[_Buffer] = set()

    @property
    def watched(self) -> bool:
        """Whether anybody listens; callers may skip building events otherwise."""
        return bool(self._watchers)

    def publish(self, event: pb.MetricEvent) -> None:
        """Stamp the event with the time and hand it to the watchers."""
        event.unix_ms = self._clock.unix_ms()
        for watcher in self._watchers:
            watcher.add(event)

    async def watch(self) -> AsyncIterator[pb.MetricBatch]:
        """Batches of events from now on.

        Raises:
            Overloaded: too many watch already.
        """
        if len(self._watchers) >= WATCHERS_MAX:
            raise Overloaded(
                f"{WATCHERS_MAX} watchers already",
                retry_after_ms=10_000,
                facts={"limit": WATCHERS_MAX},
            )
        buffer, seq = _Buffer(), 0
        self._watchers.add(buffer)
        try:
            while True:
                await buffer.arrived.wait()
                seq += 1
                events, dropped_count = buffer.take()
                yield pb.MetricBatch(
                    source=self.source,
                    incarnation_id=self.incarnation_id,
                    seq=seq,
                    events=events,
                    dropped_count=dropped_count,
                )
                await asyncio.sleep(BATCH_INTERVAL_S)
        finally:
            self._watchers.discard(buffer)


class _Buffer:
    def __init__(self) -> None:
        self._events: deque[pb.MetricEvent] = deque(maxlen=EVENTS_MAX)
        self._dropped_count = 0
        self.arrived = asyncio.Event()

    def add(self, event: pb.MetricEvent) -> None:
        self._dropped_count += len(self._events) == EVENTS_MAX
        self._events.append(event)
        self.arrived.set()

    def take(self) -> tuple[list[pb.MetricEvent], int]:
        events = list(self._events)
        self._events.clear()
        self.arrived.clear()
        return events, self._dropped_count


class MetricsServicer(pb_grpc.MetricsServiceServicer):
    """The live stream of a service's events."""

    def __init__(self, hub: EventHub) -> None:
        self._hub = hub

    async def Watch(
        self,
        request: pb.WatchRequest,
        context: grpc.aio.ServicerContext[pb.WatchRequest, pb.WatchResponse],
    ) -> AsyncIterator[pb.WatchResponse]:
        """See the proto."""
        async for batch in self._hub.watch():
            yield pb.WatchResponse(batch=batch)
