"""Where a message goes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

TOPICS_REVISION = "baton-topics-revision"
"""Trailing metadata of storage's QueryOffsets: the etcd revision of the topic that the answer is
by, decimal; of several topics the lowest. What a node answers by a revision in which a queue takes
no more messages is final: it waits for the last message, and no other can come."""


@dataclass(frozen=True, slots=True, order=True)
class QueueId:
    """One queue of the cluster."""

    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.broker}/{self.queue_id}"


def queue_of_key(queues: tuple[QueueId, ...], ordering_key: str) -> QueueId:
    """The queue for `ordering_key`: the same one as long as `queues` stays the same.

    Args:
        queues: All queues of the topic, ascending; not empty.
    """
    return queues[zlib.crc32(ordering_key.encode()) % len(queues)]
