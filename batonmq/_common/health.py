"""Health check of a gRPC server, by the protocol grpc.health.v1.

Its two messages have one field each and are encoded here, so that the package of the protocol is
not needed.
"""

from __future__ import annotations

import grpc
import grpc.aio

UNREACHABLE = "UNREACHABLE"
"""No server responded in time."""
SERVING = "SERVING"
_STATUSES = ("UNKNOWN", SERVING, "NOT_SERVING", "SERVICE_UNKNOWN")
_STRING_FIELD_1, _VARINT_FIELD_1 = b"\x0a", b"\x08"


async def ask_health(channel: grpc.aio.Channel, *, service: str = "", timeout_s: float = 1) -> str:
    """Return SERVING, NOT_SERVING, SERVICE_UNKNOWN, UNREACHABLE, or UNKNOWN for any other response.

    Args:
        service: Full proto name of one service, at most 127 characters; empty for the server.
    """
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=_encode_request,
        response_deserializer=_decode_response,
    )
    try:
        status: str = await check(service, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        lost = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return UNREACHABLE if error.code() in lost else "UNKNOWN"
    return status


def _encode_request(service: str) -> bytes:
    name = service.encode()
    return _STRING_FIELD_1 + bytes((len(name),)) + name if name else b""


def _decode_response(response: bytes) -> str:
    if response[:1] == _VARINT_FIELD_1 and len(response) == 2 and response[1] < len(_STATUSES):
        return _STATUSES[response[1]]
    return "UNKNOWN"
