"""Topics and routes: protobuf to the core's values and back."""

from __future__ import annotations

from collections.abc import Mapping

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq_server.nameserver.core.topics import QueueSpread, Route, Topic
from batonmq_server.nameserver.enum_values import enum_value

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
                room=s.room,
            )
            for s in topic.spread
        ],
        create_unix_ms=topic.create_unix_ms,
        permission=pb.TopicPermission.Value(f"TOPIC_PERMISSION_{topic.permission}"),
        inherited=topic.inherited,
    )


def topic_from_bytes(value: bytes) -> Topic:
    """Inverse of `topic_to_pb`, from its bytes."""
    topic = pb.Topic.FromString(value)
    return Topic(
        name=topic.name,
        topic_id=topic.topic_id,
        spread=tuple(
            QueueSpread(s.broker, s.queue_count, s.write_queue_count, s.room) for s in topic.spread
        ),
        create_unix_ms=topic.create_unix_ms,
        permission=_PERMISSIONS[topic.permission],
        inherited=topic.inherited,
    )


def permission_from_pb(request: pb.UpdateTopicRequest) -> str:
    """The permission that is asked for; empty if it is to stay as it is.

    Raises:
        InvalidArgument: it is not known.
    """
    if not request.permission:
        return ""
    return enum_value("permission", request.permission, _PERMISSIONS)


def route_to_pb(route: Route) -> pb.Route:
    """As sent."""
    return pb.Route(
        topic=topic_to_pb(route.topic),
        brokers=[pb.BrokerAddress(broker=b.name, address=b.address) for b in route.brokers],
        generation=route.generation,
    )
