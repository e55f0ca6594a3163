"""The record of a group, as one of its members sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._core.queues import QueueRef
from batonmq._core.subscription import Filter, parse_filter
from batonmq.errors import BadExpression, LimitExceeded


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A group as one incarnation sees it. Without arguments: before a record is known.

    Attributes:
        generation: Generation of the record.
        member: Whether the incarnation is a live member.
        assigned: The queues that are assigned to it; none in a broadcasting group: its members
            read all queues.
        filters: The group's subscription, by topic. Messages are pulled and handled by it, even if
            the member requested another one. In a broadcasting group: the member's own.
        subscription_generation: Generation of `filters`.
        owned: Whether the group has ownership; otherwise a member reads its queues without a lock.
        paused: The operator that paused the group, and the reason; empty if it is not paused.
        began: By topic and broker, the number of queues when the group began to read the topic.
    """

    generation: int = 0
    member: bool = False
    assigned: frozenset[QueueRef] = frozenset()
    filters: Mapping[str, Filter] = field(default_factory=dict)
    subscription_generation: int = 0
    owned: bool = True
    paused: tuple[str, str] | tuple[()] = ()
    began: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, group: pb.Group, me: queue_pb2.Incarnation, own: Sequence[pb.Subscription] = ()
    ) -> GroupView:
        """Return the view of `me`; `own` is its own subscription, for a broadcasting group.

        Raises:
            BadExpression: this version of the library can't read the group's subscription.
        """
        broadcasting = group.model == pb.MESSAGE_MODEL_BROADCASTING
        subscriptions = own if broadcasting else group.subscriptions
        filters = {each.topic: _filter(group.name, each) for each in subscriptions}
        return cls(
            generation=group.generation,
            member=any(_is(member, me) for member in group.members),
            assigned=frozenset(
                queue for queue in assigned_queues(group, me) if queue.topic in filters
            ),
            filters=filters,
            subscription_generation=group.subscription_generation,
            owned=group.ownership != pb.OWNERSHIP_OFF and not broadcasting,
            paused=(group.pause.by, group.pause.reason) if group.HasField("pause") else (),
            began={
                one.topic: {part.broker: part.queue_count for part in one.spread}
                for one in group.beginnings
            },
        )

    def added(self, queue: QueueRef) -> bool:
        """Whether the queue was added to its topic after the group began to read the topic."""
        began = self.began.get(queue.topic)
        return began is not None and queue.queue_id >= began.get(queue.broker, 0)


def assigned_queues(group: pb.Group, me: queue_pb2.Incarnation) -> Iterator[QueueRef]:
    """Yield the queues that the group assigns to `me`, not to others with its client id."""
    numbers = {number for number, member in enumerate(group.members, 1) if _is(member, me)}
    for topic in group.assignments:
        for broker in topic.brokers:
            for queue_id, owner in enumerate(broker.member_numbers):
                if owner in numbers:
                    yield QueueRef(topic.topic, broker.broker, queue_id)


def _filter(group: str, subscription: pb.Subscription) -> Filter:
    """Return the filter of a subscription, which another version of the library may have made."""
    try:
        return parse_filter(subscription.expression)
    except (BadExpression, LimitExceeded) as error:
        raise BadExpression(
            f"group {group} subscribes to {subscription.topic} with an expression that this "
            f"version of the library can't read, so this member ends: {error.message}",
            remedy="Update the library of this program to the version of the other members. Or let "
            "all members subscribe with an expression that this version knows.",
            facts={"group": group, "topic": subscription.topic} | error.facts,
        ) from error


def _is(member: pb.Member, me: queue_pb2.Incarnation) -> bool:
    """Return whether a member is this incarnation; only services know its owner number."""
    incarnation = member.incarnation
    return (incarnation.client_id, incarnation.incarnation_id) == (me.client_id, me.incarnation_id)
