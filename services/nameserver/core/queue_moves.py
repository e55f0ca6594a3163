"""Moves of queues between brokers, as changes of the spread of a topic.

No message is copied. The target gets new queues at once, and as many queues of the source become
retiring: see `topic_resize`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from batonmq.errors import InvalidArgument, LimitExceeded, NoBroker
from batonmq_server.nameserver.core.topic_resize import spread_with, writable_counts
from batonmq_server.nameserver.core.topics import QueueSpread, Topic


def check_movable(topic: Topic) -> None:
    """Return if queues of the topic can be moved.

    Raises:
        InvalidArgument: it is compacted.
    """
    if topic.compaction is not None:
        raise InvalidArgument(
            f"topic {topic.name} is compacted, so its queues can't be moved: keys would move to "
            "other queues, and leave old messages behind",
            remedy="Create another compacted topic, and copy the messages.",
            facts={"field": "topic"},
        )


def moved_spread(topic: Topic, source: str, target: str, count: int) -> tuple[QueueSpread, ...]:
    """Return the spread of `topic` after a move of `count` queues; 0 means all of the source.

    Raises:
        InvalidArgument: source and target are the same, or the topic is compacted.
        LimitExceeded: the source has fewer writable queues.
    """
    check_movable(topic)
    if source == target:
        raise InvalidArgument(
            f"queues can't be moved from {source} to itself",
            remedy="Name another broker.",
            facts={"field": "to_broker"},
        )
    counts = writable_counts(topic)
    present = counts.get(source, 0)
    if not present or count > present:
        raise LimitExceeded(
            f"topic {topic.name} has {present} writable queues on {source}"
            + (f", and {count} are to be moved" if count else ""),
            remedy=f"See its queues: baton topic describe {topic.name}",
            facts={"field": "queue_count", "limit": present, "actual": count},
        )
    moved = count or present
    counts[source] = present - moved
    counts[target] = counts.get(target, 0) + moved
    return spread_with(topic, counts)


def even_spread(topic: Topic, brokers: Collection[str]) -> tuple[QueueSpread, ...]:
    """Return the spread of `topic` after the least moves that make it even over `brokers`.

    Queues of brokers that are not among them stay.

    Raises:
        InvalidArgument: the topic is compacted.
        NoBroker: `brokers` is empty.
    """
    check_movable(topic)
    names = _sorted(brokers)
    counts = {name: writable_counts(topic).get(name, 0) for name in names}
    rank = _rank(names, topic.topic_id)
    while True:
        fewest = min(names, key=lambda name: (counts[name], rank[name]))
        most = max(names, key=lambda name: (counts[name], rank[name]))
        if counts[most] - counts[fewest] <= 1:
            return spread_with(topic, writable_counts(topic) | counts)
        counts[most] -= 1
        counts[fewest] += 1


def spread_off(topic: Topic, broker: str, brokers: Collection[str]) -> tuple[QueueSpread, ...]:
    """Return the spread of `topic` after all queues of `broker` have moved to `brokers`.

    Each queue goes to the broker with fewest.

    Raises:
        InvalidArgument: the topic is compacted.
        NoBroker: no broker can take the queues.
    """
    check_movable(topic)
    counts = writable_counts(topic)
    names = _sorted(name for name in brokers if name != broker)
    rank = _rank(names, topic.topic_id)
    for _ in range(counts.pop(broker, 0)):
        name = min(names, key=lambda name: (counts.get(name, 0), rank[name]))
        counts[name] = counts.get(name, 0) + 1
    return spread_with(topic, counts)


def gains(before: Topic, spread: Collection[QueueSpread]) -> dict[str, int]:
    """Return how many writable queues each broker gains, ascending by broker; others not."""
    had: Mapping[str, int] = writable_counts(before)
    return {
        part.broker: gained
        for part in spread
        if (gained := part.writable_count - had.get(part.broker, 0)) > 0
    }


def _sorted(brokers: Iterable[str]) -> list[str]:
    names = sorted(brokers)
    if not names:
        raise NoBroker("no other broker takes queues")
    return names


def _rank(names: list[str], first: int) -> dict[str, int]:
    """Return the order between equal brokers: from `first` on, as for a new topic."""
    return {name: (index - first) % len(names) for index, name in enumerate(names)}
