"""Offsets of Spark: one number for each queue of a topic. Pure.

As Spark has them they are `{"broker/queue_id": next offset, ..., "topic_id": id}`, by name,
ascending: Spark compares their text. The id tells a topic from a later one of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping

from batonmq._core.queues import QueueRef

Offsets = dict[str, int]
TOPIC_ID = "topic_id"


def key_of(queue: QueueRef) -> str:
    """How a queue is named among offsets."""
    return f"{queue.broker}/{queue.queue_id}"


def queue_of(topic: str, key: str) -> QueueRef:
    """Inverse of `key_of`.

    Raises:
        ValueError: it is no such name.
    """
    broker, _, queue_id = key.rpartition("/")
    return QueueRef(topic, broker, int(queue_id))


def sorted_offsets(offsets: Mapping[str, int]) -> Offsets:
    """The same, in the order that Spark is told."""
    return dict(sorted(offsets.items()))


def queue_offsets(offsets: Mapping[str, int]) -> Offsets:
    """The queues alone."""
    return {key: offset for key, offset in offsets.items() if key != TOPIC_ID}


def batch_end(begin: Mapping[str, int], end: Mapping[str, int], rows_max: int) -> Offsets:
    """How far a micro-batch goes: in each queue a share of what waits there, at least one message.

    Queues that are in one of the two only stay as they are; none goes back.

    Args:
        begin: Where the batch begins.
        end: What there is.
        rows_max: At most so many messages, one of each queue at least; 0 for no bound.
    """
    waiting = {key: max(0, offset - begin.get(key, 0)) for key, offset in end.items()}
    total = sum(waiting.values())
    if 0 < rows_max < total:
        waiting = {
            key: min(count, max(1, count * rows_max // total)) for key, count in waiting.items()
        }
    return {**begin, **{key: begin.get(key, 0) + count for key, count in waiting.items()}}
