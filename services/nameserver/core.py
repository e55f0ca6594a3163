"""The nameserver's rules: where queues go, what a route is, who may join a group.

Everything here is a value or a function of values. What is in etcd, who is alive and what time
it is comes in as arguments; what is to be written goes out as a new value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from batonmq.common.errors import (
    ClientIdInUse,
    Difference,
    NoBroker,
    Overloaded,
    SubscriptionConflict,
)

QUEUES_MAX = 1_024
QUEUES_DEFAULT = 8
SUBSCRIPTIONS_MAX = 64
MEMBERS_MAX = 1_000
"""Members of one group. Keeps the group's record, at most 1.1 MB, below etcd's limit of 1.5 MiB."""


@dataclass(frozen=True, slots=True)
class QueueSpread:
    """How many queues of a topic one broker has; their indexes are [0, queue_count).

    Attributes:
        write_queue_count: Those with an index below take messages; 0 means all.
    """

    broker: str
    queue_count: int
    write_queue_count: int = 0

    @property
    def writable_count(self) -> int:
        """Queues that take messages."""
        return self.write_queue_count or self.queue_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic; `spread` ascends by broker and has no broker without queues.

    Attributes:
        permission: Name of a `TopicPermission` without its prefix.
    """

    name: str
    topic_id: int
    spread: tuple[QueueSpread, ...]
    create_unix_ms: int
    permission: str = "READ_WRITE"

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


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker that is alive, and the host:port of its server."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Route:
    """Where the queues of a topic are. A broker of the topic that is not listed is away."""

    topic: Topic
    brokers: tuple[Broker, ...]
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
        Broker(part.broker, addresses[part.broker])
        for part in topic.spread
        if part.broker in addresses
    )
    return Route(topic, brokers, generation)


@dataclass(frozen=True, slots=True)
class Subscription:
    """One topic and the canonical form of its tag expression."""

    topic: str
    expression: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all members of a group must agree on.

    Attributes:
        subscriptions: Ascending by topic, each topic once.
        model: Name of a `MessageModel` without its prefix.
        consume_from: Name of a `ConsumeFrom` without its prefix.
        orderly: Whether messages of a queue are handled one at a time.
    """

    subscriptions: tuple[Subscription, ...]
    model: str = "CLUSTERING"
    consume_from: str = "LAST"
    orderly: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """A process that consumes for a group."""

    client_id: str
    incarnation_id: int
    host: str
    join_unix_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A consumer group; `members` ascend by client id, which is unique among them.

    A group that everybody has left stays, with its generation and its terms.
    """

    name: str
    generation: int
    members: tuple[Member, ...]
    terms: Terms
    subscription_generation: int

    def member(self, client_id: str) -> Member | None:
        """The member with that client id."""
        return next((m for m in self.members if m.client_id == client_id), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What one process asks for: to be, or stay, a member on these terms."""

    group: str
    client_id: str
    incarnation_id: int
    host: str
    terms: Terms

    def is_from(self, member: Member) -> bool:
        """Whether `member` is this very process."""
        return (member.client_id, member.incarnation_id) == (self.client_id, self.incarnation_id)


class SubscriptionLedger:
    """Decides over one group's membership: what the record becomes, or why it does not.

    The first member sets the terms. Whoever comes later agrees with the living or is refused,
    with every difference, and the living are not touched (protocol section 14, REJECT). With no
    other member alive the terms may change. So two filters never serve one group at a time.

    Args:
        group: The record as it stands; None if the group is new.
        live: Incarnation ids of the processes whose member lease is alive, by client id. It is
            at least as new as `group`. A recorded member that is not here has died.
        lease_ms: Length of a member lease.
    """

    def __init__(self, group: Group | None, live: Mapping[str, int], *, lease_ms: int) -> None:
        self._group, self._live, self._lease_ms = group, live, lease_ms

    def dead(self) -> tuple[Member, ...]:
        """Recorded members that are no longer alive, ascending by client id."""
        members = self._group.members if self._group else ()
        return tuple(m for m in members if self._live.get(m.client_id) != m.incarnation_id)

    def expire(self) -> Group | None:
        """The record without the dead; the same object if nobody has died."""
        return self._without(self.dead())

    def leave(self, client_id: str, incarnation_id: int) -> Group | None:
        """The record without this process; the same object if it is no member."""
        member = self._group.member(client_id) if self._group else None
        if member is None or member.incarnation_id != incarnation_id:
            return self._group
        return self._without((member,))

    def judge(self, heartbeat: Heartbeat, now_unix_ms: int) -> Group:
        """The record with the sender as a member on its terms; the same object if it was one.

        The dead are taken out by the same change. A member that comes back before it was taken
        out stays one, even if its lease has ended.

        Raises:
            ClientIdInUse: another living process has the client id.
            SubscriptionConflict: a living member has other terms.
            Overloaded: the group is full.
        """
        before = self._group
        if before is None:
            return Group(
                name=heartbeat.group,
                generation=1,
                members=(_newcomer(heartbeat, now_unix_ms),),
                terms=heartbeat.terms,
                subscription_generation=1,
            )
        dead = [m for m in self.dead() if not heartbeat.is_from(m)]
        alive = [m for m in before.members if m not in dead]
        self._check_client_id(heartbeat, alive)
        others = [m for m in alive if not heartbeat.is_from(m)]
        if others:
            _check_terms(heartbeat, before.terms, min(others, key=lambda m: m.join_unix_ms))
        if len(others) == len(alive):
            alive = _joined(alive, _newcomer(heartbeat, now_unix_ms))
        if tuple(alive) == before.members and heartbeat.terms == before.terms:
            return before
        changed = heartbeat.terms.subscriptions != before.terms.subscriptions
        return replace(
            before,
            generation=before.generation + 1,
            members=tuple(alive),
            terms=heartbeat.terms,
            subscription_generation=before.subscription_generation + changed,
        )

    def _check_client_id(self, heartbeat: Heartbeat, alive: Iterable[Member]) -> None:
        for member in alive:
            if member.client_id == heartbeat.client_id and not heartbeat.is_from(member):
                raise ClientIdInUse(
                    f"client id {member.client_id!r} of group {heartbeat.group} belongs to a "
                    f"live process on host {member.host or 'unknown'!r}",
                    remedy=(
                        "Give each process a client id of its own. If this process replaces one "
                        f"that crashed, try again until the old session has expired, "
                        f"{self._lease_ms} ms after its last heartbeat."
                    ),
                    retry_after_ms=self._lease_ms,
                    facts={"client_id": member.client_id, "host": member.host},
                )

    def _without(self, gone: Collection[Member]) -> Group | None:
        if self._group is None or not gone:
            return self._group
        return replace(
            self._group,
            generation=self._group.generation + 1,
            members=tuple(m for m in self._group.members if m not in gone),
        )


def differences(heartbeat: Heartbeat, terms: Terms, member: Member) -> tuple[Difference, ...]:
    """Every point on which the sender disagrees with the group: topics by name, then settings.

    Args:
        terms: The group's.
        member: Whom to name as the one who has them.
    """

    def difference(topic: str, setting: str, asked: str, present: str) -> Difference:
        return Difference(topic, setting, heartbeat.client_id, asked, member.client_id, present)

    asked = {s.topic: s.expression for s in heartbeat.terms.subscriptions}
    present = {s.topic: s.expression for s in terms.subscriptions}
    by_topic = [
        difference(topic, "expression", asked.get(topic, ""), present.get(topic, ""))
        for topic in sorted(asked.keys() | present.keys())
        if asked.get(topic) != present.get(topic)
    ]
    settings = [
        ("model", heartbeat.terms.model, terms.model),
        ("orderly", str(heartbeat.terms.orderly).lower(), str(terms.orderly).lower()),
        ("consume_from", heartbeat.terms.consume_from, terms.consume_from),
    ]
    return (*by_topic, *(difference("", *s) for s in settings if s[1] != s[2]))


def _check_terms(heartbeat: Heartbeat, terms: Terms, member: Member) -> None:
    found = differences(heartbeat, terms, member)
    if not found:
        return
    where = [
        f"{d.topic or d.setting}: {heartbeat.client_id} wants {_shown(d.newcomer_value)}, "
        f"{member.client_id} has {_shown(d.member_value)}"
        for d in found
    ]
    more = f"; and {len(where) - 3} more" if len(where) > 3 else ""
    raise SubscriptionConflict(
        f"group {heartbeat.group} has another subscription ({'; '.join(where[:3])}{more})",
        differences=found,
    )


def _shown(value: str) -> str:
    if not value:
        return "nothing"
    return repr(value if len(value) <= 140 else f"{value[:140]}...")


def _newcomer(heartbeat: Heartbeat, now_unix_ms: int) -> Member:
    return Member(heartbeat.client_id, heartbeat.incarnation_id, heartbeat.host, now_unix_ms)


def _joined(alive: list[Member], newcomer: Member) -> list[Member]:
    if len(alive) >= MEMBERS_MAX:
        raise Overloaded(
            f"the group has {MEMBERS_MAX} members, the most it may have",
            remedy="Use more than one group, or fewer processes.",
            retry_after_ms=10_000,
            facts={"limit": MEMBERS_MAX},
        )
    return sorted([*alive, newcomer], key=lambda m: m.client_id)
