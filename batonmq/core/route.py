"""Where a message goes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass


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
