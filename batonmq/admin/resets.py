"""Moving a group's progress: resets, undoing them, and taking over another group's.

The one way back or forth. It works while members are at work: offsets moves a queue and ends its
token in one durable step, and the owner goes on from the new place. A plan says where each queue
goes; a dry run says what that would do, and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.common.v1 import error_pb2, queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.aio import only_error
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
from batonmq.admin.admin import Admin
from batonmq.admin.group_reports import Group
from batonmq.admin.message_queries import MessageQueries
from batonmq.admin.operation import Operation
from batonmq.admin.pagination import iter_pages
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
    """Which queues of a group are meant.

    Attributes:
        topic: Only this topic; empty for all that the group subscribes to or has progress on, but
            for its retry topic: what was sent back there comes again in any case.
        queue: Only this broker and queue id of the topic; None for all.
    """

    topic: str = ""
    queue: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """Where each queue of a group goes.

    Attributes:
        notes: On which queues that is not what was asked for.
    """

    group: str
    offsets: tuple[tuple[QueueRef, int], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResetStep:
    """What a reset did, or would do, to one queue.

    Attributes:
        from_offset: Committed offset before.
        to_offset: Committed offset after.
        replayed_count: Messages that were acknowledged and are delivered again.
        skipped_count: Messages that were not acknowledged and count as handled now.
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
    """What an operation did, or would do, by topic, broker and queue.

    Attributes:
        problems: Queues that were refused, and why: those are as they were.
    """

    steps: tuple[ResetStep, ...]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedReset:
    """An operation that was carried out.

    Attributes:
        kind: reset or clone.
        undone_op_id: Operation that this one has undone; None if it is none.
    """

    op_id: str
    kind: str
    by: str
    reason: str
    unix_ms: int
    steps: tuple[ResetStep, ...]
    undone_op_id: str | None


class Resets:
    """Asks offsets and storage; failures are the classes of `batonmq.errors`.

    Args:
        admin: Of the cluster; stays the caller's.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def plan(
        self, group: str, target: ResetTarget, scope: ResetScope = ResetScope(), op_id: str = ""
    ) -> ResetPlan:
        """Where `target` is on every queue in `scope`, as far as the queue goes.

        Args:
            op_id: An operation that is perhaps being repeated: where it has put a queue is where
                the queue goes, although the target may be elsewhere by now.

        Raises:
            GroupNotFound, TopicNotFound, QueueNotFound: as they say.
            InvalidArgument: there is nothing to move.
            Unreachable: a broker or service does not answer.
        """
        found = await self._movable(group)
        progress = await self._admin.progress(group)
        committed = {queue_from_pb(p.queue.queue): p.committed_offset for p in progress}
        queues = queues_in(scope, found, committed, await self._admin.list_topics())
        standings = await self._standings(queues, committed, target)
        places = {queue: resolve_target(target, standing) for queue, standing in standings.items()}
        return _plan(group, places | await self._moved_by(op_id, group, places))

    async def plan_offsets(
        self, group: str, offsets: Mapping[QueueRef, int], op_id: str = ""
    ) -> ResetPlan:
        """An offset of its own for each queue, as far as the queue goes.

        Args:
            op_id: As for `plan`.

        Raises:
            GroupNotFound, QueueNotFound: as they say.
            InvalidArgument: there is nothing to move.
            Unreachable: a broker or service does not answer.
        """
        await self._movable(group)
        standings = await self._standings(sorted(offsets), {}, ToEarliest())
        places = {
            queue: resolve_target(ToOffset(offsets[queue]), standing)
            for queue, standing in standings.items()
        }
        return _plan(group, places | await self._moved_by(op_id, group, places))

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
        """Bring every queue that `op_id` has moved back to where it was, acks included.

        Raises:
            OperationNotFound: no recorded operation of the group has this id.
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
        """Give one group the progress of another, acks above the committed offsets included.

        Args:
            topic: Only this topic; empty for all, but the retry topic of `from_group`.
            dry_run: Tell what it would do, and change nothing.

        Raises:
            GroupNotFound: nobody ever joined or created `from_group`.
            OperationExists: the id was used for something else.
            GroupsApart: the groups are kept by two offsets sets; the remedy says which to move.
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
        found = await self._admin.describe_group(group)
        if found.model == "broadcasting":
            raise InvalidArgument(
                f"group {group} is broadcasting: each member keeps its progress itself",
                remedy="Reset it where its members keep it.",
                facts={"field": "group"},
            )
        return found

    async def _moved_by(
        self, op_id: str, group: str, queues: Collection[QueueRef]
    ) -> dict[QueueRef, ResetOffset]:
        """Where an operation, if there was one of this id, has put which of the queues."""
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

    async def _standings(
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

        try:
            async with asyncio.TaskGroup() as tasks:
                asked = {queue: tasks.create_task(find(queue)) for queue in queues}
        except BaseExceptionGroup as group:
            raise only_error(group) from None
        return {queue: task.result() for queue, task in asked.items()}


def queues_in(
    scope: ResetScope, group: Group, progress: Iterable[QueueRef], topics: Iterable[Topic]
) -> tuple[QueueRef, ...]:
    """The queues that a scope means, ascending; those of topics that are gone are left out.

    Args:
        progress: Queues that the group has progress on.
        topics: All there are.

    Raises:
        TopicNotFound, QueueNotFound: what the scope names does not exist.
        InvalidArgument: the scope means nothing.
    """
    there = {topic.name: topic for topic in topics}
    if scope.topic and scope.topic not in there:
        raise TopicNotFound(
            f"topic {scope.topic} does not exist", detail=TopicNotFoundDetail(topic=scope.topic)
        )
    wanted = {subscription.topic for subscription in group.subscriptions}
    wanted |= {queue.topic for queue in progress}
    names = {scope.topic} if scope.topic else wanted & there.keys() - {retry_topic(group.name)}
    queues = sorted(queue for name in names for queue in there[name].queues)
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


def _plan(group: str, places: dict[QueueRef, ResetOffset]) -> ResetPlan:
    offsets = tuple((q, found.offset) for q, found in places.items() if found.offset is not None)
    notes = tuple(f"{queue}: {found.note}" for queue, found in places.items() if found.note)
    if not offsets:
        raise InvalidArgument(
            f"group {group} has no progress to shift",
            remedy="Say where to go: an offset, a time, the earliest or the latest.",
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


def _recorded_from_pb(found: pb.RecordedReset) -> RecordedReset:
    return RecordedReset(
        op_id=found.op_id,
        kind=enum_name(pb.ProgressSource.Name, found.kind, "PROGRESS_SOURCE_").lower(),
        by=found.by,
        reason=found.reason,
        unix_ms=found.unix_ms,
        steps=tuple(map(_step_from_pb, found.steps)),
        undone_op_id=found.undone_op_id or None,
    )
