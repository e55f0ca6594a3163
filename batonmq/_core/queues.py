"""The names of a queue: in the cluster, as a group sees it, and of the client that owns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, order=True)
class QueueRef:
    """One queue of the cluster.

    Attributes:
        broker: Name of the storage node that has it.
        queue_id: Its index, from 0, among the queues of the topic on this broker.
    """

    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.broker}/{self.queue_id}"


class GroupQueue(NamedTuple):
    """One queue as one consumer group sees it: the key of progress and of locks."""

    group: str
    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.group}/{self.topic}/{self.broker}/{self.queue_id}"


class Incarnation(NamedTuple):
    """One process life of one client. Ownership belongs to an incarnation, never to a client id."""

    client_id: str
    incarnation_id: int
