"""Publishes the events of a process to the metrics topic, one batch at a time.

A batch is retried until it is stored, then the next one is sent. So batches are stored in order,
and a batch that is stored twice has the same sequence number twice. Meanwhile events wait in a
bounded buffer, which drops the oldest ones and counts them. Publishing an event never waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from batonmq._core.names import METRICS_TOPIC
from batonmq._telemetry.event_hub import BATCH_INTERVAL_S, EventBuffer, EventHub
from batonmq.errors import BatonError

log = logging.getLogger(__name__)

RETRY_S, DOUBLINGS_MAX = 1.0, 5
"""Delay of the first retry, which doubles with each further failure, at most so often."""
FAILURES_LOGGED = 3
"""Number of consecutive failures after which a warning is logged."""


class MetricsSender(Protocol):
    """The part of `Producer` that the publisher needs."""

    def send(
        self, topic: str, body: bytes, *, keys: tuple[str], ordering_key: str
    ) -> Awaitable[object]:
        """Send one message and wait until it is stored."""
        ...


class MetricsPublisher:
    """Publishes the events of a hub to the metrics topic.

    Args:
        opened: Creates a producer; called again after each failure.

    Attributes:
        dropped_count: Number of events that were dropped.
    """

    def __init__(
        self,
        hub: EventHub,
        opened: Callable[[], AbstractAsyncContextManager[MetricsSender]],
    ) -> None:
        self._hub, self._opened = hub, opened
        self._stopping = asyncio.Event()
        self._seq = 0
        self._unsent: bytes = b""
        self._failures = 0
        self.dropped_count = 0

    def stop(self) -> None:
        """Make `run` publish the remaining events and return. To stop at once, cancel it."""
        self._stopping.set()

    async def run(self) -> None:
        """Publish until `stop`; run it as one task.

        An unexpected error is logged and ends the publishing only.
        """
        try:
            await self._run()
        except Exception:
            log.exception("publishing of metrics has ended by an error source=%s", self._hub.source)

    async def _run(self) -> None:
        with self._hub.listen() as listener:
            publishing = True
            while publishing and not self._stopping.is_set():
                try:
                    async with self._opened() as sender:
                        await self._publish(sender, listener)
                        publishing = False
                except BatonError as error:
                    self._failed(error)
                    await self._pause(RETRY_S * 2 ** min(self._failures - 1, DOUBLINGS_MAX))

    async def _publish(self, sender: MetricsSender, listener: EventBuffer) -> None:
        """Publish until `stop`.

        Raises:
            BatonError: A batch is not stored, or it is unknown whether it is.
        """
        while True:
            if not self._unsent:
                await self._pause(BATCH_INTERVAL_S)
            if self._stopping.is_set():
                self._hub.gather()
                await self._send_all(sender, listener)
                return
            self._hub.gather_if_due()
            await self._send_all(sender, listener)

    async def _send_all(self, sender: MetricsSender, listener: EventBuffer) -> None:
        while self._unsent or listener.waiting:
            if not self._unsent:
                self._seq += 1
                self._unsent = self._hub.batch(self._seq, listener).SerializeToString()
                self.dropped_count = listener.dropped_count
            source = self._hub.source
            await sender.send(METRICS_TOPIC, self._unsent, keys=(source,), ordering_key=source)
            self._unsent = b""
            if self._failures >= FAILURES_LOGGED:
                log.info("metrics are published again seq=%d", self._seq)
            self._failures = 0

    def _failed(self, error: BatonError) -> None:
        """Count a failure; warn once after several, as a new cluster may not have the topic yet."""
        self._failures += 1
        level = logging.WARNING if self._failures == FAILURES_LOGGED else logging.DEBUG
        log.log(level, "metrics can't be published seq=%d error=%s", self._seq, error)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return
