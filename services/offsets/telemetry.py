"""What offsets lets the world know: metrics, live events, log lines."""

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
    """Called with what has happened; of acks and moves once they are durable."""

    def __init__(
        self, metrics: OffsetsMetrics, stream: EventPublisher, table: ProgressTable
    ) -> None:
        self._metrics, self.stream, self._table = metrics, stream, table

    def fenced(self, op: str, key: GroupQueue, token: int, error: Fenced) -> None:
        """An item was refused, because its token is not in force."""
        self._metrics.fenced(op, error)
        if self.stream.hub.watched:
            self.stream.fenced(op, key, token, error)

    def fence(
        self,
        key: GroupQueue,
        wish: FenceAttempt,
        result: FenceGrant | BatonError,
        span: tuple[int, int],
    ) -> None:
        """A queue was passed on, or was not.

        Args:
            span: What had left under the token before and was not below the committed offset.
        """
        self._metrics.fence(wish.condition, result)
        if isinstance(result, BatonError) or not result.changed:
            return
        self._metrics.duplicated(wish.condition.value, result.maybe_seen.between(*span).count)
        holder = wish.holder.client_id if wish.holder else "nobody"
        self.stream.granted(key, result.token, wish.holder.client_id if wish.holder else "")
        if wish.condition is FenceCondition.FORCED:
            log.warning(
                "queue taken by force queue=%s token=%d holder=%s by=%s reason=%s",
                key,
                result.token,
                holder,
                wish.forced_by,
                wish.forced_reason,
            )
        else:
            log.debug(
                "queue fenced queue=%s token=%d holder=%s condition=%s",
                key,
                result.token,
                holder,
                wish.condition.value,
            )

    def commits(
        self,
        op: str,
        items: Sequence[tuple[GroupQueue, int]],
        results: Sequence[CommitResult | BatonError],
    ) -> None:
        """Acks of queues, under tokens, were taken or refused."""
        self._metrics.committed(op, results)
        if not self.stream.hub.watched:
            return
        for (key, token), result in zip(items, results, strict=True):
            if isinstance(result, CommitResult) and result.changed and key in self._table:
                self.stream.committed(key, token, self._table.query(key), closed=op == "close")

    def cut_off(self, count: int) -> None:
        """Messages were given back whose handlers had not ended."""
        self._metrics.duplicated(CUT_OFF, count)

    def moved(self, group: str, order: ResetOrder, outcome: ResetOutcome) -> None:
        """A reset or a clone was carried out, or repeated."""
        self._metrics.moved(order, outcome)
        if not outcome.fresh:
            return
        log.warning(
            "progress moved group=%s op_id=%s kind=%s queues=%d by=%s reason=%s",
            group,
            order.op_id,
            order.kind.name,
            len(outcome.fresh),
            order.by,
            order.reason,
        )
        for step in outcome.fresh:
            self._metrics.duplicated(order.kind.name, step.moved.replayed_count)
            reset = pb.ProgressReset(
                op_id=order.op_id,
                from_offset=step.moved.before.committed_offset,
                to_offset=step.to_offset,
                by=order.by,
                reason=order.reason,
            )
            event = pb.MetricEvent(queue=queue_pb(step.key), progress_reset=reset)
            self.stream.hub.publish(event)
