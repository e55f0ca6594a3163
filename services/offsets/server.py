"""The gRPC face of offsets: read, apply in memory, wait until it is durable, answer.

There is no await between the first and the last item of a call being applied, and every answer,
a refusal too, waits for the newest change of the queues it speaks of (protocol 3, 6.8).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import grpc.aio

from baton.common.v1 import error_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_to_pb
from batonmq._core.names import check_group, check_offsets_set, check_topic
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError, Fenced, GroupMoved, GroupsApart
from batonmq_server.offsets.core.holds import TokenChange, link_holds
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.ranges import RangeSet
from batonmq_server.offsets.core.resets import ResetExecutor, ResetOutcome, ResetStep
from batonmq_server.offsets.core.values import (
    Acks,
    CommitResult,
    DeliveryRange,
    DeliveryResult,
    FenceGrant,
    Instant,
    ProgressSource,
)
from batonmq_server.offsets.core.values import FenceAttempt as Wish
from batonmq_server.offsets.group_commit import GroupCommit
from batonmq_server.offsets.group_exporter import GroupExporter
from batonmq_server.offsets.group_modes import GroupModes, group_in_use
from batonmq_server.offsets.persistence import DurableKey, TokenChangeKey
from batonmq_server.offsets.placement_resolver import PlacementResolver
from batonmq_server.offsets.request_reader import (
    RequestReader,
    check_single,
    number,
    outcomes_of,
    topic_or_all,
)
from batonmq_server.offsets.responses import (
    committed_pb,
    fenced_pb,
    hold_pb,
    progress_pb,
    ranges_pb,
    recorded_reset_pb,
    reset_outcome_pb,
    reset_step_pb,
    token_pb,
)
from batonmq_server.offsets.telemetry import OffsetsTelemetry

log = logging.getLogger(__name__)

ANNOUNCED_MAX = 10_000
"""Nobody else is answered while so many queues are told; the lease is to outlast it by far."""
Context = grpc.aio.ServicerContext[Any, Any]
P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the servicer works with."""

    table: ProgressTable
    resets: ResetExecutor
    commits: GroupCommit[DurableKey]
    clock: Clock
    modes: GroupModes
    telemetry: OffsetsTelemetry
    token_changes: Callable[[GroupQueue], Awaitable[list[TokenChange]]]
    resolver: PlacementResolver
    exporter: GroupExporter
    placement_lock: asyncio.Lock


class OffsetsServicer(pb_grpc.OffsetsServiceServicer):
    """See offsets_service.proto."""

    def __init__(self, parts: Parts) -> None:
        self._table, self._commits, self._clock = parts.table, parts.commits, parts.clock
        self._resets, self._modes, self._telemetry = parts.resets, parts.modes, parts.telemetry
        self._token_changes, self._resolver, self._exporter = (
            parts.token_changes,
            parts.resolver,
            parts.exporter,
        )
        self._placement_lock = parts.placement_lock
        self._read = RequestReader(parts.table, parts.table.limits.ack_ranges_max)

    async def Announce(self, request: pb.AnnounceRequest, context: Context) -> pb.AnnounceResponse:
        """See the proto."""
        self._check_change(request.offsets_epoch)
        after = check_group(request.after_group) if request.after_group else ""
        if self._table.announce(number(request.term, "term", 1)):
            self._commits.mark_changed(None)
            log.info("lock manager announced term=%d", request.term)
        found, more = self._table.groups_after(after, ANNOUNCED_MAX)
        queues = [token_pb(key, progress) for key, progress in found]
        await self._commits.wait_all_durable()
        return pb.AnnounceResponse(offsets_epoch=self._table.epoch, queues=queues, more=more)

    async def Fence(self, request: pb.FenceRequest, context: Context) -> pb.FenceResponse:
        """See the proto."""
        self._check_change(request.offsets_epoch)
        term = number(request.term, "term", 1)
        wishes, malformed = self._read.shared_items(request.items, self._read.fence)
        await self._find(key for key, _ in wishes)
        now, outcomes = self._now(), []
        for key, wish in wishes:
            span = self._open_span(key)
            grant = _attempt(self._fence, key, term, wish, now)
            self._telemetry.fence(key, wish, grant, span)
            if isinstance(grant, BatonError):
                outcomes.append(pb.FenceOutcome(error=error_to_pb(grant)))
                continue
            if grant.changed:
                self._handed_over(key)
            outcomes.append(pb.FenceOutcome(fenced=fenced_pb(grant)))
        await self._commits.wait_durable([None, *(key for key, _ in wishes)])
        return pb.FenceResponse(
            offsets_epoch=self._table.epoch,
            outcomes=outcomes_of(outcomes, malformed, pb.FenceOutcome),
        )

    async def RecordDelivered(
        self, request: pb.RecordDeliveredRequest, context: Context
    ) -> pb.RecordDeliveredResponse:
        """See the proto."""
        self._check_change(request.offsets_epoch)
        items, malformed = self._read.shared_items(request.items, self._read.delivery)
        now = self._now()
        results = [self._deliver(*item, now) for item in items]
        await self._commits.wait_durable(item[0] for item in items)
        acked = [(item[:2], each[1]) for item, each in zip(items, results, strict=True) if each[1]]
        self._telemetry.commits("pull", [one[0] for one in acked], [one[1] for one in acked])
        return pb.RecordDeliveredResponse(
            offsets_epoch=self._table.epoch,
            outcomes=outcomes_of([one for one, _ in results], malformed, pb.DeliveryOutcome),
        )

    async def Touch(self, request: pb.TouchRequest, context: Context) -> pb.TouchResponse:
        """See the proto."""
        self._table.check_epoch(request.offsets_epoch)
        touches, malformed = self._read.shared_items(request.items, self._read.touch)
        now, outcomes = self._now(), []
        for key, token in touches:
            error = _attempt(self._touch, key, token, now)
            refused = (
                self._refused("touch", key, token, error) if isinstance(error, BatonError) else None
            )
            outcomes.append(pb.TouchOutcome(error=refused))
        await self._commits.wait_durable(key for key, _ in touches)
        return pb.TouchResponse(
            offsets_epoch=self._table.epoch,
            outcomes=outcomes_of(outcomes, malformed, pb.TouchOutcome),
        )

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        """See the proto."""
        begin_s = self._telemetry.stream.now_s()
        self._check_change(request.offsets_epoch)
        items = self._read.items(request.items, self._read.commit)
        check_single(item[0] for item in items)
        unowned = (key for key, token, _ in items if not token)
        await self._find(key for key in unowned if self._modes.knows(key.group))
        now, outcomes = self._now(), []
        results = [_attempt(self._commit, *item, now, ProgressSource.COMMIT) for item in items]
        for item, result in zip(items, results, strict=True):
            if isinstance(result, BatonError):
                refused = self._refused("commit", item[0], item[1], result)
                outcomes.append(pb.CommitOutcome(error=refused))
            else:
                outcomes.append(pb.CommitOutcome(committed=committed_pb(result)))
        await self._commits.wait_durable(item[0] for item in items)
        self._telemetry.commits("commit", [item[:2] for item in items], results)
        self._telemetry.stream.commit_took(begin_s, (item[0].topic for item in items))
        return pb.CommitResponse(offsets_epoch=self._table.epoch, outcomes=outcomes)

    async def Close(self, request: pb.CloseRequest, context: Context) -> pb.CloseResponse:
        """See the proto."""
        self._check_change(request.offsets_epoch)
        items = self._read.items(request.items, self._read.close)
        check_single(item[0] for item in items)
        now, outcomes = self._now(), []
        results = [_attempt(self._close, *item, now) for item in items]
        for item, result in zip(items, results, strict=True):
            if isinstance(result, BatonError):
                refused = self._refused("close", item[0], item[1], result)
                outcomes.append(pb.CloseOutcome(error=refused))
            else:
                outcomes.append(pb.CloseOutcome(closed=committed_pb(result)))
                self._telemetry.cut_off(item[3].count if result.changed else 0)
        await self._commits.wait_durable(item[0] for item in items)
        self._telemetry.commits("close", [item[:2] for item in items], results)
        return pb.CloseResponse(offsets_epoch=self._table.epoch, outcomes=outcomes)

    async def Query(self, request: pb.QueryRequest, context: Context) -> pb.QueryResponse:
        """See the proto."""
        self._table.check_epoch(request.offsets_epoch)
        keys = self._read.items(request.queues, self._read.queue)
        await self._find(keys)
        now, outcomes = self._now(), []
        for key in keys:
            progress = _attempt(self._query, key)
            if isinstance(progress, BatonError):
                outcomes.append(pb.QueryOutcome(error=error_to_pb(progress)))
            else:
                found = progress_pb(key, progress, self._table.limits, now)
                outcomes.append(pb.QueryOutcome(progress=found))
        await self._commits.wait_durable(keys)
        return pb.QueryResponse(offsets_epoch=self._table.epoch, outcomes=outcomes)

    async def QueryGroup(
        self, request: pb.QueryGroupRequest, context: Context
    ) -> pb.QueryGroupResponse:
        """See the proto."""
        await self._check_here(check_group(request.group))
        keys, now = self._table.group(request.group), self._now()
        limits = self._table.limits
        queues = [progress_pb(key, self._table.query(key), limits, now) for key in keys]
        await self._commits.wait_durable(keys)
        return pb.QueryGroupResponse(offsets_epoch=self._table.epoch, queues=queues)

    async def DeleteTopic(
        self, request: pb.DeleteTopicRequest, context: Context
    ) -> pb.DeleteTopicResponse:
        """See the proto."""
        self._check_change(request.offsets_epoch)
        topic, topic_id = check_topic(request.topic), number(request.topic_id, "topic_id", 1)
        async with self._placement_lock:  # what is about to be here is, and what is sealed is gone
            ended = self._table.delete_topic(topic, topic_id, self._now())
            if ended is not None:
                # All in one step, so in one write: whoever waits for the name waits for the queues.
                self._commits.mark_changed(topic)
                for key in ended:
                    self._commits.mark_changed(key)
                log.info("progress deleted topic=%s queues=%d", topic, len(ended))
        await self._commits.wait_durable([topic])
        return pb.DeleteTopicResponse(offsets_epoch=self._table.epoch, queue_count=len(ended or ()))

    async def DeleteGroup(
        self, request: pb.DeleteGroupRequest, context: Context
    ) -> pb.DeleteGroupResponse:
        """See the proto.

        A call that comes late finds the group created again, or somebody in it who had a queue
        granted while etcd was asked: then it does nothing.
        """
        self._check_change(request.offsets_epoch)
        group, topic = check_group(request.group), topic_or_all(request.topic)
        await self._check_here(group)
        before = self._table.fingerprint(group)
        await self._modes.check_deleted(group)
        self._check_change(request.offsets_epoch)
        self._resolver.check(group)
        if self._table.fingerprint(group) != before:
            raise group_in_use(group)
        ended = self._table.delete_group(group, topic, self._now())
        for key in ended:
            self._commits.mark_changed(key)
        if ended:
            log.info("progress deleted group=%s topic=%s queues=%d", group, topic, len(ended))
        await self._commits.wait_all_durable()
        return pb.DeleteGroupResponse(offsets_epoch=self._table.epoch, queue_count=len(ended))

    async def Reset(self, request: pb.ResetRequest, context: Context) -> pb.ResetResponse:
        """See the proto."""
        self._check_change(request.offsets_epoch)
        group, order, targets = self._read.reset(request)
        await self._check_here(group)
        now, dry_run = self._now(), request.dry_run
        if order.undone_op_id:
            outcome = self._resets.undo(group, order, now, dry_run=dry_run)
        else:
            outcome = self._resets.reset(group, order, targets, now, dry_run=dry_run)
        await self._carried_out(outcome)
        if not dry_run:
            self._telemetry.moved(group, order, outcome)
        return pb.ResetResponse(
            offsets_epoch=self._table.epoch, outcomes=map(reset_outcome_pb, outcome.results)
        )

    async def Clone(self, request: pb.CloneRequest, context: Context) -> pb.CloneResponse:
        """See the proto."""
        self._check_change(request.offsets_epoch)
        to_group, order, topic = self._read.clone(request)
        await self._check_here(to_group)
        await self._check_beside(order.from_group, to_group)
        self._resolver.check(to_group)  # it may have left meanwhile
        now, dry_run = self._now(), request.dry_run
        outcome = self._resets.clone(to_group, order, topic, now, dry_run=dry_run)
        await self._carried_out(outcome)
        if not dry_run:
            self._telemetry.moved(to_group, order, outcome)
        steps = [reset_step_pb(step) for step in outcome.results if isinstance(step, ResetStep)]
        return pb.CloneResponse(offsets_epoch=self._table.epoch, steps=steps)

    async def ListResets(
        self, request: pb.ListResetsRequest, context: Context
    ) -> pb.ListResetsResponse:
        """See the proto."""
        await self._check_here(check_group(request.group))
        found = self._resets.records.newest_first(request.group)
        await self._commits.wait_all_durable()
        return pb.ListResetsResponse(
            offsets_epoch=self._table.epoch, resets=map(recorded_reset_pb, found)
        )

    async def ListHolds(
        self, request: pb.ListHoldsRequest, context: Context
    ) -> pb.ListHoldsResponse:
        """See the proto. The disk may know more by then than was true when this began."""
        key = self._read.queue(request.queue)
        await self._check_here(key.group)
        answer = pb.ListHoldsResponse(offsets_epoch=self._table.epoch)
        if key in self._table:
            progress = self._table.query(key)
            token, reach = progress.token, progress.reach
            await self._commits.wait_durable([key])
            changes = await self._token_changes(key)
            self._resolver.check(key.group)  # or it has left, and they are forgotten
            found = link_holds(changes, token, reach)
            answer.holds.extend(map(hold_pb, found))
        return answer

    async def HandOver(self, request: pb.HandOverRequest, context: Context) -> pb.HandOverResponse:
        """See the proto."""
        self._check_change(0)
        return await self._exporter.hand_over(
            check_group(request.group),
            number(request.move, "move", 1),
            check_offsets_set(request.to_set),
            request.after_key,
        )

    async def ForgetGroup(
        self, request: pb.ForgetGroupRequest, context: Context
    ) -> pb.ForgetGroupResponse:
        """See the proto."""
        self._check_change(0)
        await self._exporter.forget(check_group(request.group), number(request.move, "move", 1))
        return pb.ForgetGroupResponse(offsets_epoch=self._table.epoch)

    # ---- one item

    def _deliver(
        self,
        key: GroupQueue,
        token: int,
        delivery: DeliveryRange,
        acks: Acks | None,
        now: Instant,
    ) -> tuple[pb.DeliveryOutcome, CommitResult | BatonError | None]:
        """The outcome, and what became of acks that rode along.

        Acks come first: they may open the window that the delivery needs (protocol 6.6).
        """
        committed: CommitResult | BatonError | None = None
        if acks is not None:
            committed = _attempt(self._commit, key, token, acks, now, ProgressSource.PULL)
        if isinstance(committed, BatonError):
            refused = self._refused("pull", key, token, committed)
            return pb.DeliveryOutcome(error=refused), committed
        delivered = _attempt(self._record, key, token, delivery, now)
        if isinstance(delivered, BatonError):
            refused = self._refused("record", key, token, delivered)
            return pb.DeliveryOutcome(error=refused), committed
        answer = pb.Delivered(
            maybe_seen=ranges_pb(delivered.maybe_seen),
            progress=committed_pb(committed) if committed is not None else None,
        )
        return pb.DeliveryOutcome(delivered=answer), committed

    def _fence(self, key: GroupQueue, term: int, wish: Wish, now: Instant) -> FenceGrant:
        self._resolver.check(key.group)
        return self._table.fence(key, term, wish, now)

    def _open_span(self, key: GroupQueue) -> tuple[int, int]:
        """Offsets from the committed one on that left under a token which is not closed."""
        if key not in self._table:
            return 0, 0
        progress = self._table.query(key)
        return progress.committed_offset, progress.delivered_offset

    def _touch(self, key: GroupQueue, token: int, now: Instant) -> None:
        self._resolver.check(key.group)
        self._table.touch(key, token, now)

    def _query(self, key: GroupQueue) -> Progress:
        self._resolver.check(key.group)
        return self._table.query(key)

    def _record(
        self, key: GroupQueue, token: int, delivery: DeliveryRange, now: Instant
    ) -> DeliveryResult:
        self._resolver.check(key.group)
        self._modes.check(key.group, token)
        delivered = self._table.record_delivered(key, token, delivery, now)
        if delivered.changed:
            self._commits.mark_changed(key)
        return delivered

    def _commit(
        self, key: GroupQueue, token: int, acks: Acks, now: Instant, source: ProgressSource
    ) -> CommitResult:
        self._modes.check(key.group, token)
        self._resolver.check(key.group)
        if token:
            committed = self._table.commit(key, token, acks, now, source)
        else:
            committed = self._table.commit_unowned(key, acks, now)
        if committed.changed:
            self._commits.mark_changed(key)
        return committed

    def _close(
        self, key: GroupQueue, token: int, acks: Acks, unfinished: RangeSet, now: Instant
    ) -> CommitResult:
        self._resolver.check(key.group)
        self._modes.check(key.group, token)
        committed = self._table.close(key, token, acks, unfinished, now)
        if committed.changed:
            self._commits.mark_changed(key)
        return committed

    # ---- around them

    def _handed_over(self, key: GroupQueue) -> None:
        """Note that the token of a queue has changed, and who had which: all in one write."""
        self._commits.mark_changed(key)
        change = self._table.query(key).token_change
        assert change is not None
        self._commits.mark_changed(TokenChangeKey(key, change))

    def _now(self) -> Instant:
        return Instant(self._clock.monotonic_ms(), self._clock.unix_ms())

    async def _find(self, keys: Iterable[GroupQueue]) -> None:
        """Before anything is applied: learn where groups are of which nothing is known here.

        Not for calls under a token: it was given to nobody if there is no progress here.
        """
        await self._resolver.find({key.group for key in keys})

    async def _check_here(self, group: str) -> None:
        """Refuse a call about a group that this set does not keep."""
        await self._resolver.find([group])
        self._resolver.check(group)

    async def _check_beside(self, from_group: str, to_group: str) -> None:
        """Refuse to clone what another set keeps.

        Raises:
            GroupsApart: it does.
        """
        try:
            await self._check_here(from_group)
        except GroupMoved as error:
            raise GroupsApart(
                f"group {from_group} is kept by another offsets set than group {to_group}",
                remedy=f"Move it here, or {to_group} there: "
                f"baton group move {to_group} --to {error.detail.offsets_set}.",
                facts={
                    "group": from_group,
                    "other_group": to_group,
                    "offsets_set": error.detail.offsets_set,
                },
            ) from error

    def _check_change(self, seen_epoch: int) -> None:
        """Refuse a call that may change something."""
        self._table.check_epoch(seen_epoch)
        self._commits.check_room()

    def _refused(self, op: str, key: GroupQueue, token: int, error: BatonError) -> error_pb2.Error:
        if isinstance(error, Fenced):
            self._telemetry.fenced(op, key, token, error)
        return error_to_pb(error)

    async def _carried_out(self, outcome: ResetOutcome) -> None:
        """Return when a reset or clone is durable.

        There was no await since it was applied: the queues and the record go into one write.
        """
        for step in outcome.fresh:
            self._handed_over(step.key)
        if outcome.record is not None:
            self._commits.mark_changed(outcome.record)
        await self._commits.wait_all_durable()


def _attempt(call: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result | BatonError:
    try:
        return call(*args, **kwargs)
    except BatonError as error:
        return error
