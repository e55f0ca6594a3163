"""Offsets of a Spark stream: one number for each queue of a topic. Pure.

Spark stores `{"broker/queue_id": next offset, ..., "topic_id": id}`, sorted by name, because it
compares offsets as text. The id distinguishes a topic from a later one of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping

from batonmq._core.queues import QueueRef

Offsets = dict[str, int]
TOPIC_ID = "topic_id"


def key_of(queue: QueueRef) -> str:
    """Return the key of a queue in offsets."""
    return f"{queue.broker}/{queue.queue_id}"


def queue_of(topic: str, key: str) -> QueueRef:
    """Return the queue of a key; the inverse of `key_of`.

    Raises:
        ValueError: the key is not valid.
    """
    broker, _, queue_id = key.rpartition("/")
    return QueueRef(topic, broker, int(queue_id))


def sorted_offsets(offsets: Mapping[str, int]) -> Offsets:
    """Return the offsets sorted by key, as Spark needs them."""
    return dict(sorted(offsets.items()))


def queue_offsets(offsets: Mapping[str, int]) -> Offsets:
    """Return the offsets of the queues, without the topic id."""
    return {key: offset for key, offset in offsets.items() if key != TOPIC_ID}


def batch_end(begin: Mapping[str, int], end: Mapping[str, int], rows_max: int) -> Offsets:
    """Return the end of a micro-batch: a share of the waiting messages of each queue.

    Each queue with waiting messages gets at least one. A queue that is in `begin` only keeps its
    offset. No offset decreases.

    Args:
        begin: Start of the micro-batch.
        end: End of the stored messages.
        rows_max: Maximum number of messages, or of queues with waiting messages if there are more
            of these; 0 for no limit.
    """
    waiting = {key: max(0, offset - begin.get(key, 0)) for key, offset in end.items()}
    total = sum(waiting.values())
    if 0 < rows_max < total:
        queues = sum(count > 0 for count in waiting.values())
        spare, further = max(0, rows_max - queues), max(1, total - queues)
        waiting = {
            key: min(count, 1) + max(0, count - 1) * spare // further
            for key, count in waiting.items()
        }
    return {**begin, **{key: begin.get(key, 0) + count for key, count in waiting.items()}}
