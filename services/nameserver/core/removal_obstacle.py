"""What keeps a queue, or a broker, from being removed: anything on it that is still needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from batonmq._core.names import UNRESOLVED_TOPIC
from batonmq._core.retries import is_dead_letter_topic
from batonmq_server.nameserver.core.groups import Group
from batonmq_server.nameserver.core.topic_resize import RetiringQueue, unread_count
from batonmq_server.nameserver.core.topics import QueueSpread, Topic

QueueKey = tuple[str, str, int]
"""Topic, broker and queue id."""


class ObstacleKind(Enum):
    """Kind of an obstacle; the names are those of `RemovalObstacleKind` without its prefix."""

    UNREAD = 1
    DEAD_LETTERS = 2
    SCHEDULED = 3
    TRANSACTIONS = 4
    OUTPUTS = 5
    UNREACHABLE = 6
    COMPACTED = 7
    REMOVING = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalObstacle:
    """Something that is still needed.

    Attributes:
        topic: Topic; of outputs, the one that they are stored in.
        group: Group that has messages to read, or whose outputs are remembered; empty for none.
        count: Number of messages, scheduled batches or transactions; 0 if it is not known.
        first_unix_ms: Delivery time of the first scheduled batch, or begin of the oldest
            transaction.
        last_unix_ms: Delivery time of the last scheduled batch.
        message: Why, and the remedy.
    """

    kind: ObstacleKind
    topic: str
    broker: str
    message: str
    group: str = ""
    queue_id: int = 0
    count: int = 0
    first_unix_ms: int = 0
    last_unix_ms: int = 0


@dataclass(frozen=True, slots=True)
class HeldMessages:
    """Messages of a topic on one broker that are not in a queue yet."""

    scheduled_count: int = 0
    first_deliver_unix_ms: int = 0
    last_deliver_unix_ms: int = 0
    transaction_count: int = 0
    first_begin_unix_ms: int = 0


@dataclass(frozen=True, slots=True)
class HeldOutputs:
    """Outputs of one source that a broker remembers.

    Attributes:
        topic: Topic that they are stored in; empty if it is not known.
        group: Group that reads the inputs.
        input_topic: Topic of the inputs; empty if it is deleted.
        last_offset: Highest offset of an input with an output.
    """

    topic: str
    group: str
    input_topic: str
    broker: str
    queue_id: int
    last_offset: int


def keeps_messages(topic: str) -> bool:
    """Return whether messages of a topic are needed although no group has to read them.

    Dead letters wait until they are redriven. Messages of unresolved transactions wait for an
    operator.
    """
    return is_dead_letter_topic(topic) or topic == UNRESOLVED_TOPIC


def unread_obstacle(
    queue: RetiringQueue, topic: str, name: str, group: Group | None, committed: int | None
) -> RemovalObstacle | None:
    """Return the obstacle if a group has messages of a queue to read.

    Args:
        group: The record of the group `name`; None if it no longer exists.
        committed: Its committed offset on the queue; None if it has no progress there.
    """
    if keeps_messages(topic) and name == topic:
        return None  # a record of redriven messages: see `kept_obstacle`
    count = unread_count(queue, group, topic, committed)
    if not count:
        return None
    remedy = ""
    if group is None or not group.members:
        remedy = (
            "; it has no member: start one, or skip the messages with `baton group reset-offsets "
            f"{name} --topic {topic} --to-latest`"
        )
    return RemovalObstacle(
        kind=ObstacleKind.UNREAD,
        topic=topic,
        broker=queue.broker,
        group=name,
        queue_id=queue.queue_id,
        count=count,
        message=f"group {name} has messages to read in queue {queue.queue_id} of {queue.broker}"
        + remedy,
    )


def kept_obstacle(
    queue: RetiringQueue, topic: str, redriven: int, ranges: Collection[tuple[int, int]] = ()
) -> RemovalObstacle | None:
    """Return the obstacle if a queue has dead letters, or messages of unresolved transactions.

    Args:
        redriven: Messages below this offset were redriven, or read by the group that has the name
            of the topic of unresolved messages.
        ranges: More of them, each from its first to its next offset, ascending, disjoint. After
            retention has removed messages that were not redriven, all are here.
    """
    first = max(queue.first_offset, redriven)
    count = queue.next_offset - first
    for begin, end in ranges:
        count -= max(0, min(end, queue.next_offset) - max(begin, first))
    if count <= 0 or not keeps_messages(topic):
        return None
    remedy = (
        f"save them with `baton consume {topic} --group {topic} --from first`: what this group has "
        "read is not waited for"
        if topic == UNRESOLVED_TOPIC
        else "redrive them with `baton dlq redrive`, delete the topic"
    )
    return RemovalObstacle(
        kind=ObstacleKind.DEAD_LETTERS,
        topic=topic,
        broker=queue.broker,
        queue_id=queue.queue_id,
        count=count,
        message=f"queue {queue.queue_id} of topic {topic} on {queue.broker} keeps messages that "
        f"need an operator: {remedy}, or wait for the end of their retention time",
    )


def held_obstacles(topic: str, broker: str, held: HeldMessages) -> list[RemovalObstacle]:
    """Return what messages of a topic that are not in a queue yet keep its last queues."""
    found = []
    if held.scheduled_count:
        found.append(
            RemovalObstacle(
                kind=ObstacleKind.SCHEDULED,
                topic=topic,
                broker=broker,
                count=held.scheduled_count,
                first_unix_ms=held.first_deliver_unix_ms,
                last_unix_ms=held.last_deliver_unix_ms,
                message=f"messages of topic {topic} wait on {broker} for their delivery time; they "
                "are delivered there when it is reached",
            )
        )
    if held.transaction_count:
        found.append(
            RemovalObstacle(
                kind=ObstacleKind.TRANSACTIONS,
                topic=topic,
                broker=broker,
                count=held.transaction_count,
                first_unix_ms=held.first_begin_unix_ms,
                message=f"transactions of topic {topic} are open on {broker}; their producers end "
                "them, or checks do: `baton transaction list`",
            )
        )
    return found


def output_obstacles(
    broker: str,
    outputs: Collection[HeldOutputs],
    committed: Mapping[str, Mapping[QueueKey, int]],
) -> list[RemovalObstacle]:
    """Return the remembered outputs of inputs that a group may still handle again.

    Without them the outputs of such an input would be stored a second time.

    Args:
        committed: Committed offsets of each group that exists.
    """
    found = []
    for one in outputs:
        if one.group not in committed or not one.input_topic:
            continue
        key = one.input_topic, one.broker, one.queue_id
        if committed[one.group].get(key, 0) <= one.last_offset:
            found.append(
                RemovalObstacle(
                    kind=ObstacleKind.OUTPUTS,
                    topic=one.topic,
                    broker=broker,
                    group=one.group,
                    queue_id=one.queue_id,
                    count=0,
                    message=f"{broker} remembers outputs that group {one.group} has stored for "
                    f"inputs of {one.input_topic} which are not acknowledged yet",
                )
            )
    return found


def compacted_obstacle(topic: Topic, broker: str) -> RemovalObstacle:
    """Return the obstacle of a compacted topic, which keeps its queues."""
    return RemovalObstacle(
        kind=ObstacleKind.COMPACTED,
        topic=topic.name,
        broker=broker,
        message=f"topic {topic.name} is compacted, so its queues can't be moved: create another "
        "compacted topic, copy the messages, and delete this one",
    )


def removing_obstacle(topic: str, broker: str, part: QueueSpread) -> RemovalObstacle:
    """Return the entry of queues that are about to be removed: nothing keeps them."""
    return RemovalObstacle(
        kind=ObstacleKind.REMOVING,
        topic=topic,
        broker=broker,
        count=part.queue_count,
        message=f"the queues of topic {topic} on {broker} hold nothing that is needed, and are "
        "about to be removed",
    )
