"""Protobuf messages of removals."""

from __future__ import annotations

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq_server.nameserver.core.removal_obstacle import RemovalObstacle


def obstacle_to_pb(obstacle: RemovalObstacle) -> pb.RemovalObstacle:
    """Return the obstacle as the message of the contract."""
    return pb.RemovalObstacle(
        kind=pb.RemovalObstacleKind.Value(f"REMOVAL_OBSTACLE_KIND_{obstacle.kind.name}"),
        topic=obstacle.topic,
        broker=obstacle.broker,
        group=obstacle.group,
        queue_id=obstacle.queue_id,
        count=obstacle.count,
        first_unix_ms=obstacle.first_unix_ms,
        last_unix_ms=obstacle.last_unix_ms,
        message=obstacle.message,
    )
