"""Keys of queues, and the incarnations of clients that own them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, order=True)
class QueueRef:
    """Key of one queue of the cluster.

    Attributes:
        broker: Storage replica set that keeps the queue.
        queue_id: Index among the queues of the topic on this broker, from 0.
    """

    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.broker}/{self.queue_id}"


class GroupQueue(NamedTuple):
    """Key of one queue within one consumer group: the key of progress and of locks."""

    group: str
    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.group}/{self.topic}/{self.broker}/{self.queue_id}"


class Incarnation(NamedTuple):
    """One run of one client process. An incarnation owns queues, a client id does not.

    Attributes:
        owner: Owner number of the identity that it runs as; 0 if it is not known, as without access
            control. An incarnation of another owner is another one.
    """

    client_id: str
    incarnation_id: int
    owner: int = 0

    def matches(self, other: Incarnation | None) -> bool:
        """Return whether both may be the same: an owner that is not known matches every owner."""
        if other is None or self[:2] != other[:2]:
            return False
        return self.owner == other.owner or 0 in (self.owner, other.owner)

    def known_as(self, other: Incarnation | None) -> Incarnation:
        """Return this incarnation, with the owner of `other` if it is the same and knows more."""
        return other if other is not None and not self.owner and self.matches(other) else self
