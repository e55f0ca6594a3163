"""Consumer groups: members, terms, and the assignment of queues to members."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from batonmq._core.queues import Incarnation
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
    """What happens to a heartbeat with another subscription (protocol section 14)."""

    REJECT = "REJECT"
    """The heartbeat is refused."""
    STAGED = "STAGED"
    """The subscription is staged until every live member has it."""
    STAGED_LATEST = "STAGED_LATEST"
    """The subscription is staged only until the owners have released their queues."""
    WARN = "WARN"
    """The newest subscription replaces the group's at once."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """One topic and the canonical form of its expression."""

    topic: str
    expression: str


Subscriptions = tuple[Subscription, ...]
"""Ascending by topic, each topic once; empty for a group that never had a member."""


def hash_of(subscriptions: Subscriptions) -> int:
    """Return a hash of 64 bits; different subscriptions have different hashes."""
    text = "\n".join(f"{s.topic} {s.expression}" for s in subscriptions)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms that all members of a group must agree on.

    Attributes:
        model: Name of a `MessageModel` without its prefix.
        consume_from: Name of a `ConsumeFrom` without its prefix.
        order: `QUEUE` or `KEY`: in which order messages of a queue are handled; `NONE` for any.
    """

    subscriptions: Subscriptions = ()
    model: str = "CLUSTERING"
    consume_from: str = "LAST"
    order: str = "NONE"

    @property
    def broadcasting(self) -> bool:
        """Whether every member gets every message, filtered by its own subscription."""
        return self.model == "BROADCASTING"

    def settings_agree(self, other: Terms) -> bool:
        """Return whether all terms but the subscriptions are the same."""
        mine = (self.model, self.consume_from, self.order)
        return mine == (other.model, other.consume_from, other.order)


@dataclass(frozen=True, slots=True)
class Member:
    """A process that consumes for a group.

    Attributes:
        room: Machine room; empty for none.
        subscription_hash: Of the member's subscription.
        differs: Whether that differs from the group's subscription.
        owner: Owner number of its identity; 0 without access control.
    """

    client_id: str
    incarnation_id: int
    host: str
    join_unix_ms: int
    room: str = ""
    subscription_hash: int = 0
    differs: bool = False
    owner: int = 0

    @property
    def incarnation(self) -> Incarnation:
        """The incarnation of the process."""
        return Incarnation(self.client_id, self.incarnation_id, self.owner)


@dataclass(frozen=True, slots=True)
class StagedSubscription:
    """The next subscription of a group.

    Attributes:
        draining: Whether the change is decided: the owners are releasing all queues.
        since_unix_ms: Wall clock of the first heartbeat with it.
    """

    subscriptions: Subscriptions
    draining: bool
    since_unix_ms: int


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause: an operator has stopped the deliveries of the group."""

    by: str
    reason: str
    since_unix_ms: int


@dataclass(frozen=True, slots=True)
class BrokerAssignment:
    """The assignment of the queues of one topic on one broker.

    Attributes:
        member_numbers: By queue id: position of the member in the group's `members`, from 1; 0 if
            the queue is not assigned.
    """

    broker: str
    member_numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TopicAssignment:
    """The assignment of the queues of one topic; brokers ascend."""

    topic: str
    brokers: tuple[BrokerAssignment, ...]


@dataclass(frozen=True, slots=True)
class TopicBeginning:
    """A topic as it was when a group subscribed to it.

    Attributes:
        queue_counts: By broker, ascending.
    """

    topic: str
    topic_id: int
    queue_counts: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A consumer group; `members` ascend by client id, which is unique among them.

    A group without members keeps its generation, its terms and its settings.

    Attributes:
        generation: Rises with every change, and is above that of earlier groups of the name.
        owned: Whether queues are to be owned; the queues of a broadcasting group never are.
        assignments: By topic, ascending; empty without members and for a broadcasting group.
        beginnings: By topic, ascending: a queue that is missing there was added later.
        creator: Owner number of the identity that created it, for its quota; 0 if not known.
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
    creator: int = 0

    def member(self, client_id: str) -> Member | None:
        """Return the member with that client id; None if there is none."""
        return next((m for m in self.members if m.client_id == client_id), None)

    @property
    def draining(self) -> bool:
        """Whether the subscription is being changed: no queue is assigned."""
        return self.staged is not None and self.staged.draining


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A heartbeat: the process joins the group, or stays a member, on these terms."""

    group: str
    client_id: str
    incarnation_id: int
    host: str
    terms: Terms
    room: str = ""
    owner: int = 0

    def is_from(self, member: Member) -> bool:
        """Return whether this process is `member`: the same incarnation, of the same owner."""
        sender = Incarnation(self.client_id, self.incarnation_id, self.owner)
        return sender.matches(member.incarnation)


def assign_topics(
    group: Group, topics: Iterable[Topic], before: Group
) -> tuple[TopicAssignment, ...]:
    """Return the assignment of the queues of `topics`, by the members and strategy of `group`.

    No queue is assigned while the subscription is being changed. A member with another subscription
    than the group's gets no queue, unless the policy is WARN.

    Args:
        topics: The existing topics that the group subscribes to.
        before: The record with the present assignment.
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
    assigned = (
        assign_queues(group.strategy, candidates, queues, assigned_members(before))
        if candidates
        else {}
    )
    number_of = {member.client_id: number for number, member in enumerate(group.members, 1)}
    numbers = iter([number_of[assigned[queue]] if queue in assigned else 0 for queue in queues])
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
    """Return the beginnings of all topics that `group` subscribes to; a new topic begins now.

    Args:
        topics: The existing topics that the group subscribes to.
    """
    if group.terms.broadcasting:
        return ()
    present = {topic.name: topic for topic in topics}
    known = {one.topic: one for one in group.beginnings}
    beginnings = []
    for name in (subscription.topic for subscription in group.terms.subscriptions):
        one, topic = known.get(name), present.get(name)
        if topic is not None and (one is None or one.topic_id != topic.topic_id):
            counts = tuple((part.broker, part.queue_count) for part in topic.spread)
            one = TopicBeginning(name, topic.topic_id, counts)
        if one is not None:
            beginnings.append(one)
    return tuple(beginnings)


def assigned_members(group: Group) -> dict[AssignableQueue, str]:
    """Return the client id of each assigned queue's member."""
    return {
        AssignableQueue(topic.topic, part.broker, queue_id): group.members[number - 1].client_id
        for topic in group.assignments
        for part in topic.brokers
        for queue_id, number in enumerate(part.member_numbers)
        if number
    }


def is_fully_assigned(group: Group, topics: Mapping[str, Topic]) -> bool:
    """Return whether the assignments have exactly the queues that exist.

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
