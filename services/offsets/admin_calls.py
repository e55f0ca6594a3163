"""The calls of operators and the nameserver that move progress or delete it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._core.names import check_group, check_topic
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError, GroupMoved, GroupsApart, NotServing
from batonmq_server.offsets.core.resets import ResetOutcome, ResetStep
from batonmq_server.offsets.group_modes import group_in_use
from batonmq_server.offsets.offsets_calls import Context, OffsetsCalls
from batonmq_server.offsets.request_reader import number, topic_or_all
from batonmq_server.offsets.responses import reset_outcome_pb, reset_step_pb

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 3.0
"""An operation may be about many topics; each is read from etcd."""


class AdminCalls(OffsetsCalls):
    """Answers Reset, Clone, DeleteTopic and DeleteGroup."""

    async def Reset(self, request: pb.ResetRequest, context: Context) -> pb.ResetResponse:
        """See the proto."""
        self._check_change(request.offsets_epoch)
        group, order, targets = await self._reader.reset(request)
        await self._check_kept(group)
        missing = await self._missing(target.key for target in targets)
        self._resolver.check(group)  # it may have left during the await
        now, dry_run = self._now(), request.dry_run
        if order.undone_op_id:
            outcome = self._resets.undo(group, order, now, dry_run=dry_run)
        else:
            outcome = self._resets.reset(
                group, order, targets, now, dry_run=dry_run, missing=missing
            )
        await self._make_durable(outcome)
        if not dry_run:
            self._telemetry.report_reset(group, order, outcome)
        return pb.ResetResponse(
            offsets_epoch=self._table.epoch, outcomes=map(reset_outcome_pb, outcome.results)
        )

    async def Clone(self, request: pb.CloneRequest, context: Context) -> pb.CloneResponse:
        """See the proto."""
        self._check_change(request.offsets_epoch)
        to_group, order, topic = self._reader.clone(request)
        await self._check_kept(to_group)
        await self._check_same_set(order.from_group, to_group)
        targets = self._resets.clone_targets(to_group, order, topic)
        missing = await self._missing(target.key for target in targets)
        for error in missing.values():
            if isinstance(error, NotServing):
                raise error
        self._resolver.check(to_group)  # it may have left during the await
        now, dry_run = self._now(), request.dry_run
        outcome = self._resets.clone(to_group, order, topic, now, dry_run=dry_run, missing=missing)
        await self._make_durable(outcome)
        if not dry_run:
            self._telemetry.report_reset(to_group, order, outcome)
        steps = [reset_step_pb(step) for step in outcome.results if isinstance(step, ResetStep)]
        return pb.CloneResponse(offsets_epoch=self._table.epoch, steps=steps)

    async def DeleteTopic(
        self, request: pb.DeleteTopicRequest, context: Context
    ) -> pb.DeleteTopicResponse:
        """See the proto."""
        self._check_change(request.offsets_epoch)
        topic, topic_id = check_topic(request.topic), number(request.topic_id, "topic_id", 1)
        # The lock waits for imports and exports in progress: what arrives is deleted too.
        async with self._placement_lock:
            deleted = self._table.delete_topic(topic, topic_id, self._now())
            if deleted is not None:
                # No await in between, so one write: it is durable for the topic and the queues.
                self._commits.mark_changed(topic)
                for key in deleted:
                    self._commits.mark_changed(key)
                log.info("progress deleted topic=%s queues=%d", topic, len(deleted))
        await self._commits.wait_durable([topic])
        return pb.DeleteTopicResponse(
            offsets_epoch=self._table.epoch, queue_count=len(deleted or ())
        )

    async def DeleteGroup(
        self, request: pb.DeleteGroupRequest, context: Context
    ) -> pb.DeleteGroupResponse:
        """See the proto.

        A late call finds that the group was created again, or that a member acquired a queue of it
        while etcd was read; it is rejected in both cases.
        """
        self._check_change(request.offsets_epoch)
        group, topic = check_group(request.group), topic_or_all(request.topic)
        if not await self._is_placed(group):
            return pb.DeleteGroupResponse(offsets_epoch=self._table.epoch)
        before = self._table.fingerprint(group)
        await self._modes.check_deleted(group)
        self._check_change(request.offsets_epoch)
        self._resolver.check(group)
        if self._table.fingerprint(group) != before:
            raise group_in_use(group)
        deleted = self._table.delete_group(group, topic, self._now())
        for key in deleted:
            self._commits.mark_changed(key)
        if deleted:
            log.info("progress deleted group=%s topic=%s queues=%d", group, topic, len(deleted))
        await self._commits.wait_all_durable()
        return pb.DeleteGroupResponse(offsets_epoch=self._table.epoch, queue_count=len(deleted))

    async def _missing(self, keys: Iterable[GroupQueue]) -> dict[GroupQueue, BatonError]:
        """Return the queues without progress that do not exist, or are not known to exist."""
        return await self._queues.missing(
            (key for key in keys if key not in self._table), timeout_s=READ_TIMEOUT_S
        )

    async def _check_same_set(self, from_group: str, to_group: str) -> None:
        """Reject a clone from a group that another replica set keeps.

        Raises:
            GroupsApart: another replica set keeps `from_group`.
            NotServing: the placement of `from_group` is not known.
        """
        try:
            await self._is_placed(from_group)
        except GroupMoved as error:
            raise GroupsApart(
                f"group {from_group} is kept by another offsets set than group {to_group}",
                remedy="Move one of the groups, for example: "
                f"baton group move {to_group} --to {error.detail.offsets_set}.",
                facts={
                    "group": from_group,
                    "other_group": to_group,
                    "offsets_set": error.detail.offsets_set,
                },
            ) from error

    async def _make_durable(self, outcome: ResetOutcome) -> None:
        """Return when a reset or clone is durable.

        There is no await since it was applied: its queues and its record go into one write.
        """
        for step in outcome.applied:
            self._mark_token_changed(step.key)
        if outcome.slot is not None:
            self._commits.mark_changed(outcome.slot)
        await self._commits.wait_all_durable()
