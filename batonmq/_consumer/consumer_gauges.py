"""Reads the gauges of a consumer: messages in flight, messages that wait, delayed pulls."""

from __future__ import annotations

from collections.abc import Mapping

from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._core.flow_control import FlowReason
from batonmq._core.queues import QueueRef
from batonmq._telemetry.client_metrics import KeyState


class ConsumerGauges:
    """Reads the queues of one consumer, from any thread; a `GaugeSource`."""

    def __init__(self, queues: Mapping[QueueRef, AssignedQueue]) -> None:
        self._queues = queues

    def in_flight(self) -> int:
        """Return the number of messages in handlers."""
        progresses = [queue.progress for queue in list(self._queues.values())]
        return sum(progress.running_count for progress in progresses if progress is not None)

    def buffered(self) -> tuple[int, int]:
        """Return the number of messages that wait for a handler, and the bytes of their bodies."""
        queues = list(self._queues.values())
        messages = sum(len(queue.buffer) for queue in queues)
        return messages, sum(queue.buffer.waiting_bytes.waiting for queue in queues)

    def keys(self, state: KeyState) -> int:
        """Return the number of messages that hold their ordering keys, by what they wait for."""
        keyed = [queue.keyed for queue in list(self._queues.values()) if queue.keyed is not None]
        if state == "handling":
            return sum(one.handled_count for one in keyed)
        return sum(one.failed_count for one in keyed)

    def delayed(self, reason: FlowReason) -> int:
        """Return the number of queues that delay their next pull for `reason`."""
        return sum(queue.flow == reason for queue in list(self._queues.values()))
