"""How a topic grows and shrinks: which broker gets a queue, which one gives one up.

The queues of a broker have the indexes [0, queue_count), so a broker gains and loses at the end.
Growing is done at once. Shrinking takes two steps: first the last queues take no more messages,
then, once they have been read, they are gone (`without_retiring_queues`). Growing in between takes
queues back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from batonmq.errors import LimitExceeded, NoBroker
from batonmq_server.nameserver.core.groups import Group
from batonmq_server.nameserver.core.topics import QueueSpread, Topic


@dataclass(frozen=True, slots=True)
class RetiringQueue:
    """A queue that takes no more messages, and holds the offsets [first_offset, next_offset)."""

    broker: str
    queue_id: int
    first_offset: int
    next_offset: int


def resized_spread(
    topic: Topic, queue_count: int, brokers: Collection[str]
) -> tuple[QueueSpread, ...]:
    """The spread of `topic` with so many queues that take messages, as even as it can be.

    Args:
        brokers: Names of those that are registered: only they gain queues.

    Returns:
        Brokers ascending; no queue that is there, or is being given up, has moved.

    Raises:
        LimitExceeded: fewer queues than brokers that have some; each keeps one.
        NoBroker: there is nobody to gain a queue.
    """
    counts = {part.broker: part.writable_count for part in topic.spread}
    missing = queue_count - sum(counts.values())
    if missing > 0:
        _grow(counts, missing, brokers, topic.topic_id)
    elif missing < 0:
        _shrink(counts, -missing, topic.name)
    present = {part.broker: part for part in topic.spread}
    return tuple(
        _spread(present.get(name, QueueSpread(name, 0)), counts[name]) for name in sorted(counts)
    )


def unread_count(end: RetiringQueue, group: Group | None, topic: str, committed: int | None) -> int:
    """Messages of the queue that the group still has to read before the queue may go.

    A group without progress on the queue is waited for if it may yet want the messages: it
    subscribes to the topic, and has members, or would not start with what comes next. The progress
    of a broadcasting group is known to its members only, so it is not waited for.

    Args:
        group: The record; None if there is none any more.
        committed: The group's committed offset on the queue; None if it never had the queue.
    """
    if committed is not None:
        return max(0, end.next_offset - max(committed, end.first_offset))
    subscribes = group is not None and any(s.topic == topic for s in group.terms.subscriptions)
    if group is None or not subscribes or group.terms.broadcasting:
        return 0
    wants = bool(group.members) or group.terms.consume_from != "LAST"
    return end.next_offset - end.first_offset if wants else 0


def without_retiring_queues(topic: Topic) -> Topic:
    """`topic` without the queues that are being given up."""
    return replace(
        topic,
        spread=tuple(
            replace(part, queue_count=part.writable_count, write_queue_count=0)
            for part in topic.spread
        ),
    )


def _spread(present: QueueSpread, writable_count: int) -> QueueSpread:
    queue_count = max(present.queue_count, writable_count)
    write_queue_count = writable_count if writable_count < queue_count else 0
    return replace(present, queue_count=queue_count, write_queue_count=write_queue_count)


def _grow(counts: dict[str, int], missing: int, brokers: Collection[str], first: int) -> None:
    """Give queues to those who have fewest; ties as in a new topic, from index `first` on."""
    if not brokers:
        raise NoBroker("no storage node is registered", retry_after_ms=500)
    names = sorted(brokers)
    turn = {name: (index - first) % len(names) for index, name in enumerate(names)}
    for _ in range(missing):
        name = min(names, key=lambda name: (counts.get(name, 0), turn[name]))
        counts[name] = counts.get(name, 0) + 1


def _shrink(counts: dict[str, int], surplus: int, topic: str) -> None:
    """Take queues from those who have most; ties from the last name on."""
    if sum(counts.values()) - surplus < len(counts):
        raise LimitExceeded(
            f"topic {topic} is on {len(counts)} brokers, and each keeps a queue",
            remedy=f"Use {len(counts)} queues or more.",
            facts={
                "field": "queue_count",
                "limit": len(counts),
                "actual": sum(counts.values()) - surplus,
            },
        )
    for _ in range(surplus):
        name = max(counts, key=lambda name: (counts[name], name))
        counts[name] -= 1
