"""Reports of `Admin` about consumer groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._common.rpc import error_from_pb
from batonmq._core.queues import QueueRef
from batonmq.admin.reports import Lock, enum_name, queue_from_pb
from batonmq.errors import BatonError


@dataclass(frozen=True, slots=True)
class Subscription:
    """A topic of a group, and the filter expression of the group."""

    topic: str
    expression: str


@dataclass(frozen=True, slots=True)
class Member:
    """A live member of a group.

    Attributes:
        differs: Whether its subscription differs from the group's.
        room: Machine room of the member; empty if it has none.
    """

    client_id: str
    incarnation_id: int
    host: str
    join_unix_ms: int
    differs: bool = False
    room: str = ""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The member that a queue is assigned to; `client_id` is None if there is none."""

    topic: str
    broker: str
    queue_id: int
    client_id: str | None


@dataclass(frozen=True, slots=True)
class StagedSubscriptions:
    """The next subscription of a group; while `draining`, members release all queues."""

    subscriptions: tuple[Subscription, ...]
    draining: bool
    since_unix_ms: int


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of a group: operator, reason and start."""

    by: str
    reason: str
    since_unix_ms: int


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group, members by client id.

    Attributes:
        order: In which order messages of a queue are handled: none, queue or key.
        policy: What happens to other subscriptions: reject, staged, staged_latest or warn.
        ownership: Whether queues are owned: on or off.
        strategy: Assignment of queues: sticky, average, average_by_circle, consistent_hash or
            machine_room.
        assignments: By topic, broker and queue; none for a broadcasting group.
        staged: None if no other subscription waits.
        pause: None if the group is not paused.
    """

    name: str
    generation: int
    members: tuple[Member, ...]
    subscriptions: tuple[Subscription, ...]
    subscription_generation: int
    model: str
    consume_from: str
    order: str
    policy: str
    ownership: str
    strategy: str
    assignments: tuple[Assignment, ...]
    staged: StagedSubscriptions | None
    pause: Pause | None


@dataclass(frozen=True, slots=True)
class RefusedClient:
    """A client that can't join the group; the error lists every difference."""

    client_id: str
    incarnation_id: int
    host: str
    since_unix_ms: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """Progress of a group on one queue, and the owner of the queue.

    Attributes:
        committed_offset: All messages below it are handled; None if there is no progress.
        log_end_offset: Offset of the next message to arrive.
        lag: Messages between the two.
        unacked_count: Messages that are delivered and not acknowledged, at most. After a restart of
            offsets it is not known for a while how many were delivered.
        unacked_count_min: The same, at least; equal to `unacked_count` if the number is known.
        client_id: The owner; None if the queue has none.
        host: The owner's host, if it is a live member.
        token: The current fencing token.
        assigned: Client id of the member that the queue is assigned to; None for none.
    """

    group: str
    topic: str
    broker: str
    queue_id: int
    committed_offset: int | None
    log_end_offset: int | None
    lag: int | None
    unacked_count: int | None
    unacked_count_min: int | None
    client_id: str | None
    host: str | None
    token: int | None
    assigned: str | None


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """A group and its progress by topic, broker and queue.

    Attributes:
        refused: Clients that can't join at the moment, by client id.
    """

    group: Group
    queues: tuple[QueueProgress, ...]
    refused: tuple[RefusedClient, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QueueDiagnosis:
    """Why a group makes no progress on a queue, or that it does. Unknown values are None.

    Attributes:
        reason: A `baton.nameserver.v1.StuckReason` without its prefix.
        message: The reason as a sentence with its values.
        remedy: What to do; empty if nothing has to be done.
        evidence: Values that led to the reason, as listed in the comment of the enum value.
        lag: Messages that are not handled yet.
        lag_ms: Age of the oldest of these messages; 0 if there is none.
        client_id: The owner; None if the queue has none.
        unmoved_ms: Time since the committed offset last moved.
    """

    group: str
    topic: str
    broker: str
    queue_id: int
    reason: str
    message: str
    remedy: str
    evidence: Mapping[str, str]
    lag: int | None
    lag_ms: int | None
    committed_offset: int | None
    log_end_offset: int | None
    client_id: str | None
    unmoved_ms: int | None

    @property
    def stuck(self) -> bool:
        """Whether the queue needs attention."""
        return self.reason not in ("MOVING", "IDLE", "FILTERED")


def group_from_pb(group: pb.Group) -> Group:
    """Convert the value that the nameserver returned."""
    model = group.model or pb.MESSAGE_MODEL_CLUSTERING
    consume_from = group.consume_from or pb.CONSUME_FROM_LAST
    policy = group.policy or pb.SUBSCRIPTION_POLICY_REJECT
    ownership = group.ownership or pb.OWNERSHIP_ON
    strategy = group.strategy or pb.STRATEGY_STICKY
    staged, pause = group.staged, group.pause
    return Group(
        name=group.name,
        generation=group.generation,
        members=tuple(
            Member(
                m.incarnation.client_id,
                m.incarnation.incarnation_id,
                m.host,
                m.join_unix_ms,
                m.differs,
                m.room,
            )
            for m in group.members
        ),
        subscriptions=_subscriptions(group.subscriptions),
        subscription_generation=group.subscription_generation,
        model=enum_name(pb.MessageModel.Name, model, "MESSAGE_MODEL_").lower(),
        consume_from=enum_name(pb.ConsumeFrom.Name, consume_from, "CONSUME_FROM_").lower(),
        order=enum_name(pb.MessageOrder.Name, group.order, "MESSAGE_ORDER_").lower()
        if group.order
        else "none",
        policy=enum_name(pb.SubscriptionPolicy.Name, policy, "SUBSCRIPTION_POLICY_").lower(),
        ownership=enum_name(pb.Ownership.Name, ownership, "OWNERSHIP_").lower(),
        strategy=enum_name(pb.Strategy.Name, strategy, "STRATEGY_").lower(),
        assignments=tuple(_assignments(group)),
        staged=StagedSubscriptions(
            _subscriptions(staged.subscriptions), staged.draining, staged.since_unix_ms
        )
        if group.HasField("staged")
        else None,
        pause=Pause(pause.by, pause.reason, pause.since_unix_ms)
        if group.HasField("pause")
        else None,
    )


def refused_from_pb(refused: pb.RefusedClient) -> RefusedClient:
    """Convert the value that the nameserver returned."""
    return RefusedClient(
        client_id=refused.incarnation.client_id,
        incarnation_id=refused.incarnation.incarnation_id,
        host=refused.host,
        since_unix_ms=refused.since_unix_ms,
        error=error_from_pb(refused.error),
    )


def diagnosis_from_pb(diagnosis: pb.Diagnosis) -> QueueDiagnosis:
    """Convert the value that the nameserver returned."""
    queue = diagnosis.queue.queue
    return QueueDiagnosis(
        group=diagnosis.queue.group,
        topic=queue.topic,
        broker=queue.broker,
        queue_id=queue.queue_id,
        reason=enum_name(pb.StuckReason.Name, diagnosis.reason, "STUCK_REASON_"),
        message=diagnosis.message,
        remedy=diagnosis.remedy,
        evidence=dict(diagnosis.evidence),
        lag=_known(diagnosis.lag_count),
        lag_ms=_known(diagnosis.lag_ms),
        committed_offset=_known(diagnosis.committed_offset),
        log_end_offset=_known(diagnosis.next_offset),
        client_id=diagnosis.owner or None,
        unmoved_ms=_known(diagnosis.unmoved_ms),
    )


_NO_LAGS: Mapping[QueueRef, int] = {}


def join_progress(
    group: Group,
    queues: Collection[QueueRef],
    progress: Iterable[offsets_pb.Progress],
    locks: Iterable[Lock],
    log_ends: Mapping[QueueRef, int],
    lags: Mapping[QueueRef, int] = _NO_LAGS,
) -> tuple[QueueProgress, ...]:
    """Return one row for each of `queues`, ascending, from the values that are known.

    Args:
        lags: Lag of queues of which it is not the difference of two offsets.
    """
    known = {queue_from_pb(entry.queue.queue): entry for entry in progress}
    owners = {QueueRef(lock.topic, lock.broker, lock.queue_id): lock for lock in locks}
    hosts = {member.client_id: member.host for member in group.members}
    assigned = {QueueRef(a.topic, a.broker, a.queue_id): a.client_id for a in group.assignments}
    rows = []
    for queue in sorted(queues):
        entry, lock, end = known.get(queue), owners.get(queue), log_ends.get(queue)
        committed = entry.committed_offset if entry else None
        unacked = _unacked(entry, end) if entry else (None, None)
        client_id = lock.client_id if lock else None
        rows.append(
            QueueProgress(
                group=group.name,
                topic=queue.topic,
                broker=queue.broker,
                queue_id=queue.queue_id,
                committed_offset=committed,
                log_end_offset=end,
                lag=lags.get(queue, end - committed)
                if end is not None and committed is not None
                else None,
                unacked_count=unacked[0],
                unacked_count_min=unacked[1],
                client_id=client_id,
                host=hosts.get(client_id) if client_id else None,
                token=lock.token if lock else entry.token if entry else None,
                assigned=assigned.get(queue),
            )
        )
    return tuple(rows)


def _unacked(progress: offsets_pb.Progress, log_end: int | None) -> tuple[int, int]:
    """Return the bounds of the messages in flight: no message beyond the log was delivered."""
    most, least = progress.unacked_count, progress.unacked_count_min
    if log_end is None or most == least:
        return most, least
    return max(least, min(most, log_end - progress.committed_offset - progress.acked_count)), least


def _subscriptions(subscriptions: Iterable[pb.Subscription]) -> tuple[Subscription, ...]:
    return tuple(Subscription(s.topic, s.expression) for s in subscriptions)


def _assignments(group: pb.Group) -> Iterable[Assignment]:
    for topic in group.assignments:
        for broker in topic.brokers:
            for queue_id, owner in enumerate(broker.member_numbers):
                client_id = group.members[owner - 1].incarnation.client_id if owner else None
                yield Assignment(topic.topic, broker.broker, queue_id, client_id)


def _known(number: int) -> int | None:
    """Return `number`, or None for -1, which means unknown."""
    return None if number == -1 else number
