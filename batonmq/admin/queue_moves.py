"""Moves of queues between brokers, and removals of brokers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import grpc.aio

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq.admin.admin import Admin
from batonmq.admin.reports import BrokerRemoval, Topic, enum_name, removal_from_pb, topic_from_pb

__all__ = [
    "BrokerRemoval",
    "BrokerRemovalStep",
    "QueueMove",
    "RemovalObstacle",
    "TopicMove",
    "cancel_removal",
    "move_queues",
    "removal_obstacles",
    "remove_broker",
    "spread_queues",
]

MOVE_TIMEOUT_S = 10.0
REMOVE_TIMEOUT_S = 60.0
"""Reads what a broker holds of every topic, and the progress of every group."""

ObstacleKind = Literal[
    "unread",
    "dead_letters",
    "scheduled",
    "transactions",
    "outputs",
    "unreachable",
    "compacted",
    "removing",
]


@dataclass(frozen=True, slots=True)
class TopicMove:
    """A move of queues of one topic.

    Attributes:
        before: The topic before the move.
        topic: The topic after it; of a dry run, as it would be.
        moved_count: Number of moved queues.
    """

    before: Topic
    topic: Topic
    moved_count: int


@dataclass(frozen=True, slots=True)
class RemovalObstacle:
    """Something that is still needed, and so keeps queues or a broker from being removed.

    Attributes:
        kind: What it is; `removing` means that nothing is held, and the queues go next.
        topic: Topic; of outputs, the one that they are stored in.
        group: Group that has messages to read, or whose outputs are remembered; empty for none.
        count: Number of messages, scheduled batches or transactions; 0 if it is not known.
        first_unix_ms: Delivery time of the first scheduled message, or begin of the oldest
            transaction; 0 for none.
        last_unix_ms: Delivery time of the last scheduled message; 0 for none.
        message: Why, and the remedy.
    """

    kind: ObstacleKind
    topic: str
    broker: str
    group: str
    queue_id: int
    count: int
    first_unix_ms: int
    last_unix_ms: int
    message: str


@dataclass(frozen=True, slots=True)
class QueueMove:
    """Queues of a topic that move off a broker; `to` has the number for each other broker."""

    topic: str
    queue_count: int
    to: dict[str, int]


@dataclass(frozen=True, slots=True)
class BrokerRemovalStep:
    """One step of the removal of a broker.

    Attributes:
        moves: Queues that this step has moved; of a dry run, that it would move.
        obstacles: What the broker still holds, at most 1,000 entries.
        nodes_up: Node ids of the broker that are up.
        removal: The mark of the broker; None if it is not being removed.
    """

    moves: tuple[QueueMove, ...]
    obstacles: tuple[RemovalObstacle, ...]
    nodes_up: tuple[str, ...]
    removal: BrokerRemoval | None


async def move_queues(
    admin: Admin, topic: str, from_broker: str, to_broker: str, count: int = 0, *, by: str = ""
) -> TopicMove:
    """Move writable queues of a topic to another broker. Not retried.

    Args:
        count: Number of queues; 0 for all of the source.
        by: Name of the operator; empty for a dry run, which changes nothing.

    Raises:
        InvalidArgument: The topic is compacted, or a broker can't give or take queues.
        LimitExceeded: The source has fewer queues.
        TopicNotFound: The topic does not exist.
    """
    return await _move(
        admin,
        pb.MoveQueuesRequest(
            topic=topic,
            from_broker=from_broker,
            to_broker=to_broker,
            queue_count=count,
            execute=bool(by),
            by=by,
        ),
    )


async def spread_queues(admin: Admin, topic: str, *, by: str = "") -> TopicMove:
    """Move as few queues of a topic as make it even over all brokers. Not retried.

    Args:
        by: Name of the operator; empty for a dry run, which changes nothing.

    Raises:
        InvalidArgument: The topic is compacted.
        TopicNotFound: The topic does not exist.
    """
    return await _move(admin, pb.MoveQueuesRequest(topic=topic, execute=bool(by), by=by))


async def removal_obstacles(admin: Admin, topic: str) -> tuple[RemovalObstacle, ...]:
    """Return what the retiring queues of a topic wait for; empty if there are none.

    Also empty if the nameserver is of an earlier version, which does not know.

    Raises:
        TopicNotFound: The topic does not exist.
    """

    async def ask(limit_s: float) -> pb.QueryRetiringResponse:
        request = pb.QueryRetiringRequest(topic=topic)
        try:
            return await admin.directory.nameserver().QueryRetiring(request, timeout=limit_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return pb.QueryRetiringResponse()
            raise

    return tuple(map(_obstacle_from_pb, (await admin.ask(ask)).obstacles))


async def remove_broker(admin: Admin, broker: str, *, by: str = "") -> BrokerRemovalStep:
    """Carry out the next step of the removal of a broker. Repeat it until the broker is forgotten.

    The first step marks the broker, so that it gets no queues. Each step moves the queues that take
    messages to other brokers. Once the broker holds nothing, and its nodes are stopped, a step
    removes its records.

    Args:
        by: Name of the operator; empty for a dry run, which changes nothing.

    Raises:
        InvalidArgument: There is no such broker.
        NoBroker: No other broker could take the queues.
    """
    return await _remove(admin, pb.RemoveBrokerRequest(broker=broker, execute=bool(by), by=by))


async def cancel_removal(admin: Admin, broker: str, *, by: str = "") -> BrokerRemovalStep:
    """End the removal of a broker: it may get queues again. Moved queues stay where they are.

    Args:
        by: Name of the operator; empty for a dry run, which changes nothing.

    Raises:
        InvalidArgument: The broker is not being removed, or was removed for good.
    """
    request = pb.RemoveBrokerRequest(broker=broker, execute=bool(by), cancel=True, by=by)
    return await _remove(admin, request)


async def _move(admin: Admin, request: pb.MoveQueuesRequest) -> TopicMove:
    try:
        answer = await admin.directory.nameserver().MoveQueues(request, timeout=MOVE_TIMEOUT_S)
    except grpc.aio.AioRpcError as failure:
        raise from_rpc_error(failure) from failure
    return TopicMove(topic_from_pb(answer.before), topic_from_pb(answer.topic), answer.moved_count)


async def _remove(admin: Admin, request: pb.RemoveBrokerRequest) -> BrokerRemovalStep:
    try:
        answer = await admin.directory.nameserver().RemoveBroker(request, timeout=REMOVE_TIMEOUT_S)
    except grpc.aio.AioRpcError as failure:
        raise from_rpc_error(failure) from failure
    return BrokerRemovalStep(
        moves=tuple(
            QueueMove(one.topic, one.queue_count, {to.broker: to.queue_count for to in one.to})
            for one in answer.moves
        ),
        obstacles=tuple(map(_obstacle_from_pb, answer.obstacles)),
        nodes_up=tuple(answer.nodes_up),
        removal=removal_from_pb(answer.removal) if answer.HasField("removal") else None,
    )


def _obstacle_from_pb(obstacle: pb.RemovalObstacle) -> RemovalObstacle:
    kind = enum_name(pb.RemovalObstacleKind.Name, obstacle.kind, "REMOVAL_OBSTACLE_KIND_").lower()
    return RemovalObstacle(
        kind=kind,  # type: ignore[arg-type]  # a newer nameserver may have more
        topic=obstacle.topic,
        broker=obstacle.broker,
        group=obstacle.group,
        queue_id=obstacle.queue_id,
        count=obstacle.count,
        first_unix_ms=obstacle.first_unix_ms,
        last_unix_ms=obstacle.last_unix_ms,
        message=obstacle.message,
    )
