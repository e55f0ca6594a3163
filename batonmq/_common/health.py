"""Asks a gRPC server whether it serves (the grpc.health.v1 protocol)."""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

UNREACHABLE = "UNREACHABLE"
"""Nobody answered."""
SERVING = "SERVING"
"""It takes calls."""


async def ask_health(channel: grpc.aio.Channel, *, service: str = "", timeout_s: float = 1) -> str:
    """`SERVING`, `NOT_SERVING`, `UNREACHABLE`, or `UNKNOWN` for a server that can't tell.

    Args:
        service: Full proto name of one service; the server as a whole if empty.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
        answer = await check(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        lost = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return UNREACHABLE if error.code() in lost else "UNKNOWN"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
