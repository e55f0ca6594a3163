"""Goal: the health check, encoded by hand, agrees with the package of the protocol.

Method: a server with that package, and responses that are not of the protocol.
"""

from __future__ import annotations

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from batonmq._common import health as client
from batonmq._connection.channels import connect

STATUS = health_pb2.HealthCheckResponse


@pytest.mark.parametrize("service", ["", "baton.storage.v1.StorageService", "s" * 127])
def test_request_is_encoded_as_by_the_package(service: str) -> None:
    expected = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    assert client._encode_request(service) == expected


@pytest.mark.parametrize("status", STATUS.ServingStatus.values())
def test_response_is_decoded_as_by_the_package(status: int) -> None:
    raw = STATUS(status=status).SerializeToString()
    assert client._decode_response(raw) == STATUS.ServingStatus.Name(status)


@pytest.mark.parametrize("raw", [b"", b"\x08", b"\x08\x09", b"\x0a\x01", b"\x08\x80\x01"])
def test_other_response_is_unknown(raw: bytes) -> None:
    assert client._decode_response(raw) == "UNKNOWN"


async def test_status_of_a_server_and_of_its_services() -> None:
    server, checks = grpc.aio.server(), health.aio.HealthServicer()
    await checks.set("", STATUS.SERVING)
    await checks.set("paused", STATUS.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        assert await client.ask_health(channel, timeout_s=10) == client.SERVING
        assert await client.ask_health(channel, service="paused", timeout_s=10) == "NOT_SERVING"
        assert await client.ask_health(channel, service="absent", timeout_s=10) == "UNKNOWN"
        await server.stop(None)
        assert await client.ask_health(channel, timeout_s=1) == client.UNREACHABLE
