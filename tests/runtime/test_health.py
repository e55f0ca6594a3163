"""Health checks of a process.

Goal: `live` holds from the start to the end, `started` after the recovery, `ready` while the node
is listed and caught up; while that is unknown the last status stays. Clients can't make the process
use much memory.
Method: health checks over a real channel, with a registration and a leader made up by the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from batonmq._common.health import SERVING, ask_health
from batonmq._connection.channels import connect
from batonmq.errors import NoQuorum
from batonmq_server.local.ports import keep_ports
from batonmq_server.runtime import health
from batonmq_server.runtime.health import LIVE, READY, STARTED, Health, serve_health
from tests.support.conditions import until

TIMEOUT_S = 20
NAME = "baton.offsets.v1.OffsetsService"
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Node:
    """State of the node, as the test sets it."""

    listed: bool = True
    level: bool = True
    is_known: bool = True
    call_count: int = 0

    async def caught_up(self) -> bool:
        self.call_count += 1
        if not self.is_known:
            raise NoQuorum("etcd does not answer")
        return self.level


@asynccontextmanager
async def probed(folder: Path) -> AsyncIterator[tuple[Health, grpc.aio.Channel]]:
    port = keep_ports(folder / "ports.json", ["health"])["health"]
    async with (
        serve_health("127.0.0.1", port, 100) as status,
        connect(f"127.0.0.1:{port}") as channel,
    ):
        yield status, channel


async def serving_names(channel: grpc.aio.Channel) -> set[str]:
    names = ("", NAME, LIVE, STARTED, READY)
    return {name for name in names if await _serves(channel, name)}


async def _serves(channel: grpc.aio.Channel, name: str) -> bool:
    return await ask_health(channel, service=name, timeout_s=TIMEOUT_S) == SERVING


async def test_recovering_process_is_live_and_not_started(tmp_path: Path) -> None:
    async with probed(tmp_path) as (status, channel):
        assert await serving_names(channel) == {LIVE}
        await status.set_started()
        assert await serving_names(channel) == {LIVE, STARTED}


async def test_node_is_ready_while_it_is_listed_and_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "CHECK_INTERVAL_S", 0.01)
    node = Node(level=False)

    async def ready() -> bool:
        return READY in await serving_names(channel)

    async def unready() -> bool:
        return not await ready()

    async with probed(tmp_path) as (status, channel), asyncio.TaskGroup() as tasks:
        await status.set_started()
        await status.set_serving([NAME])
        following = tasks.create_task(status.follow_readiness(lambda: node.listed, node.caught_up))
        await until(lambda: node.call_count > 2)
        assert await serving_names(channel) == {"", NAME, LIVE, STARTED}, "accepts calls, but lags"
        node.level = True
        await until(ready)
        node.is_known = False
        before = node.call_count
        await until(lambda: node.call_count > before + 2)
        assert await ready(), "unknown: the last status stays"
        node.is_known, node.listed = True, False
        await until(unready)
        node.listed = True
        await until(ready)
        await status.set_draining()
        assert await serving_names(channel) == {LIVE, STARTED}
        await until(following.done)


async def test_health_without_a_port_of_its_own_is_served_by_other_servers() -> None:
    async with serve_health("127.0.0.1", 0, 100) as status:
        server = grpc.aio.server()
        status.add(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with connect(f"127.0.0.1:{port}") as channel:
            assert await serving_names(channel) == {LIVE}
        await server.stop(None)


# ---- limits


def watch(channel: grpc.aio.Channel, name: str = "") -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)


async def test_watch_gets_each_change(tmp_path: Path) -> None:
    async with probed(tmp_path) as (status, channel):
        watching, later = watch(channel, READY), watch(channel, NAME)
        assert (await watching.read()).status == NOT_SERVING
        assert (await later.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        await status.set_started()
        await status.set_serving([NAME])
        assert (await later.read()).status == health_pb2.HealthCheckResponse.SERVING
        await status.set_draining()
        assert (await later.read()).status == NOT_SERVING
        watching.cancel()
        later.cancel()


async def test_list_has_all_names(tmp_path: Path) -> None:
    async with probed(tmp_path) as (_, channel):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        listed = await stub.List(health_pb2.HealthListRequest(), timeout=TIMEOUT_S)  # type: ignore[attr-defined]
        served = {name for name, one in listed.statuses.items() if one.status != NOT_SERVING}
        assert served == {LIVE}
        assert set(listed.statuses) == {"", LIVE, STARTED, READY}


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_long_request_is_not_read_at_the_health_port(tmp_path: Path, method: str) -> None:
    async with probed(tmp_path) as (_, channel):
        call: Any = getattr(health_pb2_grpc.HealthStub(channel), method)
        rejected_call = call(health_pb2.HealthCheckRequest(service="x" * 2048), timeout=TIMEOUT_S)
        assert await rejected_call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "message larger than max" in await rejected_call.details()


async def test_watch_of_a_too_long_name_is_rejected(tmp_path: Path) -> None:
    async with probed(tmp_path) as (_, channel):
        call = watch(channel, "x" * (health.NAME_CHARACTERS_MAX + 1))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_watch_beyond_the_limit_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "WATCHES_MAX", 2)
    async with probed(tmp_path) as (_, channel):
        open_watches = [watch(channel), watch(channel)]
        for one in open_watches:
            await one.read()
        assert await watch(channel).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        open_watches.pop().cancel()

        async def another() -> bool:
            """The server may end the other watch only after this one starts."""
            try:
                return bool(await watch(channel).read())
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                return False

        await until(another)
        open_watches.pop().cancel()
