"""Reports of `Admin` about topics, nodes and locks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._connection.routes import writable_count
from batonmq._core.queues import QueueRef

MessageType = Literal["any", "normal", "fifo", "delay", "transaction"]


@dataclass(frozen=True, slots=True)
class Compaction:
    """How a compacted topic is compacted; None leaves a setting unchanged, or at its default.

    Attributes:
        tombstone_retention_ms: How long a tombstone, a message with an empty body, is kept after
            the messages that it deletes are gone; 24 h by default.
        min_lag_ms: Minimum age of two messages of a key before the older one is removed; 0 by
            default.
        dirty_percent: A queue is compacted when at least this percentage of its bytes, 1 to 99, was
            stored since the last time; 50 by default.
    """

    tombstone_retention_ms: int | None = None
    min_lag_ms: int | None = None
    dirty_percent: int | None = None


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic.

    Attributes:
        queue_counts: Queues by broker, ascending by broker.
        permission: read_write, read or write.
        inherited: Whether topics that are created on demand may take their settings from it.
        writable_counts: Number of writable queues by broker: the first ones of each broker. The
            other queues are removed when every group has read them.
        message_type: Which messages remote clients may send: normal, fifo, delay, transaction, or
            any.
        retention_ms: Retention time of its messages, in milliseconds; 0 for that of the broker.
        retention_bytes: Maximum bytes of the batches of one queue; 0 for unlimited.
        compaction: Settings of a compacted topic; None for others.
    """

    name: str
    topic_id: int
    create_unix_ms: int
    queue_counts: Mapping[str, int]
    permission: str
    writable_counts: Mapping[str, int]
    inherited: bool = False
    message_type: str = "any"
    retention_ms: int = 0
    retention_bytes: int = 0
    compaction: Compaction | None = None

    @property
    def queue_count(self) -> int:
        """Number of queues on all brokers."""
        return sum(self.queue_counts.values())

    @property
    def queues(self) -> tuple[QueueRef, ...]:
        """All queues, ascending."""
        return tuple(
            QueueRef(self.name, broker, queue_id)
            for broker, count in sorted(self.queue_counts.items())
            for queue_id in range(count)
        )

    @property
    def writable_queues(self) -> tuple[QueueRef, ...]:
        """The queues that take new messages, ascending; the others are retiring."""
        counts = self.writable_counts
        return tuple(one for one in self.queues if one.queue_id < counts.get(one.broker, 0))


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    """A topic; `created` is False if it existed already with the same settings."""

    topic: Topic
    created: bool


@dataclass(frozen=True, slots=True)
class QueueExtent:
    """The offsets [first_offset, next_offset) of a queue; None if its broker did not answer.

    Attributes:
        kept_count: Number of its messages in a compacted topic, which has offsets without messages;
            None in others, or if it is unknown.
    """

    queue: QueueRef
    first_offset: int | None
    next_offset: int | None
    kept_count: int | None = None

    @property
    def count(self) -> int | None:
        """Number of messages; None if the broker did not answer."""
        if self.first_offset is None or self.next_offset is None:
            return None
        return self.next_offset - self.first_offset if self.kept_count is None else self.kept_count


@dataclass(frozen=True, slots=True)
class TopicDetail:
    """A topic with its queues, ascending."""

    topic: Topic
    queues: tuple[QueueExtent, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TopicPurge:
    """What a purge of a deleted topic has removed from a broker, and what remains.

    Attributes:
        purged_bytes: Length of the purged log segments.
        remaining_segments: Segments that contain messages of other topics too.
        remaining_bytes: Bytes of the deleted topic in these segments.
        expiry_unix_ms: Time at which the last of these segments expires; 0 if none remains, or
            retention has no age limit.
    """

    broker: str
    purged_segments: int
    purged_bytes: int
    remaining_segments: int
    remaining_bytes: int
    expiry_unix_ms: int


@dataclass(frozen=True, slots=True)
class Node:
    """A live process of the cluster; `service` is storage, offsets, lockmgr or nameserver.

    Attributes:
        replica_set: Name of its replica set; for storage the name of the broker.
        contract: Contract of its calls and records; 0 if it is of a version before contracts.
        contract_min: Oldest contract of another process that it works with.
    """

    service: str
    node_id: str
    replica_set: str
    address: str
    metrics_address: str
    start_unix_ms: int
    epoch: int
    leader: bool
    contract: int = 0
    contract_min: int = 0


@dataclass(frozen=True, slots=True)
class DrainedNode:
    """A node that is not elected until it is undrained; it need not be up.

    Attributes:
        unix_ms: Time of the drain by the clock of the nameserver.
        by: Name of the operator.
    """

    service: str
    node_id: str
    replica_set: str
    unix_ms: int
    by: str


@dataclass(frozen=True, slots=True)
class BrokerRemoval:
    """A broker that is being removed, or was; it gets no queues.

    Attributes:
        unix_ms: Time of the first step by the clock of the nameserver.
        by: Name of the operator.
        forgotten_unix_ms: Time at which its records were removed; 0 until then.
    """

    broker: str
    unix_ms: int
    by: str
    forgotten_unix_ms: int = 0


@dataclass(frozen=True, slots=True)
class ClusterNodes:
    """The live processes, by service and node id.

    Attributes:
        drained: Nodes that are not elected until they are undrained.
        etcd_alarms: Alarms of etcd; with NOSPACE it accepts no writes.
        etcd_db_bytes: Size of the file of an etcd member, in bytes; 0 if it is not known.
        removals: Brokers that are being removed, or were, by name.
    """

    name: str
    generation: int
    nodes: tuple[Node, ...]
    etcd_alarms: tuple[str, ...] = ()
    etcd_db_bytes: int = 0
    drained: tuple[DrainedNode, ...] = ()
    removals: tuple[BrokerRemoval, ...] = ()


@dataclass(frozen=True, slots=True)
class Lock:
    """An entry of the lock manager; `state` is free, held, pending or phantom.

    Attributes:
        client_id: The owner; None if there is none.
        lease_age_ms: Time since the lease was last renewed.
        held_ms: Time since the queue was granted to the owner.
        waiters: Client ids that wait for the queue.
        generation: Generation of the group at the grant.
        subscription_generation: Generation of the subscription at the grant; 0 for none.
        lease_expired: Whether the owner's lease has expired: another client may get the queue.
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
    subscription_generation: int
    lease_expired: bool = False


def topic_from_pb(topic: pb.Topic) -> Topic:
    """Convert the value that the nameserver returned."""
    permission = topic.permission or pb.TOPIC_PERMISSION_READ_WRITE
    return Topic(
        name=topic.name,
        topic_id=topic.topic_id,
        create_unix_ms=topic.create_unix_ms,
        queue_counts={part.broker: part.queue_count for part in topic.spread},
        permission=enum_name(pb.TopicPermission.Name, permission, "TOPIC_PERMISSION_").lower(),
        writable_counts={part.broker: writable_count(part) for part in topic.spread},
        inherited=topic.inherited,
        message_type=enum_name(
            pb.TopicMessageType.Name, topic.message_type, "TOPIC_MESSAGE_TYPE_"
        ).lower()
        if topic.message_type
        else "any",
        retention_ms=topic.retention_ms,
        retention_bytes=topic.retention_bytes,
        compaction=Compaction(
            topic.compaction.tombstone_retention_ms,
            topic.compaction.min_lag_ms,
            topic.compaction.dirty_percent,
        )
        if topic.HasField("compaction")
        else None,
    )


def compaction_to_pb(compaction: Compaction | None) -> pb.Compaction | None:
    """Convert settings for a request."""
    return None if compaction is None else pb.Compaction(**asdict(compaction))


def node_from_pb(node: pb.Node) -> Node:
    """Convert the value that the nameserver returned."""
    return Node(
        service=enum_name(pb.ServiceKind.Name, node.service, "SERVICE_KIND_").lower(),
        node_id=node.node_id,
        replica_set=node.replica_set or node.node_id,
        address=node.address,
        metrics_address=node.metrics_address,
        start_unix_ms=node.start_unix_ms,
        epoch=node.epoch,
        leader=node.leader,
        contract=node.contract,
        contract_min=node.contract_min,
    )


def drained_from_pb(node: pb.DrainedNode) -> DrainedNode:
    """Convert the value that the nameserver returned."""
    service = enum_name(pb.ServiceKind.Name, node.service, "SERVICE_KIND_").lower()
    return DrainedNode(service, node.node_id, node.replica_set, node.unix_ms, node.by)


def removal_from_pb(removal: pb.BrokerRemoval) -> BrokerRemoval:
    """Convert the value that the nameserver returned."""
    return BrokerRemoval(removal.broker, removal.unix_ms, removal.by, removal.forgotten_unix_ms)


def lock_from_pb(entry: lockmgr_pb.LockEntry) -> Lock:
    """Convert the entry that the lock manager returned."""
    queue, owned = entry.queue.queue, entry.HasField("owner")
    return Lock(
        group=entry.queue.group,
        topic=queue.topic,
        broker=queue.broker,
        queue_id=queue.queue_id,
        state=enum_name(lockmgr_pb.LockState.Name, entry.state, "LOCK_STATE_").lower(),
        client_id=entry.owner.client_id if owned else None,
        incarnation_id=entry.owner.incarnation_id if owned else None,
        token=entry.token,
        lease_age_ms=entry.lease_age_ms,
        held_ms=entry.held_ms,
        waiters=tuple(entry.waiters),
        generation=entry.generation,
        subscription_generation=entry.subscription_generation,
        lease_expired=entry.lease_expired,
    )


def queue_from_pb(queue: queue_pb2.QueueRef) -> QueueRef:
    """Convert a queue from its message."""
    return QueueRef(queue.topic, queue.broker, queue.queue_id)


def queue_to_pb(queue: QueueRef) -> queue_pb2.QueueRef:
    """Convert a queue to its message."""
    return queue_pb2.QueueRef(topic=queue.topic, broker=queue.broker, queue_id=queue.queue_id)


def enum_name(name_of: Callable[[Any], str], number: int, prefix: str) -> str:
    """Return the name of an enum value without `prefix`; its number if the name is unknown."""
    try:
        return name_of(number).removeprefix(prefix)
    except ValueError:
        return str(number)
