"""Goal: a request that is no message of its method is INVALID_ARGUMENT, and costs no line of log.

Method: every method of all contracts, health checks and reflection behind the real edge, called
with bytes that no decoder accepts, by callers with and without grants; the port for health checks.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from batonmq._common.rpc import from_rpc_error
from batonmq._connection.channels import connect
from batonmq.errors import InvalidArgument, PermissionDenied
from batonmq_server.local.ports import keep_ports
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.health import serve_health
from tests.access.edge_scene import METHODS, TIMEOUT_S, Scene, scene
from tests.support.own_logs import own_records

GARBAGE = b"\xff\xff\xff"
HEALTH = "/grpc.health.v1.Health"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


async def rejection(channel: grpc.aio.Channel, path: str, metadata: Any = ()) -> Exception:
    """Return the error of a call with bytes that are no message."""
    method = METHODS.get(path)
    streams = method.server_streaming if method is not None else path.endswith("Watch")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        if path == REFLECTION:
            both: Any = channel.stream_stream(path)
            await both(iter([GARBAGE]), metadata=metadata, timeout=TIMEOUT_S).read()
        elif streams:
            stream: Any = channel.unary_stream(path)
            await stream(GARBAGE, metadata=metadata, timeout=TIMEOUT_S).read()
        else:
            unary: Any = channel.unary_unary(path)
            await unary(GARBAGE, metadata=metadata, timeout=TIMEOUT_S)
    return from_rpc_error(raised.value)


@pytest_asyncio.fixture
async def made(etcd: EtcdSession) -> AsyncIterator[Scene]:
    async with scene(etcd) as made:
        await made.know("stranger")
        await made.know("operator", ("admin", "cluster"))
        yield made


async def test_undecodable_request_is_an_invalid_argument_without_a_line_of_log(
    made: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caplog.clear()
    paths = [*METHODS, f"{HEALTH}/Check", f"{HEALTH}/Watch"]
    streams = [path for path, method in METHODS.items() if method.client_streaming]
    for path in streams:  # a caller without a grant is rejected before its first request is read
        error = await rejection(made.channel, path, made.metadata("stranger"))
        assert type(error) is PermissionDenied, (path, error)
    for identity in ("stranger", "operator"):
        for path in paths:
            if identity == "stranger" and path in streams:
                continue
            error = await rejection(made.channel, path, made.metadata(identity))
            assert type(error) is InvalidArgument, (path, error)
            assert error.facts == {"field": "request"}
    error = await rejection(made.channel, REFLECTION, made.metadata("operator"))
    assert type(error) is InvalidArgument
    assert not made.served
    assert not own_records(caplog)


async def test_undecodable_health_check_of_a_stranger_costs_no_line_of_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = keep_ports(tmp_path / "ports.json", ["health"])["health"]
    async with serve_health("127.0.0.1", port, 10), connect(f"127.0.0.1:{port}") as channel:
        for name in ("Check", "Watch"):
            assert type(await rejection(channel, f"{HEALTH}/{name}")) is InvalidArgument
    assert not own_records(caplog)
