"""Which brokers a producer had better leave alone for a while.

Source: RocketMQ's latency fault tolerance (MQFaultStrategy, LatencyFaultToleranceImpl): the latest
latency of a broker says for how long it is avoided, and a failure counts as a long one.

Its time over, a broker gets one batch, as a probe, and stays avoided until that batch has an
outcome or as long as after a failure. A probe of its own, such as a health call, would find out
less: a broker whose disk is slow or full says that it serves.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence

from batonmq._core.queues import QueueRef

LATENCIES_MS = (50, 100, 550, 1_800, 3_000, 5_000, 15_000)
AVOIDED_MS = (0, 0, 2_000, 5_000, 6_000, 10_000, 30_000)
"""A broker that took `LATENCIES_MS[i]` or longer is avoided for so long."""
FAILED_MS = 10_000
"""A broker that failed is avoided for so long."""


class BrokerHealth:
    """What is known of the brokers that are in trouble."""

    def __init__(self) -> None:
        self._back_ms: dict[str, int] = {}

    def answered(self, broker: str, latency_ms: int, now_ms: int) -> None:
        """It has done what it was asked, after `latency_ms`."""
        level = bisect_right(LATENCIES_MS, latency_ms)
        avoided_ms = AVOIDED_MS[level - 1] if level else 0
        if avoided_ms:
            self._back_ms[broker] = now_ms + avoided_ms
        else:
            self._back_ms.pop(broker, None)

    def failed(self, broker: str, now_ms: int) -> None:
        """It did not answer, or could not do what it was asked."""
        self._back_ms[broker] = now_ms + FAILED_MS

    def takes_count(self, queues: Sequence[QueueRef], broker: str, now_ms: int) -> int:
        """How many batches for any of `queues` had better go elsewhere than to `broker`.

        All, if there is a broker without trouble; one, if there is one that is due for a probe.
        """
        others = {queue.broker for queue in queues} - {broker}
        if any(other not in self._back_ms for other in others):
            return sys.maxsize
        return int(any(self._back_ms[other] <= now_ms for other in others))

    def choose(self, queues: Sequence[QueueRef], turn: int, now_ms: int) -> QueueRef:
        """The queue whose turn it is, among those of brokers that are not avoided.

        A broker that is due for a probe goes first; if all are avoided, the one soonest back.

        Args:
            queues: Those that take messages; not empty.
            turn: Grows with every batch.
        """
        if not self._back_ms:
            return queues[turn % len(queues)]
        names = {queue.broker for queue in queues}
        back_ms = {name: self._back_ms[name] for name in names if name in self._back_ms}
        soonest = min(back_ms, key=lambda name: (back_ms[name], name), default="")
        usable = [queue for queue in queues if queue.broker not in back_ms]
        if soonest and (not usable or back_ms[soonest] <= now_ms):
            usable = [queue for queue in queues if queue.broker == soonest]
            if back_ms[soonest] <= now_ms:
                self._back_ms[soonest] = now_ms + FAILED_MS
        return usable[turn % len(usable)]
