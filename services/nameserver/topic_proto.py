"""Protobuf messages of topics and routes, to the values of the core and back."""

from __future__ import annotations

from collections.abc import Mapping

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from batonmq.errors import InvalidArgument
from batonmq_server.nameserver.core.topics import Compaction, QueueSpread, Route, Topic
from batonmq_server.nameserver.enum_values import enum_value

_PERMISSIONS: Mapping[int, str] = {
    pb.TOPIC_PERMISSION_UNSPECIFIED: "READ_WRITE",
    pb.TOPIC_PERMISSION_READ_WRITE: "READ_WRITE",
    pb.TOPIC_PERMISSION_READ: "READ",
    pb.TOPIC_PERMISSION_WRITE: "WRITE",
}

_MESSAGE_TYPES: Mapping[int, str] = {
    number: name.removeprefix("TOPIC_MESSAGE_TYPE_") for name, number in pb.TopicMessageType.items()
}


def topic_to_pb(topic: Topic) -> pb.Topic:
    """Return the topic as the message of the contract."""
    return pb.Topic(
        name=topic.name,
        topic_id=topic.topic_id,
        spread=_spread_to_pb(topic),
        create_unix_ms=topic.create_unix_ms,
        permission=_permission_to_pb(topic),
        inherited=topic.inherited,
        message_type=_type_to_pb(topic),
        retention_ms=topic.retention_ms,
        retention_bytes=topic.retention_bytes,
        compaction=_compaction_to_pb(topic),
        epoch=topic.epoch,
    )


def topic_to_bytes(topic: Topic) -> bytes:
    """Return the topic as stored in etcd."""
    return StoredTopic(
        name=topic.name,
        topic_id=topic.topic_id,
        spread=_spread_to_pb(topic),
        create_unix_ms=topic.create_unix_ms,
        permission=_permission_to_pb(topic),
        inherited=topic.inherited,
        owner=topic.owner,
        message_type=_type_to_pb(topic),
        retention_ms=topic.retention_ms,
        retention_bytes=topic.retention_bytes,
        compaction=_compaction_to_pb(topic),
        epoch=topic.epoch,
    ).SerializeToString()


def topic_from_bytes(value: bytes) -> Topic:
    """Return the topic of a value in etcd; the inverse of `topic_to_bytes`."""
    topic = StoredTopic.FromString(value)
    return Topic(
        name=topic.name,
        topic_id=topic.topic_id,
        spread=tuple(
            QueueSpread(
                s.broker, s.queue_count, s.write_queue_count, s.room, s.closed, s.opened_epoch
            )
            for s in topic.spread
        ),
        create_unix_ms=topic.create_unix_ms,
        permission=_PERMISSIONS[topic.permission],
        inherited=topic.inherited,
        owner=topic.owner,
        message_type=_MESSAGE_TYPES.get(topic.message_type, "UNSPECIFIED"),
        retention_ms=topic.retention_ms,
        retention_bytes=topic.retention_bytes,
        compaction=_compaction_of(topic.compaction) if topic.HasField("compaction") else None,
        epoch=topic.epoch,
    )


def permission_from_pb(request: pb.UpdateTopicRequest) -> str:
    """Return the requested permission; empty if it is to stay unchanged.

    Raises:
        InvalidArgument: the permission is unknown.
    """
    if not request.permission:
        return ""
    return enum_value("permission", request.permission, _PERMISSIONS)


def message_type_from_pb(request: pb.CreateTopicRequest) -> str:
    """Return the requested message type; `UNSPECIFIED` for every type.

    Raises:
        InvalidArgument: the type is unknown.
    """
    return enum_value("message_type", request.message_type, _MESSAGE_TYPES)


def retention_from_pb(
    request: pb.CreateTopicRequest | pb.UpdateTopicRequest,
) -> tuple[int | None, int | None]:
    """Return the requested retention time, and bytes of a queue; None for what is not set.

    Raises:
        InvalidArgument: one of them is negative.
    """
    for field in ("retention_ms", "retention_bytes"):
        if (value := getattr(request, field)) < 0:
            raise InvalidArgument(
                f"{field} must not be negative, got {value}",
                remedy=f"Use a positive {field}, or 0 for the default of the broker.",
                facts={"field": field},
            )
    return (
        request.retention_ms if request.HasField("retention_ms") else None,
        request.retention_bytes if request.HasField("retention_bytes") else None,
    )


def compaction_from_pb(
    request: pb.CreateTopicRequest | pb.UpdateTopicRequest,
) -> dict[str, int] | None:
    """Return the requested settings of compaction that are set; None if there are none at all.

    Raises:
        InvalidArgument: one of them is not in its range.
    """
    if not request.HasField("compaction"):
        return None
    wanted = {field.name: value for field, value in request.compaction.ListFields()}
    for field in ("tombstone_retention_ms", "min_lag_ms"):
        if wanted.get(field, 0) < 0:
            raise InvalidArgument(
                f"{field} must not be negative, got {wanted[field]}",
                remedy=f"Use 0 or a positive {field}.",
                facts={"field": field},
            )
    percent = wanted.get("dirty_percent", 1)
    if not 1 <= percent <= 99:
        raise InvalidArgument(
            f"dirty_percent must be 1 to 99, got {percent}",
            remedy="Use a percentage from 1 to 99; 50 is the default.",
            facts={"field": "dirty_percent"},
        )
    return wanted


def route_to_pb(route: Route) -> pb.Route:
    """Return the route as the message of the contract."""
    return pb.Route(
        topic=topic_to_pb(route.topic),
        brokers=[pb.BrokerAddress(broker=b.name, address=b.address) for b in route.brokers],
        generation=route.generation,
    )


def _spread_to_pb(topic: Topic) -> list[pb.QueueSpread]:
    return [spread_to_pb(part) for part in topic.spread]


def spread_to_pb(part: QueueSpread) -> pb.QueueSpread:
    """Return the queues of one broker as the message of the contract."""
    return pb.QueueSpread(
        broker=part.broker,
        queue_count=part.queue_count,
        write_queue_count=part.write_queue_count,
        room=part.room,
        closed=part.closed,
        opened_epoch=part.opened_epoch,
    )


def _compaction_to_pb(topic: Topic) -> pb.Compaction | None:
    return None if topic.compaction is None else pb.Compaction(**topic.compaction._asdict())


def _compaction_of(stored: pb.Compaction) -> Compaction:
    return Compaction(stored.tombstone_retention_ms, stored.min_lag_ms, stored.dirty_percent)


def _type_to_pb(topic: Topic) -> pb.TopicMessageType.ValueType:
    return pb.TopicMessageType.Value(f"TOPIC_MESSAGE_TYPE_{topic.message_type}")


def _permission_to_pb(topic: Topic) -> pb.TopicPermission.ValueType:
    return pb.TopicPermission.Value(f"TOPIC_PERMISSION_{topic.permission}")
