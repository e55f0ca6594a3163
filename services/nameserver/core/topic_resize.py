"""Adding queues to a topic and removing queues from it.

The queues of a broker have the ids [0, queue_count), so a broker gains and loses queues at the end.
Queues are added at once. They are removed in two steps: first the last queues become retiring,
which means that they take no more messages; once they are read, they are removed
(`without_retiring_queues`). If queues are added in between, retiring queues take messages again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from batonmq.errors import LimitExceeded, NoBroker
from batonmq_server.nameserver.core.groups import Group
from batonmq_server.nameserver.core.topics import QueueSpread, Topic


@dataclass(frozen=True, slots=True)
class RetiringQueue:
    """A queue that takes no more messages, and has the offsets [first_offset, next_offset)."""

    broker: str
    queue_id: int
    first_offset: int
    next_offset: int


def resized_spread(
    topic: Topic, queue_count: int, brokers: Collection[str]
) -> tuple[QueueSpread, ...]:
    """Return the spread of `topic` with `queue_count` writable queues, as even as possible.

    Args:
        brokers: Names of the registered brokers: only they gain queues.

    Returns:
        Brokers ascending; present queues, retiring ones included, stay on their brokers.

    Raises:
        LimitExceeded: `queue_count` is below the number of brokers with queues; each keeps one.
        NoBroker: queues are to be added, and no broker is registered.
    """
    counts = writable_counts(topic)
    missing = queue_count - sum(counts.values())
    if missing > 0:
        _grow(counts, missing, brokers, topic.topic_id)
    elif missing < 0:
        _shrink(counts, -missing, topic.name)
    return spread_with(topic, counts)


def writable_counts(topic: Topic) -> dict[str, int]:
    """Return the number of writable queues of each broker that has one."""
    return {part.broker: part.writable_count for part in topic.spread if part.writable_count}


def spread_with(topic: Topic, counts: Mapping[str, int]) -> tuple[QueueSpread, ...]:
    """Return the spread of `topic` with these numbers of writable queues; others are retiring.

    Returns:
        Brokers ascending; present queues stay.
    """
    present = {part.broker: part for part in topic.spread}
    return tuple(
        _spread(present.get(name, QueueSpread(name, 0)), counts.get(name, 0))
        for name in sorted(present.keys() | counts.keys())
    )


def unread_count(
    queue: RetiringQueue, group: Group | None, topic: str, committed: int | None
) -> int:
    """Return the number of messages that the group has to read before the queue can be removed.

    A group without progress on the queue counts if it may still read the messages: it subscribes to
    the topic, and has members or does not start at the end. A broadcasting group does not count, as
    only its members know its progress.

    Args:
        group: The record; None if the group no longer exists.
        committed: Committed offset of the group on the queue; None if it has no progress there.
    """
    if committed is not None:
        return max(0, queue.next_offset - max(committed, queue.first_offset))
    subscribes = group is not None and any(s.topic == topic for s in group.terms.subscriptions)
    if group is None or not subscribes or group.terms.broadcasting:
        return 0
    may_read = bool(group.members) or group.terms.consume_from != "LAST"
    return queue.next_offset - queue.first_offset if may_read else 0


def without_retiring_queues(topic: Topic) -> Topic:
    """Return `topic` without its retiring queues, and without brokers that have no others."""
    return replace(
        topic,
        spread=tuple(
            replace(part, queue_count=part.writable_count, write_queue_count=0)
            for part in topic.spread
            if part.writable_count
        ),
    )


def _spread(present: QueueSpread, writable_count: int) -> QueueSpread:
    queue_count = max(present.queue_count, writable_count)
    write_queue_count = writable_count if writable_count < queue_count else 0
    return replace(
        present,
        queue_count=queue_count,
        write_queue_count=write_queue_count,
        closed=not writable_count,
    )


def _grow(counts: dict[str, int], missing: int, brokers: Collection[str], first: int) -> None:
    """Add queues to the brokers with fewest; between equals as in a new topic, from `first` on."""
    if not brokers:
        raise NoBroker("no storage node is registered", retry_after_ms=500)
    names = sorted(brokers)
    rank = {name: (index - first) % len(names) for index, name in enumerate(names)}
    for _ in range(missing):
        name = min(names, key=lambda name: (counts.get(name, 0), rank[name]))
        counts[name] = counts.get(name, 0) + 1


def _shrink(counts: dict[str, int], surplus: int, topic: str) -> None:
    """Remove queues from the brokers with most; between equals from the last name on."""
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
