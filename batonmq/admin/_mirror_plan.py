"""Which queue is mirrored to which, and what prevents a mirror. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    if there.compaction is not None or there.queue_count != topic.queue_count:
        kind = "is compacted" if there.compaction else f"has {there.queue_count} queues"
        return TopicExists(
            f"topic {name} of the target {kind}; in the source it has {topic.queue_count}",
            remedy=f"Give both the same number: baton topic update {name} --queues N.",
            facts={"topic": name, "actual": there.queue_count, "wanted": topic.queue_count},
        )
    return None


def bind_queues(
    source: Sequence[QueueRef],
    target: Sequence[QueueRef],
    bound: Mapping[QueueRef, QueueRef],
) -> dict[QueueRef, QueueRef]:
    """Return the queue of the target for each queue of the source.

    A queue that has messages of a source queue stays with it. A source queue without one gets the
    queue with its broker and number if that is free, and otherwise the next free one, in ascending
    order.

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
    left = sorted(set(target) - set(pairs.values()))
    rest = [queue for queue in sorted(source) if queue not in pairs]
    for queue in rest:
        if queue in left:
            pairs[queue] = queue
            left.remove(queue)
    for queue in rest:
        if queue not in pairs:
            pairs[queue] = left.pop(0)
    return pairs
