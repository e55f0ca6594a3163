"""A group for the tests of `GroupTransaction`: heartbeats, expired leases and the record, without
etcd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batonmq_server.nameserver.core.group_transaction import (
    GroupSettings,
    GroupTransaction,
    SubscriptionVerdict,
)
from batonmq_server.nameserver.core.groups import (
    Group,
    Heartbeat,
    Subscription,
    SubscriptionPolicy,
    Subscriptions,
    Terms,
)
from batonmq_server.nameserver.core.topics import QueueSpread, Topic

LEASE_MS = 30_000
TOPIC = Topic(
    name="flights",
    topic_id=1,
    spread=(QueueSpread("a", 3), QueueSpread("b", 2)),
    create_unix_ms=1,
)


def subscribed(expression: str = "*", *topics: str) -> Subscriptions:
    return tuple(Subscription(topic, expression) for topic in topics or ("flights",))


def terms(expression: str = "*", *topics: str, **settings: str | bool) -> Terms:
    return Terms(subscriptions=subscribed(expression, *topics), **settings)  # type: ignore[arg-type]


def beat(
    client_id: str, requested: Terms | str = "*", incarnation_id: int = 1, room: str = ""
) -> Heartbeat:
    return Heartbeat(
        group="g",
        client_id=client_id,
        incarnation_id=incarnation_id,
        host=f"host-of-{client_id}",
        terms=terms(requested) if isinstance(requested, str) else requested,
        room=room,
    )


class Scene:
    """The record and the live members; each call is one transaction."""

    def __init__(self, topics: Sequence[Topic] = (TOPIC,), **settings: object) -> None:
        self.group: Group | None = None
        self.live: dict[str, int] = {}
        self.topics = topics
        self.now_unix_ms = 100
        if settings:
            self.update(**settings)

    @property
    def record(self) -> Group:
        assert self.group is not None
        return self.group

    def update(self, **settings: object) -> None:
        change = GroupSettings(**settings)  # type: ignore[arg-type]
        self.apply(lambda transaction: transaction.update(change))

    def beat(
        self, client_id: str, requested: Terms | str = "*", incarnation_id: int = 1, room: str = ""
    ) -> SubscriptionVerdict:
        heartbeat = beat(client_id, requested, incarnation_id, room)
        transaction = self.apply(lambda transaction: transaction.join(heartbeat))
        return transaction.verdict(heartbeat, self.record)

    def leave(self, client_id: str, incarnation_id: int = 1) -> None:
        self.apply(lambda transaction: transaction.leave(client_id, incarnation_id))

    def die(self, *client_ids: str) -> None:
        for client_id in client_ids:
            self.live.pop(client_id, None)

    def maintain(self, *, drained: bool = False) -> None:
        self.apply(lambda transaction: transaction.finish_draining() if drained else None)

    def apply(self, *calls: Callable[[GroupTransaction], object]) -> GroupTransaction:
        """Apply requests in order; one that raises changes nothing."""
        self.now_unix_ms += 1
        transaction = GroupTransaction(
            "g", self.group, self.live, now_unix_ms=self.now_unix_ms, lease_ms=LEASE_MS
        )
        for call in calls:
            call(transaction)
        topic_names = {s.topic for s in transaction.settled().terms.subscriptions}
        before, self.group = (
            self.group,
            transaction.assigned([t for t in self.topics if t.name in topic_names]),
        )
        if self.group is before:
            assert transaction.is_unchanged() or before is None
        self.live |= transaction.joined
        for client_id in transaction.left:
            self.live.pop(client_id, None)
        return transaction

    @property
    def ids(self) -> list[str]:
        return [member.client_id for member in self.record.members]

    @property
    def waiting(self) -> set[str]:
        """Members whose subscription differs from the group's."""
        return {member.client_id for member in self.record.members if member.differs}

    @property
    def owners(self) -> set[str]:
        """Members with a queue."""
        return {
            self.record.members[owner - 1].client_id
            for topic in self.record.assignments
            for part in topic.brokers
            for owner in part.member_numbers
            if owner
        }


def scene(policy: SubscriptionPolicy, *members: str) -> Scene:
    """A group with the policy, whose members all subscribe to everything."""
    group = Scene(policy=policy)
    for client_id in members:
        group.beat(client_id)
    return group
