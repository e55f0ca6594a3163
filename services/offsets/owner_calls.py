"""The calls under a queue's token, and commits of groups without ownership.

RecordDelivered and Touch come from storage on behalf of the holder, Commit and Close from the
holder itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError
from batonmq_server.offsets.core.ranges import RangeSet
from batonmq_server.offsets.core.values import (
    Acks,
    AdvanceSettlement,
    CommitResult,
    DeliveryRange,
    DeliveryResult,
    HolderCall,
    Instant,
    ProgressSource,
)
from batonmq_server.offsets.offsets_calls import Context, OffsetsCalls, attempt
from batonmq_server.offsets.request_reader import check_single, merge_outcomes
from batonmq_server.offsets.responses import committed_pb, ranges_pb


class OwnerCalls(OffsetsCalls):
    """Answers RecordDelivered, Touch, Commit and Close."""

    async def RecordDelivered(
        self, request: pb.RecordDeliveredRequest, context: Context
    ) -> pb.RecordDeliveredResponse:
        """See the proto."""
        self._check_change(request.offsets_epoch)
        items, malformed = await self._reader.deliveries(request)
        settlements = await self._reader.settlements(request.settlements)
        now = self._now()
        results = [self._deliver(*item, now) for item in items]
        for settlement in settlements:
            self._settle(*settlement)
        await self._commits.wait_durable(item[0] for item in items)
        acked = [
            ((item[0], item[1].token), each[1])
            for item, each in zip(items, results, strict=True)
            if each[1]
        ]
        self._telemetry.report_commits("pull", [one[0] for one in acked], [one[1] for one in acked])
        return pb.RecordDeliveredResponse(
            offsets_epoch=self._table.epoch,
            outcomes=merge_outcomes([one for one, _ in results], malformed, pb.DeliveryOutcome),
        )

    async def Touch(self, request: pb.TouchRequest, context: Context) -> pb.TouchResponse:
        """See the proto."""
        self._table.check_epoch(request.offsets_epoch)
        touches, malformed = await self._reader.shared_batch(request.items, self._reader.touch)
        now, outcomes = self._now(), []
        for key, token, caller in touches:
            error = attempt(self._touch, key, token, caller, now, request.node_id)
            failure = (
                self._item_error("touch", key, token, error)
                if isinstance(error, BatonError)
                else None
            )
            outcomes.append(pb.TouchOutcome(error=failure))
        await self._commits.wait_durable(key for key, _, _ in touches)
        return pb.TouchResponse(
            offsets_epoch=self._table.epoch,
            outcomes=merge_outcomes(outcomes, malformed, pb.TouchOutcome),
        )

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        """See the proto."""
        begin_s = self._telemetry.events.now_s()
        self._check_change(request.offsets_epoch)
        items = await self._reader.batch(
            request.items, lambda one: self._reader.commit(one, request)
        )
        check_single(item[0] for item in items)
        missing = await self._check_unowned(key for key, holder, _ in items if not holder.token)
        now, outcomes = self._now(), []
        results = [
            missing[item[0]]
            if item[0] in missing
            else attempt(self._commit, *item, now, ProgressSource.COMMIT)
            for item in items
        ]
        for (key, holder, _), result in zip(items, results, strict=True):
            if isinstance(result, BatonError):
                failure = self._item_error("commit", key, holder.token, result)
                outcomes.append(pb.CommitOutcome(error=failure))
            else:
                outcomes.append(pb.CommitOutcome(committed=committed_pb(result)))
        await self._commits.wait_durable(item[0] for item in items)
        tokens = [(key, holder.token) for key, holder, _ in items]
        self._telemetry.report_commits("commit", tokens, results)
        changed = (
            item[0].topic
            for item, result in zip(items, results, strict=True)
            if isinstance(result, CommitResult) and result.changed
        )
        self._telemetry.events.record_commit_time(begin_s, changed)
        return pb.CommitResponse(offsets_epoch=self._table.epoch, outcomes=outcomes)

    async def Close(self, request: pb.CloseRequest, context: Context) -> pb.CloseResponse:
        """See the proto."""
        self._check_change(request.offsets_epoch)
        items = await self._reader.batch(request.items, self._reader.close)
        check_single(item[0] for item in items)
        now, outcomes = self._now(), []
        results = [attempt(self._close, *item, request.caller, now) for item in items]
        for item, result in zip(items, results, strict=True):
            if isinstance(result, BatonError):
                failure = self._item_error("close", item[0], item[1], result)
                outcomes.append(pb.CloseOutcome(error=failure))
            else:
                outcomes.append(pb.CloseOutcome(closed=committed_pb(result)))
                self._telemetry.report_cut_off(item[3].count if result.changed else 0)
        await self._commits.wait_durable(item[0] for item in items)
        self._telemetry.report_commits("close", [item[:2] for item in items], results)
        return pb.CloseResponse(offsets_epoch=self._table.epoch, outcomes=outcomes)

    async def _check_unowned(self, keys: Iterable[GroupQueue]) -> dict[GroupQueue, BatonError]:
        """Prepare commits without a token; return the queues for which one must not be applied.

        It would create progress on a queue that does not exist, which nothing removes.
        """
        valid = [
            key
            for key in keys
            if not isinstance(attempt(self._modes.check, key.group, 0), BatonError)
        ]
        await self._resolve(valid)
        return await self._queues.missing(key for key in valid if key not in self._table)

    def _deliver(
        self,
        key: GroupQueue,
        holder: HolderCall,
        delivery: DeliveryRange,
        acks: Acks | None,
        now: Instant,
    ) -> tuple[pb.DeliveryOutcome, CommitResult | BatonError | None]:
        """Return the outcome of one delivery, and the result of the acks sent with it, if any.

        Acks are applied first: they may open the window that the delivery needs (protocol 6.6).
        """
        committed: CommitResult | BatonError | None = None
        if acks is not None:
            committed = attempt(self._commit, key, holder, acks, now, ProgressSource.PULL)
        if isinstance(committed, BatonError):
            failure = self._item_error("pull", key, holder.token, committed)
            return pb.DeliveryOutcome(error=failure), committed
        delivered = attempt(self._record, key, holder, delivery, now)
        if isinstance(delivered, BatonError):
            failure = self._item_error("record", key, holder.token, delivered)
            return pb.DeliveryOutcome(error=failure), committed
        answer = pb.Delivered(
            maybe_seen=ranges_pb(delivered.maybe_seen),
            progress=committed_pb(committed) if committed is not None else None,
            advance_to=delivered.advance_to,
        )
        return pb.DeliveryOutcome(delivered=answer), committed

    def _record(
        self, key: GroupQueue, holder: HolderCall, delivery: DeliveryRange, now: Instant
    ) -> DeliveryResult:
        self._resolver.check(key.group)
        self._modes.check(key.group, holder.token)
        self._check_holder(key, holder)
        delivered = self._table.record_delivered(key, holder.token, delivery, now)
        if delivered.changed:
            self._commits.mark_changed(key)
        return delivered

    def _settle(self, key: GroupQueue, token: int, settlement: AdvanceSettlement) -> None:
        """Settle an advance, if this set keeps the group."""
        if not isinstance(attempt(self._resolver.check, key.group), BatonError):
            self._table.settle_advance(key, token, settlement)

    def _check_holder(self, key: GroupQueue, holder: HolderCall) -> None:
        """Check the identity of a holder, and note its position."""
        self._table.check_caller(key, holder.token, holder.caller)
        if holder.position is not None:
            self._table.note_received(key, holder.token, holder.position)

    def _touch(self, key: GroupQueue, token: int, caller: int, now: Instant, node_id: str) -> None:
        self._resolver.check(key.group)
        self._table.check_caller(key, token, caller)
        self._table.touch(key, token, now, node_id)

    def _commit(
        self,
        key: GroupQueue,
        holder: HolderCall,
        acks: Acks,
        now: Instant,
        source: ProgressSource,
    ) -> CommitResult:
        self._modes.check(key.group, holder.token)
        self._resolver.check(key.group)
        if holder.token:
            self._check_holder(key, holder)
            committed = self._table.commit(key, holder.token, acks, now, source)
        else:
            committed = self._table.commit_unowned(key, acks, now)
        if committed.changed:
            self._commits.mark_changed(key)
        return committed

    def _close(
        self,
        key: GroupQueue,
        token: int,
        acks: Acks,
        unfinished: RangeSet,
        caller: int,
        now: Instant,
    ) -> CommitResult:
        self._resolver.check(key.group)
        self._modes.check(key.group, token)
        self._table.check_caller(key, token, caller)
        committed = self._table.close(key, token, acks, unfinished, now)
        if committed.changed:
            self._commits.mark_changed(key)
        return committed
