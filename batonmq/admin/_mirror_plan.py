"""Which queue is mirrored to which, and what prevents a mirror. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from batonmq._core.names import is_system_topic
from batonmq._core.queues import QueueRef
from batonmq._core.retries import group_of
from batonmq.admin.reports import Topic
from batonmq.errors import BatonError, InvalidArgument, TopicExists


def find_topic_problem(
    cluster: str, topic: Topic, other: str, there: Topic | None
) -> BatonError | None:
    """Return why a topic can't be mirrored; None if it can.

    Args:
        cluster: Name of the source.
        other: Name of the target.
        there: The topic of the target; None if it does not exist.
    """
    name = topic.name
    if is_system_topic(name) or group_of(name):
        return InvalidArgument(
            f"topic {name} belongs to BatonMQ itself",
            remedy="Mirror the topics of the applications; what waits for a retry is part of the "
            "progress of its group.",
            facts={"field": "topic"},
        )
    if topic.compaction is not None:
        return InvalidArgument(
            f"topic {name} is compacted: its offsets have gaps",
            remedy="Mirror a topic with retention.",
            facts={"field": "topic"},
        )
    if there is None:
        return None
    if (cluster, topic.topic_id, topic.create_unix_ms) == (
        other,
        there.topic_id,
        there.create_unix_ms,
    ):
        return InvalidArgument(
            f"source and target are one cluster, {cluster}",
            remedy="Name another cluster: --to.",
            facts={"field": "to"},
        )
    wanted, actual = len(topic.writable_queues), len(there.writable_queues)
    if there.compaction is not None or actual < wanted:
        kind = "is compacted" if there.compaction else f"has {actual} writable queues"
        return TopicExists(
            f"topic {name} of the target {kind}; in the source it has {wanted}",
            remedy="Give the topic as many queues in the target: "
            f"baton topic update {name} --queues {wanted}.",
            facts={"topic": name, "actual": actual, "wanted": wanted},
        )
    return None


class BoundQueues(NamedTuple):
    """The queue of the target for each queue of the source, and source queues without one."""

    pairs: dict[QueueRef, QueueRef]
    left: tuple[QueueRef, ...]


def bind_queues(
    source: Topic,
    target: Topic,
    bound: Mapping[QueueRef, QueueRef],
) -> BoundQueues:
    """Return the queue of the target for each queue of the source.

    A queue that has messages of a source queue stays with it. A source queue without one gets the
    writable queue with its broker and number if that is free, and otherwise the next free one, in
    ascending order; retiring source queues come last.

    Args:
        bound: Source queue of each target queue that has mirrored messages.

    Raises:
        TopicExists: Two queues of the target have messages of one source queue.
    """
    pairs: dict[QueueRef, QueueRef] = {}
    for there, here in sorted(bound.items()):
        if here in pairs:
            raise TopicExists(
                f"queues {pairs[here]} and {there} of the target both have messages of {here}",
                remedy="Delete the topic of the target, and mirror it again.",
                facts={"topic": here.topic},
            )
        pairs[here] = there
    free = sorted(set(target.writable_queues) - set(pairs.values()))
    writable = source.writable_queues
    retiring = sorted(set(source.queues) - set(writable))
    left: list[QueueRef] = []
    for part in (writable, retiring):
        rest = [queue for queue in part if queue not in pairs]
        for queue in rest:
            if queue in free:
                pairs[queue] = queue
                free.remove(queue)
        for queue in rest:
            if queue not in pairs and free:
                pairs[queue] = free.pop(0)
            elif queue not in pairs:
                left.append(queue)
    return BoundQueues(pairs, tuple(left))


def no_queue_left(topic: Topic, target: Topic, left: Sequence[QueueRef]) -> TopicExists:
    """Return the error of source queues for which the target has no queue."""
    wanted = len(target.writable_queues) + len(left)
    names = ", ".join(map(str, left[:3]))
    return TopicExists(
        f"{len(left)} queues of topic {topic.name} have no free queue in the target: {names}",
        remedy=f"Add queues in the target: baton topic update {topic.name} --queues {wanted}. "
        "A running mirror then continues by itself; otherwise start it again.",
        facts={"topic": topic.name, "wanted": wanted},
    )
