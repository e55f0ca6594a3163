"""Reports what happened to queues: as metrics, live events and log lines."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError, Fenced
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.resets import ResetOrder, ResetOutcome
from batonmq_server.offsets.core.values import (
    CommitResult,
    FenceAttempt,
    FenceCondition,
    FenceGrant,
)
from batonmq_server.offsets.event_publisher import EventPublisher
from batonmq_server.offsets.metrics import CUT_OFF, OffsetsMetrics
from batonmq_server.offsets.responses import queue_pb

log = logging.getLogger(__name__)


class OffsetsTelemetry:
    """Reports fences, commits and resets; commits and resets once they are durable."""

    def __init__(
        self, metrics: OffsetsMetrics, events: EventPublisher, table: ProgressTable
    ) -> None:
        self._metrics, self.events, self._table = metrics, events, table

    def report_fenced(self, op: str, key: GroupQueue, token: int, error: Fenced) -> None:
        """Report an item that was rejected because its token is fenced."""
        self._metrics.count_fenced(op, error)
        if self.events.hub.watched:
            self.events.record_fenced(op, key, token, error)

    def report_fence(
        self,
        key: GroupQueue,
        attempt: FenceAttempt,
        result: FenceGrant | BatonError,
        delivered: tuple[int, int],
    ) -> None:
        """Report a fence, granted or rejected.

        Args:
            delivered: The range that was delivered under the old token and is not committed.
        """
        self._metrics.count_fence(attempt.condition, result)
        if isinstance(result, BatonError) or not result.changed:
            return
        duplicates = result.maybe_seen.between(*delivered).count
        self._metrics.count_duplicates(attempt.condition.value, duplicates)
        holder = attempt.holder.client_id if attempt.holder else ""
        self.events.record_grant(key, result.token, holder)
        if attempt.condition is FenceCondition.FORCED:
            log.warning(
                "queue taken by force queue=%s token=%d holder=%s by=%s reason=%s",
                key,
                result.token,
                holder or "none",
                attempt.forced_by,
                attempt.forced_reason,
            )
        else:
            log.debug(
                "queue fenced queue=%s token=%d holder=%s condition=%s",
                key,
                result.token,
                holder or "none",
                attempt.condition.value,
            )

    def report_commits(
        self,
        op: str,
        items: Sequence[tuple[GroupQueue, int]],
        results: Sequence[CommitResult | BatonError],
    ) -> None:
        """Report acks, accepted or rejected, by queue and token."""
        self._metrics.count_commits(op, results)
        if not self.events.hub.watched:
            return
        for (key, token), result in zip(items, results, strict=True):
            if isinstance(result, CommitResult) and result.changed and key in self._table:
                progress = self._table.query(key)
                self.events.record_commit(key, token, progress, closed=op == "close")

    def report_cut_off(self, count: int) -> None:
        """Report messages that were released while their handlers were running."""
        self._metrics.count_duplicates(CUT_OFF, count)

    def report_reset(self, group: str, order: ResetOrder, outcome: ResetOutcome) -> None:
        """Report a reset or a clone, applied or repeated."""
        self._metrics.count_resets(order, outcome)
        if not outcome.applied:
            return
        log.warning(
            "progress moved group=%s op_id=%s kind=%s queues=%d by=%s reason=%s",
            group,
            order.op_id,
            order.kind.name,
            len(outcome.applied),
            order.by,
            order.reason,
        )
        for step in outcome.applied:
            self._metrics.count_duplicates(order.kind.name, step.effect.replayed_count)
            reset = pb.ProgressReset(
                op_id=order.op_id,
                from_offset=step.effect.before.committed_offset,
                to_offset=step.to_offset,
                by=order.by,
                reason=order.reason,
            )
            event = pb.MetricEvent(queue=queue_pb(step.key), progress_reset=reset)
            self.events.hub.publish(event)
