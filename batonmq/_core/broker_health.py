"""Brokers that a producer avoids for a time, because they were slow or failed.

Source: RocketMQ's latency fault tolerance (MQFaultStrategy, LatencyFaultToleranceImpl): the last
latency of a broker determines how long it is avoided, and a failure counts as a high latency.

After that time the broker gets one batch as a probe. Until the batch has an outcome, but no longer
than after a failure, the broker is still avoided. A health check would be a worse probe: a broker
with a slow or full disk reports that it serves.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence

from batonmq._core.queues import QueueRef

LATENCIES_MS = (50, 100, 550, 1_800, 3_000, 5_000, 15_000)
AVOIDED_MS = (0, 0, 2_000, 5_000, 6_000, 10_000, 30_000)
"""A broker with a latency of `LATENCIES_MS[i]` or more is avoided for `AVOIDED_MS[i]`."""
FAILED_MS = 10_000
"""A broker that failed is avoided for this time."""


class BrokerHealth:
    """The brokers that a producer avoids, and until when."""

    def __init__(self) -> None:
        self._avoided_until_ms: dict[str, int] = {}

    def answered(self, broker: str, latency_ms: int, now_ms: int) -> None:
        """Record that a broker has responded after `latency_ms`."""
        level = bisect_right(LATENCIES_MS, latency_ms)
        avoided_ms = AVOIDED_MS[level - 1] if level else 0
        if avoided_ms:
            self._avoided_until_ms[broker] = now_ms + avoided_ms
        else:
            self._avoided_until_ms.pop(broker, None)

    def failed(self, broker: str, now_ms: int) -> None:
        """Record that a broker did not respond, or failed."""
        self._avoided_until_ms[broker] = now_ms + FAILED_MS

    def takes_count(self, queues: Sequence[QueueRef], broker: str, now_ms: int) -> int:
        """Return how many batches for any of `queues` should go to another broker than `broker`.

        That is all batches if another broker is not avoided; one if another is due for a probe.
        """
        others = {queue.broker for queue in queues} - {broker}
        if any(other not in self._avoided_until_ms for other in others):
            return sys.maxsize
        return int(any(self._avoided_until_ms[other] <= now_ms for other in others))

    def choose(self, queues: Sequence[QueueRef], turn: int, now_ms: int) -> QueueRef:
        """Return the next queue in turn, of the brokers that are not avoided.

        A broker that is due for a probe comes first. If all brokers are avoided, the queue is of
        the one that is avoided for the shortest time.

        Args:
            queues: The queues that take messages; not empty.
            turn: A number that increases with every batch.
        """
        if not self._avoided_until_ms:
            return queues[turn % len(queues)]
        names = {queue.broker for queue in queues}
        until_ms = {
            name: self._avoided_until_ms[name] for name in names if name in self._avoided_until_ms
        }
        soonest = min(until_ms, key=lambda name: (until_ms[name], name), default="")
        usable = [queue for queue in queues if queue.broker not in until_ms]
        if soonest and (not usable or until_ms[soonest] <= now_ms):
            usable = [queue for queue in queues if queue.broker == soonest]
            if until_ms[soonest] <= now_ms:
                self._avoided_until_ms[soonest] = now_ms + FAILED_MS
        return usable[turn % len(usable)]
