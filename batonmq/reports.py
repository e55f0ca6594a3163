"""What `Admin` answers: plain values, and how they are made from the services' messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb

from batonmq.core.route import QueueId


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic.

    Attributes:
        queue_counts: Queues by broker, ascending by broker.
        permission: read_write, read or write.
        writable_counts: Queues that take messages, by broker; the first ones of each. Those
            beyond are gone once every group has read them.
    """

    name: str
    topic_id: int
    create_unix_ms: int
    queue_counts: Mapping[str, int]
    permission: str
    writable_counts: Mapping[str, int]

    @property
    def queue_count(self) -> int:
        """Queues on all brokers together."""
        return sum(self.queue_counts.values())

    @property
    def queues(self) -> tuple[QueueId, ...]:
        """All queues, ascending."""
        return tuple(
            QueueId(self.name, broker, queue_id)
            for broker, count in sorted(self.queue_counts.items())
            for queue_id in range(count)
        )


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    """A topic, and False if it existed already with the same settings."""

    topic: Topic
    created: bool


@dataclass(frozen=True, slots=True)
class QueueExtent:
    """The messages a queue holds: [first_offset, next_offset). None if its broker is away."""

    queue: QueueId
    first_offset: int | None
    next_offset: int | None


@dataclass(frozen=True, slots=True)
class TopicDetail:
    """A topic with its queues, ascending."""

    topic: Topic
    queues: tuple[QueueExtent, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A live process of the cluster; `service` is storage, offsets, lockmgr or nameserver."""

    service: str
    node_id: str
    address: str
    metrics_address: str
    start_unix_ms: int
    epoch: int
    leader: bool


@dataclass(frozen=True, slots=True)
class Cluster:
    """The live processes, by service and node id."""

    name: str
    generation: int
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Subscription:
    """One topic of a group, and the tags the group wants of it."""

    topic: str
    expression: str


@dataclass(frozen=True, slots=True)
class Member:
    """A live member of a group."""

    client_id: str
    incarnation_id: int
    host: str
    join_unix_ms: int


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group, members by client id; all members agree on everything below them."""

    name: str
    generation: int
    members: tuple[Member, ...]
    subscriptions: tuple[Subscription, ...]
    subscription_generation: int
    model: str
    consume_from: str
    orderly: bool


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """How far a group is on one queue, and who has the queue.

    Attributes:
        committed_offset: Everything below is handled; None if the group never had the queue.
        log_end_offset: Offset of the next message to arrive.
        lag: Messages between the two.
        unacked_count: Messages that were delivered and not acked.
        client_id: The owner; None if nobody owns the queue.
        host: The owner's host, if it is a live member.
        token: The present fencing token.
    """

    group: str
    topic: str
    broker: str
    queue_id: int
    committed_offset: int | None
    log_end_offset: int | None
    lag: int | None
    unacked_count: int | None
    client_id: str | None
    host: str | None
    token: int | None


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """A group and its progress by topic, broker and queue."""

    group: Group
    queues: tuple[QueueProgress, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lock:
    """An entry of the lock manager; `state` is free, held, pending or phantom.

    Attributes:
        client_id: The owner; None if there is none.
        lease_age_ms: Since the lease was last renewed.
        held_ms: Since the owner was granted the queue.
        waiters: Client ids that wait for the queue.
        generation: Generation of the group at the grant.
    """

    group: str
    topic: str
    broker: str
    queue_id: int
    state: str
    client_id: str | None
    incarnation_id: int | None
    token: int
    lease_age_ms: int
    held_ms: int
    waiters: tuple[str, ...]
    generation: int


def topic_from_pb(topic: pb.Topic) -> Topic:
    """As the nameserver tells it."""
    permission = topic.permission or pb.TOPIC_PERMISSION_READ_WRITE
    return Topic(
        name=topic.name,
        topic_id=topic.topic_id,
        create_unix_ms=topic.create_unix_ms,
        queue_counts={part.broker: part.queue_count for part in topic.spread},
        permission=_name(pb.TopicPermission.Name, permission, "TOPIC_PERMISSION_").lower(),
        writable_counts={
            part.broker: part.write_queue_count or part.queue_count for part in topic.spread
        },
    )


def node_from_pb(node: pb.Node) -> Node:
    """As the nameserver tells it."""
    return Node(
        service=_name(pb.ServiceKind.Name, node.service, "SERVICE_KIND_").lower(),
        node_id=node.node_id,
        address=node.address,
        metrics_address=node.metrics_address,
        start_unix_ms=node.start_unix_ms,
        epoch=node.epoch,
        leader=node.leader,
    )


def group_from_pb(group: pb.Group) -> Group:
    """As the nameserver tells it."""
    return Group(
        name=group.name,
        generation=group.generation,
        members=tuple(
            Member(m.incarnation.client_id, m.incarnation.incarnation_id, m.host, m.join_unix_ms)
            for m in group.members
        ),
        subscriptions=tuple(Subscription(s.topic, s.expression) for s in group.subscriptions),
        subscription_generation=group.subscription_generation,
        model=_name(pb.MessageModel.Name, group.model, "MESSAGE_MODEL_").lower(),
        consume_from=_name(pb.ConsumeFrom.Name, group.consume_from, "CONSUME_FROM_").lower(),
        orderly=group.orderly,
    )


def lock_from_pb(entry: lockmgr_pb.LockEntry) -> Lock:
    """As the lock manager tells it."""
    queue, owned = entry.queue.queue, entry.HasField("owner")
    return Lock(
        group=entry.queue.group,
        topic=queue.topic,
        broker=queue.broker,
        queue_id=queue.queue_id,
        state=_name(lockmgr_pb.LockState.Name, entry.state, "LOCK_STATE_").lower(),
        client_id=entry.owner.client_id if owned else None,
        incarnation_id=entry.owner.incarnation_id if owned else None,
        token=entry.token,
        lease_age_ms=entry.lease_age_ms,
        held_ms=entry.held_ms,
        waiters=tuple(entry.waiters),
        generation=entry.generation,
    )


def queue_from_pb(queue: queue_pb2.Queue) -> QueueId:
    """The queue as a value."""
    return QueueId(queue.topic, queue.broker, queue.queue_id)


def queue_to_pb(queue: QueueId) -> queue_pb2.Queue:
    """Inverse of `queue_from_pb`."""
    return queue_pb2.Queue(topic=queue.topic, broker=queue.broker, queue_id=queue.queue_id)


def join_progress(
    group: Group,
    queues: Collection[QueueId],
    progress: Iterable[offsets_pb.Progress],
    locks: Iterable[Lock],
    log_ends: Mapping[QueueId, int],
) -> tuple[QueueProgress, ...]:
    """One row for each of `queues`, ascending, from whatever the services told."""
    known = {queue_from_pb(found.queue.queue): found for found in progress}
    owners = {QueueId(lock.topic, lock.broker, lock.queue_id): lock for lock in locks}
    hosts = {member.client_id: member.host for member in group.members}
    rows = []
    for queue in sorted(queues):
        found, lock, end = known.get(queue), owners.get(queue), log_ends.get(queue)
        committed = found.committed_offset if found else None
        client_id = lock.client_id if lock else None
        rows.append(
            QueueProgress(
                group=group.name,
                topic=queue.topic,
                broker=queue.broker,
                queue_id=queue.queue_id,
                committed_offset=committed,
                log_end_offset=end,
                lag=end - committed if end is not None and committed is not None else None,
                unacked_count=found.unacked_count if found else None,
                client_id=client_id,
                host=hosts.get(client_id) if client_id else None,
                token=lock.token if lock else found.token if found else None,
            )
        )
    return tuple(rows)


def _name(name_of: Callable[[Any], str], number: int, prefix: str) -> str:
    """Name of an enum's value without its prefix; the number if this version has no name."""
    try:
        return name_of(number).removeprefix(prefix)
    except ValueError:
        return str(number)
