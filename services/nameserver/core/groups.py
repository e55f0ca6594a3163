"""Groups: who is a member, on which terms, and which queues are dealt to whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from batonmq_server.nameserver.core.assignment import (
    AssignableMember,
    AssignableQueue,
    AssignmentStrategy,
    assign_queues,
)
from batonmq_server.nameserver.core.topics import Topic

SUBSCRIPTIONS_MAX = 64
MEMBERS_MAX = 1_000


class SubscriptionPolicy(Enum):
    """What happens to another subscription than the group's (protocol section 14)."""

    REJECT = "REJECT"
    """It is refused."""
    STAGED = "STAGED"
    """It waits until every live member asks for it."""
    STAGED_LATEST = "STAGED_LATEST"
    """It waits for nobody but the owners, who give back their queues."""
    WARN = "WARN"
    """The last one asked for counts at once."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """One topic and the canonical form of its expression."""

    topic: str
    expression: str


Subscriptions = tuple[Subscription, ...]
"""Ascending by topic, each topic once; empty for a group that never had a member."""


def hash_of(subscriptions: Subscriptions) -> int:
    """64 bits by which two subscriptions are told apart."""
    text = "\n".join(f"{s.topic} {s.expression}" for s in subscriptions)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all members of a group must agree on.

    Attributes:
        model: Name of a `MessageModel` without its prefix.
        consume_from: Name of a `ConsumeFrom` without its prefix.
        orderly: Whether messages of a queue are handled one at a time.
    """

    subscriptions: Subscriptions = ()
    model: str = "CLUSTERING"
    consume_from: str = "LAST"
    orderly: bool = False

    @property
    def broadcasting(self) -> bool:
        """Whether every member gets every message, filtered by its own subscription."""
        return self.model == "BROADCASTING"

    def settings_agree(self, other: Terms) -> bool:
        """Whether all but the subscriptions is the same."""
        mine = (self.model, self.consume_from, self.orderly)
        return mine == (other.model, other.consume_from, other.orderly)


@dataclass(frozen=True, slots=True)
class Member:
    """A process that consumes for a group.

    Attributes:
        room: Machine room; empty for none.
        subscription_hash: Of what it asks for.
        differs: Whether that is another subscription than the group has.
    """

    client_id: str
    incarnation_id: int
    host: str
    join_unix_ms: int
    room: str = ""
    subscription_hash: int = 0
    differs: bool = False


@dataclass(frozen=True, slots=True)
class StagedSubscription:
    """The subscription that a group is about to get.

    Attributes:
        draining: It is decided: all queues are being given back.
        since_unix_ms: When the first member asked for it.
    """

    subscriptions: Subscriptions
    draining: bool
    since_unix_ms: int


@dataclass(frozen=True, slots=True)
class Pause:
    """An operator has stopped the deliveries."""

    by: str
    reason: str
    since_unix_ms: int


@dataclass(frozen=True, slots=True)
class BrokerAssignment:
    """Whose the queues of one topic on one broker are.

    Attributes:
        owners: By queue id: place of the member among the group's, from 1; 0 for nobody.
    """

    broker: str
    member_numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TopicAssignment:
    """Whose the queues of one topic are; brokers ascend."""

    topic: str
    brokers: tuple[BrokerAssignment, ...]


@dataclass(frozen=True, slots=True)
class TopicBeginning:
    """What a topic was when a group began with it.

    Attributes:
        queue_counts: By broker, ascending.
    """

    topic: str
    topic_id: int
    queue_counts: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A consumer group; `members` ascend by client id, which is unique among them.

    A group that everybody has left stays, with its generation, its terms and its settings.

    Attributes:
        generation: Rises with every change, and is above that of earlier groups of the name.
        owned: Whether an operator wants queues to be owned; those of a broadcasting group never
            are.
        assignments: By topic, ascending; none without members and for a broadcasting group.
        beginnings: By topic, ascending: a queue that is not there came later.
    """

    name: str
    generation: int = 0
    members: tuple[Member, ...] = ()
    terms: Terms = Terms()
    subscription_generation: int = 0
    policy: SubscriptionPolicy = SubscriptionPolicy.REJECT
    owned: bool = True
    strategy: AssignmentStrategy = AssignmentStrategy.STICKY
    assignments: tuple[TopicAssignment, ...] = ()
    staged: StagedSubscription | None = None
    pause: Pause | None = None
    beginnings: tuple[TopicBeginning, ...] = ()

    def member(self, client_id: str) -> Member | None:
        """The member with that client id."""
        return next((m for m in self.members if m.client_id == client_id), None)

    @property
    def draining(self) -> bool:
        """Whether the subscription is being changed: nobody gets a queue."""
        return self.staged is not None and self.staged.draining


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What one process asks for: to be, or stay, a member on these terms."""

    group: str
    client_id: str
    incarnation_id: int
    host: str
    terms: Terms
    room: str = ""

    def is_from(self, member: Member) -> bool:
        """Whether `member` is this very process."""
        return (member.client_id, member.incarnation_id) == (self.client_id, self.incarnation_id)


def assign_topics(
    group: Group, topics: Iterable[Topic], before: Group
) -> tuple[TopicAssignment, ...]:
    """Whose the queues of `topics` are, by the members and the strategy of `group`.

    Nobody gets a queue while the subscription is being changed, and no member that asks for
    another one, unless the policy is WARN.

    Args:
        topics: What the group subscribes to, as far as it exists.
        before: The record that has the present owners.
    """
    if group.terms.broadcasting or not group.members:
        return ()
    ascending = sorted(topics, key=lambda topic: topic.name)
    bound = group.policy is not SubscriptionPolicy.WARN
    candidates = [
        AssignableMember(member.client_id, member.room)
        for member in group.members
        if not group.draining and not (bound and member.differs)
    ]
    queues = [
        AssignableQueue(topic.name, part.broker, queue_id, part.room)
        for topic in ascending
        for part in topic.spread
        for queue_id in range(part.queue_count)
    ]
    dealt = (
        assign_queues(group.strategy, candidates, queues, assigned_members(before))
        if candidates
        else {}
    )
    place = {member.client_id: index for index, member in enumerate(group.members, 1)}
    numbers = iter([place[dealt[queue]] if queue in dealt else 0 for queue in queues])
    return tuple(
        TopicAssignment(
            topic.name,
            tuple(
                BrokerAssignment(part.broker, tuple(next(numbers) for _ in range(part.queue_count)))
                for part in topic.spread
            ),
        )
        for topic in ascending
    )


def beginnings_of(group: Group, topics: Iterable[Topic]) -> tuple[TopicBeginning, ...]:
    """The beginnings of all topics that `group` subscribes to; of a new one it is now.

    Args:
        topics: What it subscribes to, as far as it exists.
    """
    if group.terms.broadcasting:
        return ()
    present = {topic.name: topic for topic in topics}
    known = {one.topic: one for one in group.beginnings}
    found = []
    for name in (subscription.topic for subscription in group.terms.subscriptions):
        one, topic = known.get(name), present.get(name)
        if topic is not None and (one is None or one.topic_id != topic.topic_id):
            counts = tuple((part.broker, part.queue_count) for part in topic.spread)
            one = TopicBeginning(name, topic.topic_id, counts)
        if one is not None:
            found.append(one)
    return tuple(found)


def assigned_members(group: Group) -> dict[AssignableQueue, str]:
    """Client ids by queue, of those queues that are dealt to somebody."""
    return {
        AssignableQueue(topic.topic, part.broker, queue_id): group.members[number - 1].client_id
        for topic in group.assignments
        for part in topic.brokers
        for queue_id, number in enumerate(part.member_numbers)
        if number
    }


def is_fully_assigned(group: Group, topics: Mapping[str, Topic]) -> bool:
    """Whether the assignments have exactly the queues that there are.

    Args:
        topics: All topics by name.
    """
    if group.terms.broadcasting or not group.members:
        return not group.assignments
    present = [topics[s.topic] for s in group.terms.subscriptions if s.topic in topics]
    return [
        (topic.name, [(part.broker, part.queue_count) for part in topic.spread])
        for topic in present
    ] == [
        (topic.topic, [(part.broker, len(part.member_numbers)) for part in topic.brokers])
        for topic in group.assignments
    ]
