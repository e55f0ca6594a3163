"""Topics: the spread of their queues over brokers, and their routes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from batonmq.errors import NoBroker

QUEUES_MAX = 1_024
QUEUES_DEFAULT = 8


@dataclass(frozen=True, slots=True)
class QueueSpread:
    """Number of queues of a topic on one broker; their ids are [0, queue_count).

    Attributes:
        write_queue_count: Queues with a lower id take messages, the others are retiring; 0 means
            that all queues take messages.
        room: Machine room of the broker when the queues were assigned to it; empty for none.
        closed: Whether no queue takes messages: all are retiring.
        opened_epoch: Epoch of the topic in which queues here began to take messages again; 0 if
            none has.
    """

    broker: str
    queue_count: int
    write_queue_count: int = 0
    room: str = ""
    closed: bool = False
    opened_epoch: int = 0

    @property
    def writable_count(self) -> int:
        """Number of queues that take messages."""
        return 0 if self.closed else self.write_queue_count or self.queue_count


class Compaction(NamedTuple):
    """How a compacted topic is compacted.

    Attributes:
        tombstone_retention_ms: How long a tombstone is kept after the messages that it deletes.
        min_lag_ms: Minimum age of two messages of a key before the older one is removed.
        dirty_percent: Share of new bytes from which a queue is compacted.
    """

    tombstone_retention_ms: int = 86_400_000
    min_lag_ms: int = 0
    dirty_percent: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic; `spread` ascends by broker and has no broker without queues.

    Attributes:
        permission: Name of a `TopicPermission` without its prefix.
        inherited: Whether topics that are created on demand may take their settings from it.
        owner: Identity that created it, for its quota; empty if authorization was off.
        message_type: Name of a `TopicMessageType` without its prefix; `UNSPECIFIED` for every type.
        retention_ms: Retention time of its messages; 0 for that of the broker.
        retention_bytes: Maximum bytes of a queue; 0 for unlimited.
        compaction: Set if it is compacted; fixed when it is created.
        epoch: See `topic_epochs`.
    """

    name: str
    topic_id: int
    spread: tuple[QueueSpread, ...]
    create_unix_ms: int
    permission: str = "READ_WRITE"
    inherited: bool = False
    owner: str = ""
    message_type: str = "UNSPECIFIED"
    retention_ms: int = 0
    retention_bytes: int = 0
    compaction: Compaction | None = None
    epoch: int = 0

    @property
    def queue_count(self) -> int:
        """Number of queues on all brokers, without retiring ones."""
        return sum(part.writable_count for part in self.spread)

    @property
    def shrinking(self) -> bool:
        """Whether there are retiring queues: they accept no messages and are removed once read."""
        return any(part.writable_count < part.queue_count for part in self.spread)


def spread_queues(
    queue_count: int, brokers: Collection[str], *, first: int = 0
) -> tuple[QueueSpread, ...]:
    """Return the spread of a new topic; the counts of two brokers differ by at most one.

    Args:
        brokers: Names in any order, each once.
        first: Index, modulo the number of brokers, into the sorted names: this broker and those
            after it get the odd queues. So topics with few queues are not all on one broker.

    Returns:
        Brokers with queues, ascending.

    Raises:
        NoBroker: `brokers` is empty.
    """
    if not brokers:
        raise NoBroker("no storage node is registered", retry_after_ms=500)
    names = sorted(brokers)
    each, odd = divmod(queue_count, len(names))
    with_odd_queue = {names[(first + index) % len(names)] for index in range(odd)}
    return tuple(
        QueueSpread(name, count) for name in names if (count := each + (name in with_odd_queue)) > 0
    )


def with_rooms(spread: Iterable[QueueSpread], rooms: Mapping[str, str]) -> tuple[QueueSpread, ...]:
    """Return `spread` with the present rooms of the brokers; brokers that are down keep theirs.

    Args:
        rooms: Machine room of each live broker; empty for none.
    """
    return tuple(replace(part, room=rooms.get(part.broker, part.room)) for part in spread)


@dataclass(frozen=True, slots=True)
class LiveBroker:
    """A live broker, and the host:port of its server."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Route:
    """The brokers of a topic and their addresses. A broker of the topic that is missing is down."""

    topic: Topic
    brokers: tuple[LiveBroker, ...]
    generation: int

    def same_targets(self, other: Route | None) -> bool:
        """Return whether topic and brokers are the same, whatever the generations."""
        return other is not None and (self.topic, self.brokers) == (other.topic, other.brokers)


def build_route(topic: Topic, addresses: Mapping[str, str], generation: int) -> Route:
    """Return the route of `topic`.

    Args:
        addresses: host:port of each live broker.
        generation: Of topics and brokers together.
    """
    brokers = tuple(
        LiveBroker(part.broker, addresses[part.broker])
        for part in topic.spread
        if part.broker in addresses
    )
    return Route(topic, brokers, generation)
