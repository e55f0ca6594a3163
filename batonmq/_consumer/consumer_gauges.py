"""What a consumer has in its hands, for who watches it."""

from __future__ import annotations

from collections.abc import Mapping

from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._core.flow_control import FlowReason
from batonmq._core.queues import QueueRef


class ConsumerGauges:
    """Looks at the queues of one consumer, from any thread."""

    def __init__(self, runners: Mapping[QueueRef, AssignedQueue]) -> None:
        self._runners = runners

    def in_hand(self) -> int:
        """See `batonmq._telemetry.client_metrics.Holder`."""
        found = [runner.progress for runner in list(self._runners.values())]
        return sum(progress.running_count for progress in found if progress is not None)

    def buffered(self) -> tuple[int, int]:
        """See `batonmq._telemetry.client_metrics.Holder`."""
        found = list(self._runners.values())
        messages = sum(len(runner.buffer) for runner in found)
        return messages, sum(runner.waiting_bytes.waiting for runner in found)

    def held(self, reason: FlowReason) -> int:
        """See `batonmq._telemetry.client_metrics.Holder`."""
        return sum(runner.flow == reason for runner in list(self._runners.values()))
