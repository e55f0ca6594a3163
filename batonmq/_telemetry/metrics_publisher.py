"""Publishes what a process tells of itself to the topic of the metrics, one batch at a time.

A batch is sent until it is known to be stored, then the next one: so batches lie in order, and one
that was stored twice has the same number twice. What happens meanwhile waits in a bounded buffer,
which drops and counts. Nobody who publishes an event waits for any of this.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._core.names import METRICS_TOPIC
from batonmq._telemetry.event_hub import BATCH_INTERVAL_S, EventBuffer, EventHub
from batonmq.errors import BatonError

log = logging.getLogger(__name__)

RETRY_S, DOUBLINGS_MAX = 1.0, 5
"""After a failure it is tried again a little later; after each that follows, twice as late."""
FAILURES_TOLD = 3
"""After so many failures in a row the log is told."""

Encode = Callable[[pb.MetricBatch], bytes]


class MetricsSender(Protocol):
    """The part of a producer that is needed."""

    def send(
        self, topic: str, body: bytes, *, keys: tuple[str], ordering_key: str
    ) -> Awaitable[object]:
        """Send one message and wait until it is safe."""
        ...


def as_protobuf(batch: pb.MetricBatch) -> bytes:
    """The batch as it is."""
    return batch.SerializeToString()


class MetricsPublisher:
    """Empties a hub into the topic.

    Args:
        opened: Makes a producer; called again after each failure.
        encode: Makes the body of a message of a batch.

    Attributes:
        dropped_count: Events that were lost, so far.
    """

    def __init__(
        self,
        hub: EventHub,
        opened: Callable[[], AbstractAsyncContextManager[MetricsSender]],
        encode: Encode = as_protobuf,
    ) -> None:
        self._hub, self._opened, self._encode = hub, opened, encode
        self._stopping = asyncio.Event()
        self._seq = 0
        self._unsent: bytes = b""
        self._failures = 0
        self.dropped_count = 0

    def stop(self) -> None:
        """Let `run` end once it has sent what there is; who can't wait for that cancels it."""
        self._stopping.set()

    async def run(self) -> None:
        """Publish until `stop`; to be run as one task.

        What goes wrong in telling is logged, and ends nothing but the telling.
        """
        try:
            await self._run()
        except Exception:
            log.exception("metrics are not published any more source=%s", self._hub.source)

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
            BatonError: a batch may not be stored.
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
                self._unsent = self._encode(self._hub.batch(self._seq, listener))
                self.dropped_count = listener.dropped_count
            source = self._hub.source
            await sender.send(METRICS_TOPIC, self._unsent, keys=(source,), ordering_key=source)
            self._unsent = b""
            if self._failures >= FAILURES_TOLD:
                log.info("metrics are published again seq=%d", self._seq)
            self._failures = 0

    def _failed(self, error: BatonError) -> None:
        """Tell the log once: at the start of a cluster the topic may not be there yet."""
        self._failures += 1
        level = logging.WARNING if self._failures == FAILURES_TOLD else logging.DEBUG
        log.log(level, "metrics wait unpublished seq=%d error=%s", self._seq, error)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return
