"""Resets of a group's progress: plan, carry out, undo, and clone from another group.

Only a reset moves committed progress back. It works while members consume: offsets moves the queue
and fences its token in one durable step, and the owner continues at the new offset. A plan has the
target offset of each queue; a dry run reports the effect and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.common.v1 import error_pb2, queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.aio import without_group
from batonmq._common.rpc import error_from_pb
from batonmq._core.queues import QueueRef
from batonmq._core.reset_targets import (
    ResetBounds,
    ResetOffset,
    ResetTarget,
    ToEarliest,
    ToOffset,
    ToTime,
    resolve_target,
)
from batonmq._core.retries import retry_topic
from batonmq.admin._pagination import iter_pages
from batonmq.admin.admin import Admin
from batonmq.admin.group_reports import Group
from batonmq.admin.message_queries import MessageQueries
from batonmq.admin.operation import Operation
from batonmq.admin.reports import Topic, enum_name, queue_from_pb, queue_to_pb
from batonmq.errors import (
    InvalidArgument,
    QueueNotFound,
    TopicNotFound,
    TopicNotFoundDetail,
    Unreachable,
)

QUEUES_PER_CALL = 1_024
_SEARCHES_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class ResetScope:
    """The queues of a group that a reset moves.

    Attributes:
        topic: Only this topic. Empty for all topics that the group subscribes to or has progress
            on, except its retry topic: messages waiting there are delivered again in any case.
        queue: Only this broker and queue id of the topic; None for all.
    """

    topic: str = ""
    queue: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """The target offset of each queue of a group.

    Attributes:
        notes: Queues with another target than requested, and the reason.
    """

    group: str
    offsets: tuple[tuple[QueueRef, int], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResetStep:
    """The effect of a reset on one queue.

    Attributes:
        from_offset: Committed offset before.
        to_offset: Committed offset after.
        replayed_count: Messages that were acknowledged and are delivered again.
        skipped_count: Messages that were not acknowledged and now count as handled.
    """

    group: str
    topic: str
    broker: str
    queue_id: int
    from_offset: int
    to_offset: int
    replayed_count: int
    skipped_count: int
    reset_epoch: int
    token: int


@dataclass(frozen=True, slots=True)
class ResetResult:
    """The effect of an operation, by topic, broker and queue.

    Attributes:
        problems: Queues that were rejected and are unchanged, with the error.
    """

    steps: tuple[ResetStep, ...]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedReset:
    """An operation in the history of a group.

    Attributes:
        kind: reset or clone.
        undone_op_id: Id of the operation that this one has undone; None if it is not an undo.
    """

    op_id: str
    kind: str
    by: str
    reason: str
    unix_ms: int
    steps: tuple[ResetStep, ...]
    undone_op_id: str | None


class Resets:
    """Plans and carries out resets. Failures raise classes of `batonmq.errors`.

    Args:
        admin: Client of the cluster; the caller closes it.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def plan(
        self, group: str, target: ResetTarget, scope: ResetScope = ResetScope(), op_id: str = ""
    ) -> ResetPlan:
        """Return the offset of `target` on every queue in `scope`, within the bounds of the queue.

        Args:
            op_id: Id of an operation that may be a repetition. A queue that it has already moved
                keeps that offset, although the target may now be at another offset.

        Raises:
            GroupNotFound, TopicNotFound, QueueNotFound: Named in `group` or `scope`, but missing.
            InvalidArgument: There is nothing to move.
            Unreachable: A broker or service does not answer.
        """
        description = await self._movable(group)
        progress = await self._admin.progress(group)
        committed = {queue_from_pb(p.queue.queue): p.committed_offset for p in progress}
        queues = queues_in(scope, description, committed, await self._admin.list_topics())
        bounds = await self._bounds(queues, committed, target)
        targets = {queue: resolve_target(target, bound) for queue, bound in bounds.items()}
        return _plan(group, targets | await self._moved_by(op_id, group, targets))

    async def plan_offsets(
        self, group: str, offsets: Mapping[QueueRef, int], op_id: str = ""
    ) -> ResetPlan:
        """Return a plan with a given offset for each queue, within the bounds of the queue.

        Args:
            op_id: As for `plan`.

        Raises:
            GroupNotFound, QueueNotFound: The group or a queue does not exist.
            InvalidArgument: There is nothing to move.
            Unreachable: A broker or service does not answer.
        """
        await self._movable(group)
        bounds = await self._bounds(sorted(offsets), {}, ToEarliest())
        targets = {
            queue: resolve_target(ToOffset(offsets[queue]), bound)
            for queue, bound in bounds.items()
        }
        return _plan(group, targets | await self._moved_by(op_id, group, targets))

    async def reset(
        self, plan: ResetPlan, operation: Operation, *, dry_run: bool = False
    ) -> ResetResult:
        """Move the queues of a plan."""
        steps, problems = list[ResetStep](), list[str]()
        for start in range(0, len(plan.offsets), QUEUES_PER_CALL):
            part = plan.offsets[start : start + QUEUES_PER_CALL]
            items = [
                pb.ResetItem(
                    queue=queue_pb2.GroupQueue(group=plan.group, queue=queue_to_pb(queue)),
                    to_offset=offset,
                )
                for queue, offset in part
            ]
            outcomes = await self._reset(plan.group, _request(operation, dry_run, items=items))
            for (queue, _), outcome in zip(part, outcomes, strict=True):
                if outcome.HasField("step"):
                    steps.append(_step_from_pb(outcome.step))
                else:
                    problems.append(_problem(outcome.error, str(queue)))
        return ResetResult(tuple(steps), tuple(problems))

    async def undo(
        self, group: str, op_id: str, operation: Operation, *, dry_run: bool = False
    ) -> ResetResult:
        """Restore the progress that the queues had before operation `op_id`, including acks.

        Raises:
            OperationNotFound: The history of the group has no operation with this id.
        """
        outcomes = await self._reset(
            group, _request(operation, dry_run, undo_group=group, undo_op_id=op_id)
        )
        return ResetResult(
            tuple(_step_from_pb(o.step) for o in outcomes if o.HasField("step")),
            tuple(_problem(o.error, op_id) for o in outcomes if o.HasField("error")),
        )

    async def clone(
        self,
        from_group: str,
        to_group: str,
        operation: Operation,
        *,
        topic: str = "",
        dry_run: bool = False,
    ) -> ResetResult:
        """Copy the progress of one group to another, including acks above the committed offsets.

        Args:
            topic: Only this topic; empty for all except the retry topic of `from_group`.
            dry_run: Return the effect without carrying it out.

        Raises:
            GroupNotFound: `from_group` does not exist.
            OperationExists: The operation id was used for another operation.
            GroupsApart: The groups are on different offsets sets; the remedy names the move.
        """
        await self._admin.describe_group(from_group)
        request = pb.CloneRequest(
            op_id=operation.op_id,
            by=operation.by,
            reason=operation.reason,
            from_group=from_group,
            to_group=to_group,
            topic=topic,
            dry_run=dry_run,
        )

        async def ask(limit_s: float) -> pb.CloneResponse:
            stub = await self._admin.directory.offsets(to_group)
            return await stub.Clone(request, timeout=limit_s)

        return ResetResult(tuple(map(_step_from_pb, (await self._admin.ask(ask)).steps)))

    async def history(self, group: str) -> tuple[RecordedReset, ...]:
        """Return the recorded operations of a group, newest first."""
        return tuple([recorded async for recorded in self.iter_history(group)])

    async def iter_history(self, group: str) -> AsyncGenerator[RecordedReset, None]:
        """Yield the recorded operations of a group, newest first, page by page."""

        def page(page_token: str) -> Awaitable[pb.ListResetsResponse]:
            request = pb.ListResetsRequest(group=group, page_token=page_token)

            async def ask(limit_s: float) -> pb.ListResetsResponse:
                stub = await self._admin.directory.offsets(group)
                return await stub.ListResets(request, timeout=limit_s)

            return self._admin.ask(ask)

        async for answer in iter_pages(page):
            for reset in answer.resets:
                yield _recorded_from_pb(reset)

    async def _movable(self, group: str) -> Group:
        description = await self._admin.describe_group(group)
        if description.model == "broadcasting":
            raise InvalidArgument(
                f"group {group} is broadcasting: each member stores its own progress",
                remedy="Reset the offset file of each member.",
                facts={"field": "group"},
            )
        return description

    async def _moved_by(
        self, op_id: str, group: str, queues: Collection[QueueRef]
    ) -> dict[QueueRef, ResetOffset]:
        """Return the offsets to which an operation has moved queues; empty if there is none."""
        if not op_id:
            return {}
        return {
            queue: ResetOffset(step.to_offset)
            async for recorded in self.iter_history(group)
            if recorded.op_id == op_id
            for step in recorded.steps
            if (queue := QueueRef(step.topic, step.broker, step.queue_id)) in queues
        }

    async def _reset(self, group: str, request: pb.ResetRequest) -> Sequence[pb.ResetOutcome]:
        async def ask(limit_s: float) -> pb.ResetResponse:
            stub = await self._admin.directory.offsets(group)
            return await stub.Reset(request, timeout=limit_s)

        return (await self._admin.ask(ask)).outcomes

    async def _bounds(
        self, queues: Sequence[QueueRef], committed: dict[QueueRef, int], target: ResetTarget
    ) -> dict[QueueRef, ResetBounds]:
        extents, problems = await self._admin.extents(queues)
        if problems:
            raise Unreachable("; ".join(problems))
        if missing := [str(queue) for queue in queues if queue not in extents]:
            raise QueueNotFound(f"no broker has {', '.join(missing)}")
        times = await self._offsets_at(queues, target.unix_ms) if isinstance(target, ToTime) else {}
        return {
            queue: ResetBounds(*extents[queue], committed.get(queue), times.get(queue))
            for queue in queues
        }

    async def _offsets_at(self, queues: Iterable[QueueRef], unix_ms: int) -> dict[QueueRef, int]:
        queries, turns = MessageQueries(self._admin), asyncio.Semaphore(_SEARCHES_AT_ONCE)

        async def find(queue: QueueRef) -> int:
            async with turns:
                return await queries.offset_at(queue, unix_ms)

        with without_group():
            async with asyncio.TaskGroup() as tasks:
                calls = {queue: tasks.create_task(find(queue)) for queue in queues}
        return {queue: task.result() for queue, task in calls.items()}


def queues_in(
    scope: ResetScope, group: Group, progress: Iterable[QueueRef], topics: Iterable[Topic]
) -> tuple[QueueRef, ...]:
    """Return the queues of a scope, ascending, without those of deleted topics.

    Args:
        progress: Queues that the group has progress on.
        topics: All topics.

    Raises:
        TopicNotFound, QueueNotFound: The topic or queue of the scope does not exist.
        InvalidArgument: The scope has no queue.
    """
    by_name = {topic.name: topic for topic in topics}
    if scope.topic and scope.topic not in by_name:
        raise TopicNotFound(
            f"topic {scope.topic} does not exist", detail=TopicNotFoundDetail(topic=scope.topic)
        )
    wanted = {subscription.topic for subscription in group.subscriptions}
    wanted |= {queue.topic for queue in progress}
    names = {scope.topic} if scope.topic else wanted & by_name.keys() - {retry_topic(group.name)}
    queues = sorted(queue for name in names for queue in by_name[name].queues)
    if not queues:
        raise InvalidArgument(
            f"group {group.name} subscribes to no topic and has no progress",
            remedy="Name a topic.",
            facts={"field": "topic"},
        )
    if scope.queue is None:
        return tuple(queues)
    broker, queue_id = scope.queue
    chosen = tuple(q for q in queues if (q.broker, q.queue_id) == (broker, queue_id))
    if not chosen:
        raise QueueNotFound(
            f"topic {scope.topic} has no queue {broker}/{queue_id}",
            remedy=f"Name one of `baton topic describe {scope.topic}`.",
        )
    return chosen


def _plan(group: str, targets: dict[QueueRef, ResetOffset]) -> ResetPlan:
    offsets = tuple(
        (q, target.offset) for q, target in targets.items() if target.offset is not None
    )
    notes = tuple(f"{queue}: {target.note}" for queue, target in targets.items() if target.note)
    if not offsets:
        raise InvalidArgument(
            f"group {group} has no progress to shift",
            remedy="Give a target: an offset, a time, the earliest or the latest.",
            facts={"field": "shift"},
        )
    return ResetPlan(group, offsets, notes)


def _request(
    operation: Operation,
    dry_run: bool,
    *,
    items: Sequence[pb.ResetItem] = (),
    undo_group: str = "",
    undo_op_id: str = "",
) -> pb.ResetRequest:
    return pb.ResetRequest(
        op_id=operation.op_id,
        by=operation.by,
        reason=operation.reason,
        dry_run=dry_run,
        items=items,
        undo_group=undo_group,
        undo_op_id=undo_op_id,
    )


def _problem(error: error_pb2.Error, what: str) -> str:
    refused = error_from_pb(error)
    return f"{what}: {refused.reason}: {refused.message}"


def _step_from_pb(step: pb.ResetStep) -> ResetStep:
    queue = step.queue.queue
    return ResetStep(
        group=step.queue.group,
        topic=queue.topic,
        broker=queue.broker,
        queue_id=queue.queue_id,
        from_offset=step.from_offset,
        to_offset=step.to_offset,
        replayed_count=step.replayed_count,
        skipped_count=step.skipped_count,
        reset_epoch=step.reset_epoch,
        token=step.token,
    )


def _recorded_from_pb(reset: pb.RecordedReset) -> RecordedReset:
    return RecordedReset(
        op_id=reset.op_id,
        kind=enum_name(pb.ProgressSource.Name, reset.kind, "PROGRESS_SOURCE_").lower(),
        by=reset.by,
        reason=reset.reason,
        unix_ms=reset.unix_ms,
        steps=tuple(map(_step_from_pb, reset.steps)),
        undone_op_id=reset.undone_op_id or None,
    )
