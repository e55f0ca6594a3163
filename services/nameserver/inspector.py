"""Inspection of queues: collects the evidence about many queues with few calls, and diagnoses them.

One call goes to the lock manager, one per group to offsets, then one per broker for the ends of all
its queues. Single queues are queried only if they lag. Progress is read before the ends, so a queue
never seems to end below its progress.

The inspector remembers when the committed offset of each queue was seen to change, and which its
oldest message is: the message of a stuck queue is read once.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.aio import in_steps
from batonmq._common.clock import Clock
from batonmq._core.queues import GroupQueue, QueueRef
from batonmq.errors import DataLoss, Unreachable
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.assignment import AssignableQueue
from batonmq_server.nameserver.core.diagnosis import (
    HOLDER_MATTERS,
    SILENT_MS,
    QueueDiagnosis,
    diagnose,
)
from batonmq_server.nameserver.core.evidence import (
    DamagedMessage,
    ExcludedClient,
    GroupEvidence,
    LockEvidence,
    LogExtent,
    OldestMessage,
    PauseEvidence,
    ProgressEvidence,
    QueueEvidence,
    SubscriptionChangeEvidence,
    SubscriptionMismatch,
)
from batonmq_server.nameserver.core.groups import Group, assigned_members
from batonmq_server.nameserver.diagnosis_proto import excluded_from_pb
from batonmq_server.nameserver.queue_queries import MessageStamp, QueryResult, QueueQueries

RECHECK_MS = 1_000
"""Time until the second look at queues that were not seen before, to find out whether they move."""
FRESH_MS = 60_000
"""If the last look was longer ago, a changed committed offset does not prove that a queue moves."""
FORGET_MS = 600_000
"""The history of a queue is dropped after this time without a look."""
DETAILS_MAX = 2_000
"""Queues that are queried one by one in one inspection; those with the largest lag first."""


OBJECT = "object"
"""Fact of the error with which a broker says that it can't read its object store."""


@dataclass(frozen=True, slots=True)
class InspectionTarget:
    """Queues of one group that are to be inspected."""

    group: Group
    queues: tuple[QueueRef, ...]


@dataclass(slots=True)
class _QueueHistory:
    """History of one queue.

    Attributes:
        since_ms: When the present committed offset was first seen.
        seen_ms: When the queue was last seen.
        moved: Whether the committed offset was different before.
        head: The oldest message, first read at `head_ms`.
    """

    topic_id: int
    committed_offset: int
    since_ms: int
    seen_ms: int
    moved: bool = False
    head: MessageStamp | None = None
    head_ms: int = 0


@dataclass(frozen=True, slots=True)
class _Survey:
    """The results of the calls about all queues."""

    locks: QueryResult[dict[GroupQueue, LockEvidence]]
    progress: Mapping[str, QueryResult[dict[QueueRef, ProgressEvidence]]]
    logs: Mapping[QueueRef, QueryResult[LogExtent]]


class QueueInspector:
    """Collects evidence about queues and diagnoses them.

    Args:
        refused: Returns the clients that a group is refusing.
    """

    def __init__(
        self,
        catalog: Catalog,
        refused: Callable[[str], Iterable[pb.RefusedClient]],
        queries: QueueQueries,
        clock: Clock,
    ) -> None:
        self._catalog, self._refused = catalog, refused
        self._queries, self._clock = queries, clock
        self._histories: dict[GroupQueue, _QueueHistory] = {}

    def queues_of(self, group: Group) -> tuple[QueueRef, ...]:
        """Return all queues of the topics that the group subscribes to, ascending."""
        return tuple(
            queue for s in group.terms.subscriptions for queue in self.queues_of_topic(s.topic)
        )

    async def queues_to_inspect(self, group: Group) -> tuple[QueueRef, ...]:
        """Return the queues that concern a group, ascending: those that it subscribes to.

        A group without a subscription never had a member, but may have progress, as after a restore
        or a reset. Then they are all queues of the topics on which it has progress.

        Raises:
            BatonError: offsets did not say on which topics.
        """
        if group.terms.subscriptions or group.terms.broadcasting:
            return self.queues_of(group)
        progress = await self._queries.progress(group.name)
        if progress.failure is not None:
            raise progress.failure
        topics = sorted({queue.topic for queue in progress.value or ()})
        return tuple(queue for topic in topics for queue in self.queues_of_topic(topic))

    def queues_of_topic(self, name: str) -> Iterator[QueueRef]:
        """Yield the queues of a topic, ascending; none if it does not exist."""
        topic = self._catalog.topics.get(name)
        for part in topic.spread if topic else ():
            for queue_id in range(part.queue_count):
                yield QueueRef(name, part.broker, queue_id)

    async def inspect(
        self, targets: Sequence[InspectionTarget], *, patient: bool
    ) -> list[QueueDiagnosis]:
        """Return the diagnosis of each queue, in the order of the targets.

        Args:
            patient: Look twice if a lagging queue has no recent history.
        """
        if not any(target.queues for target in targets):
            return []
        self._drop_old_histories()
        fresh_ms = self._clock.monotonic_ms() - FRESH_MS
        known = {key for key, seen in self._histories.items() if seen.seen_ms >= fresh_ms}
        collected = await self._collect(targets)
        if patient and any(e.lag_count > 0 and e.owner and e.key not in known for e in collected):
            await asyncio.sleep(RECHECK_MS / 1000)
            collected = await self._collect(targets)
        detailed = await self._details(collected)
        return [QueueDiagnosis(e, diagnose(e)) async for e in in_steps(detailed)]

    async def _collect(self, targets: Sequence[InspectionTarget]) -> list[QueueEvidence]:
        """Return the evidence from the calls about all queues."""
        one = targets[0].group.name if len(targets) == 1 else ""
        counted = [t.group.name for t in targets if not t.group.terms.broadcasting]
        async with asyncio.TaskGroup() as tasks:
            listing = tasks.create_task(self._queries.locks(one))
            counting = {name: tasks.create_task(self._queries.progress(name)) for name in counted}
        progress = {name: task.result() for name, task in counting.items()}
        queues = {queue for target in targets for queue in target.queues}
        counted_from = self._counted_from(queues, progress)
        survey = _Survey(listing.result(), progress, await self._logs(queues, counted_from))
        evidence = (e for target in targets for e in self._evidence(target, survey))
        return [e async for e in in_steps(evidence)]

    def _counted_from(
        self,
        queues: Iterable[QueueRef],
        progress: Mapping[str, QueryResult[dict[QueueRef, ProgressEvidence]]],
    ) -> dict[QueueRef, set[int]]:
        """Return the offsets from which to count the messages of queues of compacted topics."""
        topics = self._catalog.topics
        counted: dict[QueueRef, set[int]] = {
            queue: {0}
            for queue in queues
            if (topic := topics.get(queue.topic)) is not None and topic.compaction is not None
        }
        if counted:
            for group in progress.values():
                for queue, one in (group.value or {}).items():
                    if queue in counted:
                        counted[queue].add(one.committed_offset)
        return counted

    async def _logs(
        self, queues: Iterable[QueueRef], counted: Mapping[QueueRef, Collection[int]]
    ) -> dict[QueueRef, QueryResult[LogExtent]]:
        by_broker: dict[str, list[QueueRef]] = defaultdict(list)
        for queue in sorted(queues):
            by_broker[queue.broker].append(queue)
        async with asyncio.TaskGroup() as tasks:
            queried = [
                tasks.create_task(self._queries.logs(broker, part, counted))
                for broker, part in by_broker.items()
            ]
        return {queue: answer for task in queried for queue, answer in task.result().items()}

    def _evidence(self, target: InspectionTarget, survey: _Survey) -> Iterator[QueueEvidence]:
        """Yield the evidence of one group's queues, without what is queried one by one."""
        group, owned = target.group, is_owned(target.group)
        group_evidence = evidence_of_group(
            group,
            excluded_from_pb(self._refused(group.name)),
            len(self._catalog.owned.get(group.name, ())),
            self._clock.unix_ms(),
        )
        assigned = assigned_members(group)
        filters = {s.topic: s.expression for s in group.terms.subscriptions}
        locks = survey.locks.value or {}
        counted = survey.progress.get(group.name, QueryResult({}))
        for queue in target.queues:
            topic = self._catalog.topics.get(queue.topic)
            progress = (counted.value or {}).get(queue)
            topic_id = topic.topic_id if topic else 0
            seen = None
            if progress is not None:
                seen = self._update_history(_key(group.name, queue), topic_id, progress)
            yield QueueEvidence(
                group=group_evidence,
                topic=queue.topic,
                broker=queue.broker,
                queue_id=queue.queue_id,
                permission=topic.permission if topic else "READ_WRITE",
                expression=filters.get(queue.topic),
                assigned=assigned.get(
                    AssignableQueue(queue.topic, queue.broker, queue.queue_id), ""
                ),
                lock=locks.get(_key(group.name, queue)) if owned else None,
                lock_error=survey.locks.error if owned else "",
                progress=progress,
                progress_error=counted.error,
                log=survey.logs[queue].value,
                log_error=survey.logs[queue].error,
                unmoved_ms=seen.seen_ms - seen.since_ms if seen else -1,
                moved=seen.moved if seen else False,
                leader=self._catalog.broker_leaders.get(queue.broker, ""),
            )

    def _update_history(
        self, key: GroupQueue, topic_id: int, progress: ProgressEvidence
    ) -> _QueueHistory:
        """Update the history of a queue with its progress, and return it."""
        now_ms, committed_offset = self._clock.monotonic_ms(), progress.committed_offset
        seen = self._histories.get(key)
        if seen is None or seen.topic_id != topic_id:
            seen = self._histories[key] = _QueueHistory(topic_id, committed_offset, now_ms, now_ms)
        if seen.committed_offset != committed_offset:
            seen.moved = now_ms - seen.seen_ms <= FRESH_MS
            seen.committed_offset, seen.since_ms = committed_offset, now_ms
        seen.seen_ms = now_ms
        return seen

    def _drop_old_histories(self) -> None:
        oldest_ms = self._clock.monotonic_ms() - FORGET_MS
        self._histories = {key: s for key, s in self._histories.items() if s.seen_ms >= oldest_ms}

    async def _details(self, evidence: list[QueueEvidence]) -> list[QueueEvidence]:
        """Return `found`, completed by what is queried queue by queue."""
        lagging = [i for i, e in enumerate(evidence) if e.lag_count > 0 and "READ" in e.permission]
        lagging.sort(key=lambda i: -evidence[i].lag_count)
        async with asyncio.TaskGroup() as tasks:
            details = {
                i: tasks.create_task(self._detailed(evidence[i]))
                async for i in in_steps(lagging[:DETAILS_MAX])
            }
        return [details[i].result() if i in details else e for i, e in enumerate(evidence)]

    async def _detailed(self, e: QueueEvidence) -> QueueEvidence:
        queue = e.queue
        e = await self._with_head(e, queue)
        if _needs_lock_details(e):
            described = await self._queries.lock(e.group.name, queue)
            e = replace(e, lock=described.value or e.lock, lock_error=described.error)
        filters = e.expression not in (None, "", "*")
        if filters and e.owner and e.progress and not e.progress.in_flight_count:
            scan = await self._queries.filtered(queue, e.head_offset, e.expression or "")
            e = replace(e, filtered=scan)
        if e.owner and diagnose(e).reason in HOLDER_MATTERS:
            e = replace(e, gateway=await self._queries.remote(e.group.name, queue, e.owner))
        return e

    async def _with_head(self, e: QueueEvidence, queue: QueueRef) -> QueueEvidence:
        """Return the evidence with the oldest message that is not handled.

        Its age is at least the time since it was first read, whatever the broker's clock says.
        """
        seen = self._histories.get(e.key)
        stamp = seen.head if seen is not None else None
        if stamp is None or stamp.offset != e.head_offset:
            answer = await self._queries.message_at(queue, e.head_offset)
            if isinstance(answer.failure, DataLoss):
                at = answer.failure.detail.position
                position = "unknown" if at is None else str(at)
                return replace(e, damage=DamagedMessage(position, answer.error))
            if isinstance(answer.failure, Unreachable) and OBJECT in answer.failure.facts:
                return replace(e, tier_error=answer.error)
            stamp = answer.value
            if seen is not None:
                seen.head, seen.head_ms = stamp, self._clock.monotonic_ms()
        if stamp is None:
            return e
        known_ms = self._clock.monotonic_ms() - seen.head_ms if seen is not None else 0
        age_ms = max(known_ms, self._clock.unix_ms() - stamp.store_unix_ms)
        return replace(e, head=OldestMessage(stamp.offset, stamp.message_id, age_ms))


def is_owned(group: Group) -> bool:
    """Return whether one member at a time owns a queue of the group."""
    return group.owned and not group.terms.broadcasting


def evidence_of_group(
    group: Group, refused: Iterable[ExcludedClient], open_grants: int, now_unix_ms: int
) -> GroupEvidence:
    """Return the evidence about a group.

    Args:
        refused: Clients that are being refused for their subscription.
        open_grants: Number of queues that have an owner.
    """
    pause, staged = group.pause, group.staged
    return GroupEvidence(
        name=group.name,
        generation=group.generation,
        member_count=len(group.members),
        from_first=group.terms.consume_from == "FIRST",
        owned=is_owned(group),
        broadcasting=group.terms.broadcasting,
        paused=PauseEvidence(pause.by, pause.reason, max(0, now_unix_ms - pause.since_unix_ms))
        if pause
        else None,
        change=SubscriptionChangeEvidence(max(0, now_unix_ms - staged.since_unix_ms), open_grants)
        if staged and staged.draining
        else None,
        excluded=(*refused, *_differing_members(group)),
    )


def _differing_members(group: Group) -> Iterator[ExcludedClient]:
    """Yield the members with another subscription than the group."""
    wants = {s.topic: s.expression for s in group.staged.subscriptions} if group.staged else {}
    has = {s.topic: s.expression for s in group.terms.subscriptions}
    mismatches = tuple(
        SubscriptionMismatch(topic, wants.get(topic, ""), has.get(topic, ""))
        for topic in sorted(wants.keys() | has.keys())
        if wants and wants.get(topic) != has.get(topic)
    )
    agreeing = (member.client_id for member in group.members if not member.differs)
    agrees = next(agreeing, "")
    for member in group.members:
        if member.differs:
            yield ExcludedClient(member.client_id, agrees, mismatches, staged=True)


def _needs_lock_details(e: QueueEvidence) -> bool:
    """Return whether the diagnosis needs the details of the lock."""
    if not e.group.owned or e.lock_error or not e.assigned:
        return False
    if e.lock is None or not e.lock.owner or e.lock.step:
        return True
    phantom = e.progress is not None and e.lock.token < e.progress.token
    return phantom or e.lock.lease_age_ms >= SILENT_MS


def _key(group: str, queue: QueueRef) -> GroupQueue:
    return GroupQueue(group, queue.topic, queue.broker, queue.queue_id)
