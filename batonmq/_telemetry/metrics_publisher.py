"""Publishes the events of a process to the metrics topic, one batch at a time.

A batch is retried until it is stored, then the next one is sent. So batches are stored in order,
and a batch that is stored twice has the same sequence number twice. Meanwhile events wait in a
bounded buffer, which drops the oldest ones and counts them. Publishing an event never waits.

A service also has a record between its incarnations: batches that one could not publish before it
stopped are published by the next one, before its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._common import timeouts
from batonmq._core.names import METRICS_TOPIC
from batonmq._telemetry.event_hub import BATCH_INTERVAL_S, EventBuffer, EventHub
from batonmq.errors import BatonError

log = logging.getLogger(__name__)

RETRY_S, DOUBLINGS_MAX = 1.0, 5
"""Delay of the first retry, which doubles with each further failure, at most so often."""
LAST_RETRY_S = 0.1
"""Delay of a retry after `stop`."""
FAILURES_LOGGED = 3
"""Number of consecutive failures after which a warning is logged."""


class MetricsSender(Protocol):
    """The part of `Producer` that the publisher needs."""

    def send(
        self, topic: str, body: bytes, *, keys: tuple[str], ordering_key: str
    ) -> Awaitable[object]:
        """Send one message and wait until it is stored."""
        ...


@dataclass(frozen=True, slots=True)
class StreamStart:
    """How the stream of a new incarnation starts.

    Attributes:
        batches: Encoded batches that the incarnation before has not published.
        event: First event of the incarnation itself.
    """

    batches: Sequence[bytes]
    event: pb.MetricEvent


class IncarnationRecord(Protocol):
    """What a process leaves for the next incarnation of its source."""

    async def take(self) -> StreamStart:
        """Return what the incarnation before has left; from now on this one is the newest."""
        ...

    def last_event(self) -> pb.MetricEvent:
        """Return the mark of the last batch of a process that stops gracefully."""
        ...

    async def forget_batches(self) -> None:
        """Remove the batches of the incarnation before: they are stored."""
        ...

    def keep(self, batches: Sequence[bytes]) -> bool:
        """Leave batches for the next incarnation, durably; return whether all are kept."""
        ...


class MetricsPublisher:
    """Publishes the events of a hub to the metrics topic.

    Args:
        opened: Creates a producer; called again after each failure.
        record: The record between the incarnations of a service; None for none.

    Attributes:
        dropped_count: Number of events that were dropped.
        complete: Whether the publisher has stopped, and all its batches are stored or kept.
    """

    def __init__(
        self,
        hub: EventHub,
        opened: Callable[[], AbstractAsyncContextManager[MetricsSender]],
        record: IncarnationRecord | None = None,
    ) -> None:
        self._hub, self._opened, self._record = hub, opened, record
        self._stopping = asyncio.Event()
        self._buffer: EventBuffer | None = None
        self._seq = self._earlier_count = 0
        self._unsent: deque[tuple[str, bytes]] = deque()
        self._is_last_gathered = False
        self._failures = 0
        self.dropped_count = 0
        self.complete = False

    def listen(self) -> None:
        """Collect events from now on, which `run` publishes; else it collects from its start on."""
        if self._buffer is None:
            self._buffer = self._hub.add_buffer()

    def stop(self) -> None:
        """Make `run` publish the remaining events and return. To stop at once, cancel it too.

        With a record, `run` leaves what it has not published to the next incarnation; no event may
        follow.
        """
        self._stopping.set()

    async def run(self) -> None:
        """Publish until `stop`; run it as one task.

        An unexpected error is logged and ends the publishing only.
        """
        self.listen()
        assert self._buffer is not None
        try:
            await self._run(self._buffer)
        except Exception:
            log.exception("publishing of metrics has ended by an error source=%s", self._hub.source)
        finally:
            self._hub.remove_buffer(self._buffer)
            self._buffer = None

    async def _run(self, buffer: EventBuffer) -> None:
        if self._record is not None:
            await self._begin(self._record)
        try:
            await self._publish_until_stopped(buffer)
        finally:
            if self._stopping.is_set() and self._record is not None:
                self._gather_last()
                batches = [*(body for _, body in self._unsent), *self._batches(buffer)]
                self.complete = not batches or self._record.keep(batches)

    async def _begin(self, record: IncarnationRecord) -> None:
        """Take over what the incarnation before has left."""
        start = await record.take()
        for body in start.batches:
            self._unsent.append((pb.MetricBatch.FromString(body).source, body))
        self._earlier_count = len(self._unsent)
        self._hub.publish(start.event)

    async def _publish_until_stopped(self, buffer: EventBuffer) -> None:
        stopped = False
        while not stopped:
            try:
                async with self._opened() as sender:
                    await self._publish(sender, buffer)
                    stopped = True
            except BatonError as error:
                self._failed(error)
                await self._pause(RETRY_S * 2 ** min(self._failures - 1, DOUBLINGS_MAX))
                if self._stopping.is_set():
                    if self._record is None:
                        return
                    await asyncio.sleep(LAST_RETRY_S)

    async def _publish(self, sender: MetricsSender, buffer: EventBuffer) -> None:
        """Publish until `stop`.

        Raises:
            BatonError: A batch is not stored, or it is unknown whether it is.
        """
        while True:
            if not self._unsent:
                await self._pause(BATCH_INTERVAL_S)
            if self._stopping.is_set():
                self._gather_last()
                await self._send_all(sender, buffer)
                return
            await self._hub.gather_if_due()
            await self._send_all(sender, buffer)

    async def _send_all(self, sender: MetricsSender, buffer: EventBuffer) -> None:
        while self._unsent or buffer.waiting:
            if not self._unsent:
                self._unsent.append((self._hub.source, self._next_batch(buffer)))
            source, body = self._unsent[0]
            await sender.send(METRICS_TOPIC, body, keys=(source,), ordering_key=source)
            self._unsent.popleft()
            if self._earlier_count and self._record is not None:
                self._earlier_count -= 1
                if not self._earlier_count:
                    await self._record.forget_batches()
            if self._failures >= FAILURES_LOGGED:
                log.info("metrics are published again seq=%d", self._seq)
            self._failures = 0

    def _next_batch(self, buffer: EventBuffer) -> bytes:
        self._seq += 1
        body = self._hub.batch(self._seq, buffer).SerializeToString()
        self.dropped_count = buffer.dropped_count
        return body

    def _batches(self, buffer: EventBuffer) -> list[bytes]:
        """Take all events out of the buffer, as batches."""
        batches: list[bytes] = []
        while buffer.waiting:
            batches.append(self._next_batch(buffer))
        return batches

    def _gather_last(self) -> None:
        """Gather the last events, once; a service ends them with the mark of its last batch."""
        if self._is_last_gathered:
            return
        self._is_last_gathered = True
        self._hub.gather()
        if self._record is not None:
            self._hub.publish(self._record.last_event())

    def _failed(self, error: BatonError) -> None:
        """Count a failure; warn once after several, as a new cluster may not have the topic yet."""
        self._failures += 1
        level = logging.WARNING if self._failures == FAILURES_LOGGED else logging.DEBUG
        log.log(level, "metrics can't be published seq=%d error=%s", self._seq, error)

    async def _pause(self, seconds: float) -> None:
        try:
            async with timeouts.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return
