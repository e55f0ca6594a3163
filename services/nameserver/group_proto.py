"""Protobuf messages of groups and heartbeats, to the values of the core and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.common.v1 import error_pb2, queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from baton.nameserver.v1.stored_group_pb2 import StoredGroup
from baton.nameserver.v1.stored_refused_client_pb2 import StoredRefusedClient
from batonmq._common.rpc import differences_to_pb, error_to_pb
from batonmq._core.names import check_client_id, check_group, check_host, check_topic
from batonmq._core.queues import Incarnation
from batonmq._core.subscription import parse_filter
from batonmq.errors import BatonError, InvalidArgument, LimitExceeded
from batonmq_server.nameserver.core.assignment import AssignmentStrategy
from batonmq_server.nameserver.core.group_transaction import GroupSettings, SubscriptionVerdict
from batonmq_server.nameserver.core.groups import (
    SUBSCRIPTIONS_MAX,
    BrokerAssignment,
    Group,
    Heartbeat,
    Member,
    Pause,
    StagedSubscription,
    Subscription,
    SubscriptionPolicy,
    Subscriptions,
    Terms,
    TopicAssignment,
    TopicBeginning,
)
from batonmq_server.nameserver.enum_values import enum_value

BY_CHARACTERS_MAX = 255
REASON_CHARACTERS_MAX = 1_024
REFUSED_BYTES_MAX = 8_192
"""Largest stored refusal of a client, unless its first difference alone is larger."""
ROOM_CHARACTERS_MAX = 127
_MODELS: Mapping[int, str] = {
    pb.MESSAGE_MODEL_UNSPECIFIED: "CLUSTERING",
    pb.MESSAGE_MODEL_CLUSTERING: "CLUSTERING",
    pb.MESSAGE_MODEL_BROADCASTING: "BROADCASTING",
}
_STARTS: Mapping[int, str] = {
    pb.CONSUME_FROM_UNSPECIFIED: "LAST",
    pb.CONSUME_FROM_LAST: "LAST",
    pb.CONSUME_FROM_FIRST: "FIRST",
    pb.CONSUME_FROM_TIMESTAMP: "TIMESTAMP",
}
_ORDERS: Mapping[int, str] = {
    pb.MESSAGE_ORDER_UNSPECIFIED: "NONE",
    pb.MESSAGE_ORDER_QUEUE: "QUEUE",
    pb.MESSAGE_ORDER_KEY: "KEY",
}
_ORDERS_PB: Mapping[str, pb.MessageOrder.ValueType] = {
    "NONE": pb.MESSAGE_ORDER_UNSPECIFIED,
    "QUEUE": pb.MESSAGE_ORDER_QUEUE,
    "KEY": pb.MESSAGE_ORDER_KEY,
}
_POLICIES: Mapping[int, SubscriptionPolicy | None] = {
    pb.SUBSCRIPTION_POLICY_UNSPECIFIED: None,
    pb.SUBSCRIPTION_POLICY_REJECT: SubscriptionPolicy.REJECT,
    pb.SUBSCRIPTION_POLICY_STAGED: SubscriptionPolicy.STAGED,
    pb.SUBSCRIPTION_POLICY_STAGED_LATEST: SubscriptionPolicy.STAGED_LATEST,
    pb.SUBSCRIPTION_POLICY_WARN: SubscriptionPolicy.WARN,
}
_OWNED: Mapping[int, bool | None] = {
    pb.OWNERSHIP_UNSPECIFIED: None,
    pb.OWNERSHIP_ON: True,
    pb.OWNERSHIP_OFF: False,
}
_STRATEGIES: Mapping[int, AssignmentStrategy | None] = {
    pb.STRATEGY_UNSPECIFIED: None,
    pb.STRATEGY_STICKY: AssignmentStrategy.STICKY,
    pb.STRATEGY_AVERAGE: AssignmentStrategy.AVERAGE,
    pb.STRATEGY_AVERAGE_BY_CIRCLE: AssignmentStrategy.AVERAGE_BY_CIRCLE,
    pb.STRATEGY_CONSISTENT_HASH: AssignmentStrategy.CONSISTENT_HASH,
    pb.STRATEGY_MACHINE_ROOM: AssignmentStrategy.MACHINE_ROOM,
}


def group_to_stored(group: Group) -> StoredGroup:
    """Return the group as stored in etcd."""
    staged = group.staged
    return StoredGroup(
        name=group.name,
        generation=group.generation,
        members=[_member_to_pb(member) for member in group.members],
        subscriptions=_subscriptions_to_pb(group.terms.subscriptions),
        subscription_generation=group.subscription_generation,
        model=_model_to_pb(group),
        consume_from=pb.ConsumeFrom.Value(f"CONSUME_FROM_{group.terms.consume_from}"),
        order=_ORDERS_PB[group.terms.order],
        policy=pb.SubscriptionPolicy.Value(f"SUBSCRIPTION_POLICY_{group.policy.value}"),
        ownership=_ownership_to_pb(group),
        strategy=pb.Strategy.Value(f"STRATEGY_{group.strategy.value}"),
        assignments=[
            pb.TopicAssignment(
                topic=topic.topic,
                brokers=[
                    pb.BrokerAssignment(broker=part.broker, member_numbers=part.member_numbers)
                    for part in topic.brokers
                ],
            )
            for topic in group.assignments
        ],
        staged=pb.StagedSubscription(
            subscriptions=_subscriptions_to_pb(staged.subscriptions),
            draining=staged.draining,
            since_unix_ms=staged.since_unix_ms,
        )
        if staged
        else None,
        pause=_pause_to_pb(group.pause),
        beginnings=[
            pb.TopicBeginning(
                topic=one.topic,
                topic_id=one.topic_id,
                spread=[pb.QueueSpread(broker=b, queue_count=n) for b, n in one.queue_counts],
            )
            for one in group.beginnings
        ],
        creator=group.creator,
    )


def group_from_stored(group: StoredGroup) -> Group:
    """Return the group of a record in etcd; the inverse of `group_to_stored`.

    Raises:
        KeyError: an enum value of the record is unknown.
    """
    staged, pause = group.staged, group.pause
    return Group(
        name=group.name,
        generation=group.generation,
        members=tuple(
            Member(
                m.incarnation.client_id,
                m.incarnation.incarnation_id,
                m.host,
                m.join_unix_ms,
                m.room,
                m.subscription_hash,
                m.differs,
                m.incarnation.owner,
            )
            for m in group.members
        ),
        terms=Terms(
            subscriptions=_subscriptions_from_pb(group.subscriptions),
            model=_MODELS[group.model],
            consume_from=_STARTS[group.consume_from],
            order=_ORDERS[group.order],
        ),
        subscription_generation=group.subscription_generation,
        policy=_POLICIES[group.policy] or SubscriptionPolicy.REJECT,
        owned=_OWNED[group.ownership] is not False,
        strategy=_STRATEGIES[group.strategy] or AssignmentStrategy.STICKY,
        assignments=tuple(
            TopicAssignment(
                topic.topic,
                tuple(
                    BrokerAssignment(part.broker, tuple(part.member_numbers))
                    for part in topic.brokers
                ),
            )
            for topic in group.assignments
        ),
        staged=StagedSubscription(
            _subscriptions_from_pb(staged.subscriptions), staged.draining, staged.since_unix_ms
        )
        if group.HasField("staged")
        else None,
        pause=Pause(pause.by, pause.reason, pause.since_unix_ms)
        if group.HasField("pause")
        else None,
        beginnings=tuple(
            TopicBeginning(
                one.topic,
                one.topic_id,
                tuple((part.broker, part.queue_count) for part in one.spread),
            )
            for one in group.beginnings
        ),
        creator=group.creator,
    )


def group_to_pb(group: StoredGroup) -> pb.Group:
    """Return the group of a record in etcd as the message of the contract."""
    return pb.Group(
        name=group.name,
        generation=group.generation,
        members=group.members,
        subscriptions=group.subscriptions,
        subscription_generation=group.subscription_generation,
        model=group.model,
        consume_from=group.consume_from,
        order=group.order,
        policy=group.policy,
        ownership=group.ownership,
        strategy=group.strategy,
        assignments=group.assignments,
        staged=group.staged if group.HasField("staged") else None,
        pause=group.pause if group.HasField("pause") else None,
        beginnings=group.beginnings,
    )


def gate_of(group: Group) -> StoredGate:
    """Return what the other services need to know of the group."""
    return StoredGate(
        subscription_generation=group.subscription_generation,
        model=_model_to_pb(group),
        ownership=_ownership_to_pb(group),
        bound=group.policy is not SubscriptionPolicy.WARN,
        draining=group.draining,
        pause=_pause_to_pb(group.pause),
    )


def heartbeat_from_pb(request: pb.HeartbeatRequest) -> Heartbeat:
    """Return the heartbeat, its subscription in canonical form.

    Raises:
        InvalidArgument, InvalidName, LimitExceeded, BadExpression: a field is invalid.
    """
    incarnation = incarnation_from_pb(request.incarnation)
    return Heartbeat(
        group=check_group(request.group),
        client_id=incarnation.client_id,
        incarnation_id=incarnation.incarnation_id,
        owner=incarnation.owner,
        host=check_host(request.host),
        room=_text("room", request.room, ROOM_CHARACTERS_MAX),
        terms=Terms(
            subscriptions=_checked_subscriptions(request.subscriptions),
            model=enum_value("model", request.model, _MODELS),
            consume_from=enum_value("consume_from", request.consume_from, _STARTS),
            order=enum_value("order", request.order, _ORDERS),
        ),
    )


def settings_from_pb(request: pb.UpdateGroupRequest, now_unix_ms: int) -> GroupSettings:
    """Return the settings to change.

    Raises:
        InvalidArgument, LimitExceeded: a field of the request is invalid.
    """
    paused = request.paused if request.HasField("paused") else None
    by = _text("by", request.by, BY_CHARACTERS_MAX)
    reason = _text("reason", request.reason, REASON_CHARACTERS_MAX)
    if paused is not None and not by:
        raise InvalidArgument(
            "by is required",
            remedy="Name the operator that pauses or resumes the group.",
            facts={"field": "by"},
        )
    return GroupSettings(
        policy=enum_value("policy", request.policy, _POLICIES),
        owned=enum_value("ownership", request.ownership, _OWNED),
        strategy=enum_value("strategy", request.strategy, _STRATEGIES),
        paused=paused,
        pause=Pause(by, reason, now_unix_ms) if paused else None,
    )


def refused_to_stored(
    heartbeat: Heartbeat, error: BatonError, since_unix_ms: int
) -> StoredRefusedClient:
    """Return the refusal of a heartbeat as stored in etcd, with as many differences as fit."""
    stored = StoredRefusedClient(
        incarnation=queue_pb2.Incarnation(
            client_id=heartbeat.client_id, incarnation_id=heartbeat.incarnation_id
        ),
        host=heartbeat.host,
        error=error_to_pb(error),
        since_unix_ms=since_unix_ms,
    )
    differences = stored.error.differences
    while len(differences) > 1 and stored.ByteSize() > REFUSED_BYTES_MAX:
        del differences[-1]
    return stored


def refused_to_pb(client: StoredRefusedClient) -> pb.RefusedClient:
    """Return a refused client in etcd as the message of the contract."""
    return pb.RefusedClient(
        incarnation=client.incarnation,
        host=client.host,
        error=client.error,
        since_unix_ms=client.since_unix_ms,
    )


def verdict_to_pb(
    verdict: SubscriptionVerdict,
) -> tuple[pb.SubscriptionVerdict.ValueType, list[error_pb2.SubscriptionDifference]]:
    """Return the verdict and its differences as the values of the contract."""
    return (
        pb.SubscriptionVerdict.Value(f"SUBSCRIPTION_VERDICT_{verdict.kind.value}"),
        differences_to_pb(verdict.differences),
    )


def incarnation_from_pb(incarnation: queue_pb2.Incarnation) -> Incarnation:
    """Return the incarnation.

    Raises:
        InvalidName: the client id is malformed.
        InvalidArgument: the incarnation id is missing.
    """
    client_id = check_client_id(incarnation.client_id)
    if not incarnation.incarnation_id:
        raise InvalidArgument(
            "incarnation_id is required, got 0",
            remedy="Draw a random number other than 0 at process start.",
            facts={"field": "incarnation_id"},
        )
    return Incarnation(client_id, incarnation.incarnation_id, incarnation.owner)


def _checked_subscriptions(requested: Sequence[pb.Subscription]) -> Subscriptions:
    if not requested:
        raise InvalidArgument(
            "subscriptions is required",
            remedy=f"Subscribe to 1 to {SUBSCRIPTIONS_MAX} topics.",
            facts={"field": "subscriptions"},
        )
    if len(requested) > SUBSCRIPTIONS_MAX:
        raise LimitExceeded(
            f"subscriptions has {len(requested)} topics; the limit is {SUBSCRIPTIONS_MAX}",
            remedy="Use another group for the other topics.",
            facts={
                "field": "subscriptions",
                "limit": SUBSCRIPTIONS_MAX,
                "actual": len(requested),
            },
        )
    by_topic: dict[str, str] = {}
    for subscription in requested:
        topic = check_topic(subscription.topic)
        if topic in by_topic:
            raise InvalidArgument(
                f"topic {topic} is subscribed to twice",
                remedy="Write all tags of the topic in one expression: TagA || TagB.",
                facts={"field": "subscriptions"},
            )
        by_topic[topic] = parse_filter(subscription.expression).canonical()
    return tuple(Subscription(topic, by_topic[topic]) for topic in sorted(by_topic))


def _member_to_pb(member: Member) -> pb.Member:
    return pb.Member(
        incarnation=queue_pb2.Incarnation(
            client_id=member.client_id, incarnation_id=member.incarnation_id, owner=member.owner
        ),
        host=member.host,
        join_unix_ms=member.join_unix_ms,
        differs=member.differs,
        room=member.room,
        subscription_hash=member.subscription_hash,
    )


def _model_to_pb(group: Group) -> pb.MessageModel.ValueType:
    return pb.MessageModel.Value(f"MESSAGE_MODEL_{group.terms.model}")


def _ownership_to_pb(group: Group) -> pb.Ownership.ValueType:
    return pb.OWNERSHIP_ON if group.owned else pb.OWNERSHIP_OFF


def _pause_to_pb(pause: Pause | None) -> pb.Pause | None:
    if pause is None:
        return None
    return pb.Pause(by=pause.by, reason=pause.reason, since_unix_ms=pause.since_unix_ms)


def _subscriptions_to_pb(subscriptions: Subscriptions) -> list[pb.Subscription]:
    return [pb.Subscription(topic=s.topic, expression=s.expression) for s in subscriptions]


def _subscriptions_from_pb(subscriptions: Sequence[pb.Subscription]) -> Subscriptions:
    return tuple(Subscription(s.topic, s.expression) for s in subscriptions)


def _text(field: str, text: str, characters_max: int) -> str:
    """Return `text` if it is short enough and printable.

    Raises:
        InvalidArgument, LimitExceeded: it is not.
    """
    if len(text) > characters_max:
        raise LimitExceeded(
            f"{field} has {len(text)} characters; the limit is {characters_max}",
            facts={"field": field, "limit": characters_max, "actual": len(text)},
        )
    if not text.isprintable():
        raise InvalidArgument(
            f"{field} has characters that are not printable", facts={"field": field}
        )
    return text
