"""The gRPC face of offsets: read, apply in memory, wait until it is durable, answer.

There is no await between the first and the last item of a call being applied, and every answer,
a refusal too, waits for the newest change of the queues it speaks of (protocol 3, 6.8).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import grpc.aio
from baton.common.v1 import error_pb2
from baton.metrics.v1 import metrics_service_pb2 as metrics_pb
from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc

from batonmq.common.clock import Clock
from batonmq.common.errors import BatonError, Fenced
from batonmq.common.rpc import error_to_pb
from batonmq.core.names import check_group, check_topic
from services.offsets.core.calls import Committed, Condition, Fence, Grant, Instant, QueueKey
from services.offsets.core.table import ProgressTable
from services.offsets.group_commit import GroupCommit
from services.offsets.metrics import OffsetsMetrics
from services.offsets.persistence import DurableKey
from services.offsets.wire import (
    Reader,
    check_single,
    fenced_pb,
    number,
    progress_pb,
    queue_pb,
    ranges_pb,
    token_pb,
)
from services.runtime.events import EventHub

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the servicer works with."""

    table: ProgressTable
    commits: GroupCommit[DurableKey]
    clock: Clock
    metrics: OffsetsMetrics
    hub: EventHub


class OffsetsServicer(pb_grpc.OffsetsServiceServicer):
    """See offsets_service.proto."""

    def __init__(self, parts: Parts) -> None:
        self._table, self._commits, self._clock = parts.table, parts.commits, parts.clock
        self._metrics, self._hub = parts.metrics, parts.hub
        self._read = Reader(parts.table, parts.table.limits.ack_ranges_max)

    async def Announce(self, request: pb.AnnounceRequest, context: Context) -> pb.AnnounceResponse:
        """See the proto."""
        self._table.check_epoch(request.offsets_epoch)
        if self._table.announce(number(request.term, "term", 1)):
            self._commits.changed(None)
            log.info("lock manager announced term=%d", request.term)
        queues = [token_pb(key, progress) for key, progress in self._table.items()]
        await self._commits.settled_all()
        return pb.AnnounceResponse(offsets_epoch=self._table.epoch, queues=queues)

    async def Fence(self, request: pb.FenceRequest, context: Context) -> pb.FenceResponse:
        """See the proto."""
        self._table.check_epoch(request.offsets_epoch)
        term = number(request.term, "term", 1)
        wishes = self._read.items(request.items, self._read.fence)
        now, outcomes = self._now(), []
        for (key, wish), item in zip(wishes, request.items, strict=True):
            grant = _attempt(self._table.fence, key, term, wish, now)
            self._metrics.fence(wish.condition, grant)
            if isinstance(grant, BatonError):
                outcomes.append(pb.FenceOutcome(error=error_to_pb(grant)))
                continue
            if grant.changed:
                self._commits.changed(key)
                _log_fence(key, wish, grant, item)
            outcomes.append(pb.FenceOutcome(fenced=fenced_pb(grant)))
        await self._commits.settled([None, *(key for key, _ in wishes)])
        return pb.FenceResponse(offsets_epoch=self._table.epoch, outcomes=outcomes)

    async def RecordDelivered(
        self, request: pb.RecordDeliveredRequest, context: Context
    ) -> pb.RecordDeliveredResponse:
        """See the proto."""
        self._table.check_epoch(request.offsets_epoch)
        deliveries = self._read.items(request.items, self._read.delivery)
        now, outcomes = self._now(), []
        for key, token, run in deliveries:
            delivered = _attempt(self._table.record_delivered, key, token, run, now)
            if isinstance(delivered, BatonError):
                outcomes.append(pb.DeliveryOutcome(error=self._refused("record", delivered)))
                continue
            if delivered.changed:
                self._commits.changed(key)
            maybe_seen = ranges_pb(delivered.maybe_seen)
            outcomes.append(pb.DeliveryOutcome(delivered=pb.Delivered(maybe_seen=maybe_seen)))
        await self._commits.settled(delivery[0] for delivery in deliveries)
        return pb.RecordDeliveredResponse(offsets_epoch=self._table.epoch, outcomes=outcomes)

    async def Touch(self, request: pb.TouchRequest, context: Context) -> pb.TouchResponse:
        """See the proto."""
        self._table.check_epoch(request.offsets_epoch)
        touches = self._read.items(request.items, self._read.touch)
        now, outcomes = self._now(), []
        for key, token in touches:
            error = _attempt(self._table.touch, key, token, now)
            refused = self._refused("touch", error) if isinstance(error, BatonError) else None
            outcomes.append(pb.TouchOutcome(error=refused))
        await self._commits.settled(key for key, _ in touches)
        return pb.TouchResponse(offsets_epoch=self._table.epoch, outcomes=outcomes)

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        """See the proto."""
        self._table.check_epoch(request.offsets_epoch)
        items = self._read.items(request.items, self._read.commit)
        check_single(item[0] for item in items)
        now, outcomes = self._now(), []
        results = [_attempt(self._table.commit, *item, now) for item in items]
        for item, result in zip(items, results, strict=True):
            if isinstance(result, BatonError):
                outcomes.append(pb.CommitOutcome(error=self._refused("commit", result)))
            else:
                outcomes.append(pb.CommitOutcome(committed=self._committed(item[0], result)))
        await self._settled("commit", [item[:2] for item in items], results)
        return pb.CommitResponse(offsets_epoch=self._table.epoch, outcomes=outcomes)

    async def Close(self, request: pb.CloseRequest, context: Context) -> pb.CloseResponse:
        """See the proto."""
        self._table.check_epoch(request.offsets_epoch)
        items = self._read.items(request.items, self._read.close)
        check_single(item[0] for item in items)
        now, outcomes = self._now(), []
        results = [_attempt(self._table.close, *item, now) for item in items]
        for item, result in zip(items, results, strict=True):
            if isinstance(result, BatonError):
                outcomes.append(pb.CloseOutcome(error=self._refused("close", result)))
            else:
                outcomes.append(pb.CloseOutcome(closed=self._committed(item[0], result)))
        await self._settled("close", [item[:2] for item in items], results)
        return pb.CloseResponse(offsets_epoch=self._table.epoch, outcomes=outcomes)

    async def Query(self, request: pb.QueryRequest, context: Context) -> pb.QueryResponse:
        """See the proto."""
        self._table.check_epoch(request.offsets_epoch)
        keys = self._read.items(request.queues, self._read.queue)
        now, outcomes = self._now(), []
        for key in keys:
            progress = _attempt(self._table.query, key)
            if isinstance(progress, BatonError):
                outcomes.append(pb.QueryOutcome(error=error_to_pb(progress)))
            else:
                outcomes.append(pb.QueryOutcome(progress=progress_pb(key, progress, now)))
        await self._commits.settled(keys)
        return pb.QueryResponse(offsets_epoch=self._table.epoch, outcomes=outcomes)

    async def QueryGroup(
        self, request: pb.QueryGroupRequest, context: Context
    ) -> pb.QueryGroupResponse:
        """See the proto."""
        keys, now = self._table.group(check_group(request.group)), self._now()
        queues = [progress_pb(key, self._table.query(key), now) for key in keys]
        await self._commits.settled(keys)
        return pb.QueryGroupResponse(offsets_epoch=self._table.epoch, queues=queues)

    async def DeleteTopic(
        self, request: pb.DeleteTopicRequest, context: Context
    ) -> pb.DeleteTopicResponse:
        """See the proto."""
        self._table.check_epoch(request.offsets_epoch)
        topic, topic_id = check_topic(request.topic), number(request.topic_id, "topic_id", 1)
        ended = self._table.delete_topic(topic, topic_id, self._now())
        if ended is not None:
            # All in one step, so in one write: whoever waits for the name waits for the queues.
            self._commits.changed(topic)
            for key in ended:
                self._commits.changed(key)
            log.info("progress deleted topic=%s queues=%d", topic, len(ended))
        await self._commits.settled([topic])
        return pb.DeleteTopicResponse(offsets_epoch=self._table.epoch, queue_count=len(ended or ()))

    def _now(self) -> Instant:
        return Instant(self._clock.monotonic_ms(), self._clock.unix_ms())

    def _refused(self, op: str, error: BatonError) -> error_pb2.Error:
        if isinstance(error, Fenced):
            self._metrics.fenced(op, error)
        return error_to_pb(error)

    def _committed(self, key: QueueKey, committed: Committed) -> pb.Committed:
        if committed.changed:
            self._commits.changed(key)
        return pb.Committed(committed_offset=committed.committed_offset, noop=not committed.changed)

    async def _settled(
        self,
        op: str,
        items: Sequence[tuple[QueueKey, int]],
        results: Sequence[Committed | BatonError],
    ) -> None:
        """Wait until the results are durable, then let the world know."""
        await self._commits.settled(key for key, _ in items)
        self._metrics.committed(op, results)
        if not self._hub.watched:
            return
        for (key, token), result in zip(items, results, strict=True):
            if isinstance(result, Committed) and result.changed:
                committed = metrics_pb.CommittedRange(
                    committed_offset=result.committed_offset, token=token, closed=op == "close"
                )
                self._hub.publish(metrics_pb.MetricEvent(queue=queue_pb(key), committed=committed))


def _attempt(call: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result | BatonError:
    try:
        return call(*args, **kwargs)
    except BatonError as error:
        return error


def _log_fence(key: QueueKey, wish: Fence, grant: Grant, item: pb.FenceItem) -> None:
    if wish.condition is Condition.FORCED:
        log.warning(
            "queue taken by force queue=%s token=%d holder=%s by=%s reason=%s",
            key,
            grant.token,
            wish.holder.client_id,
            item.forced_by,
            item.forced_reason,
        )
    else:
        log.debug(
            "queue fenced queue=%s token=%d holder=%s condition=%s",
            key,
            grant.token,
            wish.holder.client_id,
            wish.condition.value,
        )
