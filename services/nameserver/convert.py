"""Protobuf to the core's values and back: the one place that knows both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb

from batonmq.common.errors import InvalidArgument, LimitExceeded
from batonmq.core.names import check_client_id, check_group, check_host, check_topic
from batonmq.core.subscription import TagFilter
from services.nameserver.core import (
    SUBSCRIPTIONS_MAX,
    Group,
    Heartbeat,
    Member,
    QueueSpread,
    Route,
    Subscription,
    Terms,
    Topic,
)

_MODELS: Mapping[int, str] = {
    pb.MESSAGE_MODEL_UNSPECIFIED: "CLUSTERING",
    pb.MESSAGE_MODEL_CLUSTERING: "CLUSTERING",
}
_STARTS: Mapping[int, str] = {
    pb.CONSUME_FROM_UNSPECIFIED: "LAST",
    pb.CONSUME_FROM_LAST: "LAST",
    pb.CONSUME_FROM_FIRST: "FIRST",
}
_PERMISSIONS: Mapping[int, str] = {
    pb.TOPIC_PERMISSION_UNSPECIFIED: "READ_WRITE",
    pb.TOPIC_PERMISSION_READ_WRITE: "READ_WRITE",
    pb.TOPIC_PERMISSION_READ: "READ",
    pb.TOPIC_PERMISSION_WRITE: "WRITE",
}


def topic_to_pb(topic: Topic) -> pb.Topic:
    """As sent, and as it stands in etcd."""
    return pb.Topic(
        name=topic.name,
        topic_id=topic.topic_id,
        spread=[
            pb.QueueSpread(
                broker=s.broker,
                queue_count=s.queue_count,
                write_queue_count=s.write_queue_count,
            )
            for s in topic.spread
        ],
        create_unix_ms=topic.create_unix_ms,
        permission=pb.TopicPermission.Value(f"TOPIC_PERMISSION_{topic.permission}"),
    )


def topic_from_bytes(value: bytes) -> Topic:
    """Inverse of `topic_to_pb`, from its bytes."""
    topic = pb.Topic.FromString(value)
    return Topic(
        name=topic.name,
        topic_id=topic.topic_id,
        spread=tuple(
            QueueSpread(s.broker, s.queue_count, s.write_queue_count) for s in topic.spread
        ),
        create_unix_ms=topic.create_unix_ms,
        permission=_PERMISSIONS[topic.permission],
    )


def permission_from_pb(request: pb.UpdateTopicRequest) -> str:
    """The permission that is asked for; empty if it is to stay as it is.

    Raises:
        InvalidArgument: it is not known.
    """
    if not request.permission:
        return ""
    return _choice("permission", request.permission, _PERMISSIONS)


def route_to_pb(route: Route) -> pb.Route:
    """As sent."""
    return pb.Route(
        topic=topic_to_pb(route.topic),
        brokers=[pb.BrokerAddress(broker=b.name, address=b.address) for b in route.brokers],
        generation=route.generation,
    )


def group_to_pb(group: Group) -> pb.Group:
    """As sent, and as it stands in etcd."""
    return pb.Group(
        name=group.name,
        generation=group.generation,
        members=[
            pb.Member(
                incarnation=queue_pb2.Incarnation(
                    client_id=m.client_id, incarnation_id=m.incarnation_id
                ),
                host=m.host,
                join_unix_ms=m.join_unix_ms,
            )
            for m in group.members
        ],
        subscriptions=[
            pb.Subscription(topic=s.topic, expression=s.expression)
            for s in group.terms.subscriptions
        ],
        subscription_generation=group.subscription_generation,
        model=pb.MessageModel.Value(f"MESSAGE_MODEL_{group.terms.model}"),
        consume_from=pb.ConsumeFrom.Value(f"CONSUME_FROM_{group.terms.consume_from}"),
        orderly=group.terms.orderly,
    )


def group_from_bytes(value: bytes) -> Group:
    """Inverse of `group_to_pb`, from its bytes."""
    group = pb.Group.FromString(value)
    return Group(
        name=group.name,
        generation=group.generation,
        members=tuple(
            Member(m.incarnation.client_id, m.incarnation.incarnation_id, m.host, m.join_unix_ms)
            for m in group.members
        ),
        terms=Terms(
            subscriptions=tuple(Subscription(s.topic, s.expression) for s in group.subscriptions),
            model=_MODELS[group.model],
            consume_from=_STARTS[group.consume_from],
            orderly=group.orderly,
        ),
        subscription_generation=group.subscription_generation,
    )


def heartbeat_from_pb(request: pb.HeartbeatRequest) -> Heartbeat:
    """The heartbeat in canonical form.

    Raises:
        InvalidArgument, InvalidName, LimitExceeded, BadExpression: as the proto says.
    """
    client_id, incarnation_id = incarnation_from_pb(request.incarnation)
    return Heartbeat(
        group=check_group(request.group),
        client_id=client_id,
        incarnation_id=incarnation_id,
        host=check_host(request.host),
        terms=Terms(
            subscriptions=_subscriptions(request.subscriptions),
            model=_choice("model", request.model, _MODELS),
            consume_from=_choice("consume_from", request.consume_from, _STARTS),
            orderly=request.orderly,
        ),
    )


def incarnation_from_pb(incarnation: queue_pb2.Incarnation) -> tuple[str, int]:
    """Client id and incarnation id.

    Raises:
        InvalidName: the client id is not allowed.
        InvalidArgument: the incarnation id is missing.
    """
    client_id = check_client_id(incarnation.client_id)
    if not incarnation.incarnation_id:
        raise InvalidArgument(
            "incarnation_id is 0",
            remedy="Draw a random number other than 0 at process start.",
            facts={"field": "incarnation_id"},
        )
    return client_id, incarnation.incarnation_id


def _subscriptions(asked: Sequence[pb.Subscription]) -> tuple[Subscription, ...]:
    if not asked:
        raise InvalidArgument(
            "subscriptions is empty",
            remedy=f"Subscribe to 1 to {SUBSCRIPTIONS_MAX} topics.",
            facts={"field": "subscriptions"},
        )
    if len(asked) > SUBSCRIPTIONS_MAX:
        raise LimitExceeded(
            f"{len(asked)} subscriptions; the limit is {SUBSCRIPTIONS_MAX}",
            remedy="Use another group for the rest.",
            facts={
                "field": "subscriptions",
                "limit": SUBSCRIPTIONS_MAX,
                "actual": len(asked),
            },
        )
    by_topic: dict[str, str] = {}
    for subscription in asked:
        topic = check_topic(subscription.topic)
        if topic in by_topic:
            raise InvalidArgument(
                f"topic {topic} is subscribed to twice",
                remedy="Join the tags of the topic in one expression.",
                facts={"field": "subscriptions"},
            )
        by_topic[topic] = TagFilter.parse(subscription.expression).canonical()
    return tuple(Subscription(topic, by_topic[topic]) for topic in sorted(by_topic))


def _choice(field: str, number: int, names: Mapping[int, str]) -> str:
    if number not in names:
        raise InvalidArgument(
            f"{field} {number} is not known",
            remedy="Use a value of the contract.",
            facts={"field": field},
        )
    return names[number]
