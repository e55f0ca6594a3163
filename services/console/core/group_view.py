"""Views of the group pages: the list with verdicts, and one group with its queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batonmq._core.queues import QueueRef
from batonmq.admin.group_lag import GroupLag
from batonmq.admin.group_reports import (
    Group,
    GroupProgress,
    Member,
    QueueDiagnosis,
    QueueProgress,
    RefusedClient,
    Subscription,
)
from batonmq_server.console.core.remedies import Remedy, remedies_of

_CALM = ("MOVING", "IDLE", "FILTERED")


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group of the list; `lag` is None if it was not diagnosed."""

    group: Group
    state: str
    lag: GroupLag | None

    @property
    def level(self) -> str:
        """How bad the verdict is: good, bad, or unknown."""
        if self.lag is None:
            return "unknown"
        return "bad" if self.lag.stuck else "good"


@dataclass(frozen=True, slots=True)
class GroupQueueRow:
    """A queue of a group: progress, owner, verdict and what to do.

    Attributes:
        in_flight: Messages in flight, or their bounds such as `0-16`; empty if unknown.
        diagnosis: None if the nameserver did not diagnose the queue.
    """

    queue: QueueRef
    progress: QueueProgress | None
    in_flight: str
    diagnosis: QueueDiagnosis | None
    remedies: tuple[Remedy, ...]

    @property
    def stuck(self) -> bool:
        """Whether the queue needs attention."""
        return self.diagnosis is not None and self.diagnosis.stuck


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A member and the number of queues that are assigned to it and that it owns."""

    member: Member
    assigned_count: int
    owned_count: int


@dataclass(frozen=True, slots=True)
class ConflictRow:
    """One difference of subscriptions, side by side; an empty value means: does not subscribe."""

    topic: str
    setting: str
    group_value: str
    client_value: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """A client that can't join, and each difference between it and the group."""

    client_id: str
    host: str
    since_unix_ms: int
    message: str
    rows: tuple[ConflictRow, ...]


@dataclass(frozen=True, slots=True)
class GroupView:
    """What the page of a group shows; `queues` has stuck queues first."""

    group: Group
    state: str
    lag: int | None
    lag_ms: int | None
    stuck: tuple[GroupQueueRow, ...]
    queues: tuple[GroupQueueRow, ...]
    members: tuple[MemberRow, ...]
    conflicts: tuple[Conflict, ...]
    staged: tuple[ConflictRow, ...]
    problems: tuple[str, ...]


def state_of(group: Group) -> str:
    """Return the state of a group in one word: the first one that applies."""
    if group.pause:
        return "paused"
    if group.staged:
        return "draining" if group.staged.draining else "staged"
    return "stable" if group.members else "empty"


def group_row(group: Group, lag: GroupLag | None) -> GroupRow:
    """Return one row of the list."""
    return GroupRow(group, state_of(group), lag)


def group_view(progress: GroupProgress, diagnoses: Sequence[QueueDiagnosis]) -> GroupView:
    """Return the view of one group."""
    group = progress.group
    by_queue = {QueueRef(d.topic, d.broker, d.queue_id): d for d in diagnoses}
    known = {QueueRef(q.topic, q.broker, q.queue_id): q for q in progress.queues}
    rows = [
        _queue_row(group.name, queue, known.get(queue), by_queue.get(queue))
        for queue in sorted(by_queue.keys() | known.keys())
    ]
    rows.sort(key=lambda row: not row.stuck)
    lags = [row.lag for row in known.values() if row.lag is not None]
    ages = [one.lag_ms for one in diagnoses if one.lag_ms is not None]
    return GroupView(
        group=group,
        state=state_of(group),
        lag=sum(lags) if lags or not known else None,
        lag_ms=max(ages) if ages else None if known else 0,
        stuck=tuple(row for row in rows if row.stuck),
        queues=tuple(rows),
        members=tuple(_member_row(member, group, progress.queues) for member in group.members),
        conflicts=tuple(map(_conflict, progress.refused)),
        staged=_staged(group),
        problems=progress.problems,
    )


def _queue_row(
    group: str, queue: QueueRef, progress: QueueProgress | None, found: QueueDiagnosis | None
) -> GroupQueueRow:
    in_flight = ""
    if progress is not None and progress.unacked_count is not None:
        most, least = progress.unacked_count, progress.unacked_count_min
        in_flight = f"{most:,}" if most == least else f"{least or 0:,}-{most:,}"
    remedies = remedies_of(group, found) if found is not None else ()
    return GroupQueueRow(queue, progress, in_flight, found, remedies)


def _member_row(member: Member, group: Group, queues: Sequence[QueueProgress]) -> MemberRow:
    return MemberRow(
        member,
        sum(one.client_id == member.client_id for one in group.assignments),
        sum(one.client_id == member.client_id for one in queues),
    )


def _conflict(refused: RefusedClient) -> Conflict:
    rows = tuple(
        ConflictRow(d.topic, d.setting, d.member_value, d.newcomer_value)
        for d in refused.error.differences
    )
    return Conflict(
        refused.client_id, refused.host, refused.since_unix_ms, refused.error.message, rows
    )


def _staged(group: Group) -> tuple[ConflictRow, ...]:
    """Return the current and the next subscription, side by side; none without a next one."""
    if group.staged is None:
        return ()
    now, then = _expressions(group.subscriptions), _expressions(group.staged.subscriptions)
    return tuple(
        ConflictRow(topic, "expression", now.get(topic, ""), then.get(topic, ""))
        for topic in sorted(now.keys() | then.keys())
    )


def _expressions(subscriptions: Sequence[Subscription]) -> Mapping[str, str]:
    return {one.topic: one.expression or "*" for one in subscriptions}


def verdict_level(reason: str) -> str:
    """Return how bad a verdict is: good or bad."""
    return "good" if reason in _CALM else "bad"
