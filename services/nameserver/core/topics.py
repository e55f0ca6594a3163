"""Topics: where their queues go, and what a route is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from batonmq.errors import NoBroker

QUEUES_MAX = 1_024
QUEUES_DEFAULT = 8


@dataclass(frozen=True, slots=True)
class QueueSpread:
    """How many queues of a topic one broker has; their indexes are [0, queue_count).

    Attributes:
        write_queue_count: Those with an index below take messages; 0 means all.
        room: Machine room of the broker when the queues were put there; empty for none.
    """

    broker: str
    queue_count: int
    write_queue_count: int = 0
    room: str = ""

    @property
    def writable_count(self) -> int:
        """Queues that take messages."""
        return self.write_queue_count or self.queue_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic; `spread` ascends by broker and has no broker without queues.

    Attributes:
        permission: Name of a `TopicPermission` without its prefix.
        inherited: Whether topics that are created on demand may take their settings from it.
    """

    name: str
    topic_id: int
    spread: tuple[QueueSpread, ...]
    create_unix_ms: int
    permission: str = "READ_WRITE"
    inherited: bool = False

    @property
    def queue_count(self) -> int:
        """Queues on all brokers together, as asked for: without those that are being given up."""
        return sum(part.writable_count for part in self.spread)

    @property
    def shrinking(self) -> bool:
        """Whether there are queues that take no more messages and are gone once they are read."""
        return any(part.writable_count < part.queue_count for part in self.spread)


def spread_queues(
    queue_count: int, brokers: Collection[str], *, first: int = 0
) -> tuple[QueueSpread, ...]:
    """Where the queues of a new topic go: counts differ by one at most.

    Args:
        brokers: Names in any order, each once.
        first: The odd queues go to this broker, by index in the sorted names, and the ones after
            it, modulo their number; so topics of few queues need not all meet on one broker.

    Returns:
        Brokers that got a queue, ascending.

    Raises:
        NoBroker: there is none.
    """
    if not brokers:
        raise NoBroker("no storage node is registered", retry_after_ms=500)
    names = sorted(brokers)
    each, odd = divmod(queue_count, len(names))
    lucky = {names[(first + index) % len(names)] for index in range(odd)}
    return tuple(
        QueueSpread(name, count) for name in names if (count := each + (name in lucky)) > 0
    )


def with_rooms(spread: Iterable[QueueSpread], rooms: Mapping[str, str]) -> tuple[QueueSpread, ...]:
    """`spread` with the rooms where the brokers are now; those that are away stay where they were.

    Args:
        rooms: Machine room, perhaps empty, of each broker that is alive.
    """
    return tuple(replace(part, room=rooms.get(part.broker, part.room)) for part in spread)


@dataclass(frozen=True, slots=True)
class LiveBroker:
    """A broker that is alive, and the host:port of its server."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Route:
    """Where the queues of a topic are. A broker of the topic that is not listed is away."""

    topic: Topic
    brokers: tuple[LiveBroker, ...]
    generation: int

    def same_way(self, other: Route | None) -> bool:
        """Whether both lead to the same places, whatever their generations."""
        return other is not None and (self.topic, self.brokers) == (other.topic, other.brokers)


def build_route(topic: Topic, addresses: Mapping[str, str], generation: int) -> Route:
    """The route of `topic`.

    Args:
        addresses: host:port of each broker that is alive.
        generation: Of topics and brokers together.
    """
    brokers = tuple(
        LiveBroker(part.broker, addresses[part.broker])
        for part in topic.spread
        if part.broker in addresses
    )
    return Route(topic, brokers, generation)
