"""What a process answers to health checks.

Goal: `live` holds from the first moment to the last, `started` from the recovery on, `ready` while
the node is listed and caught up; what is not known leaves it as it was. Whoever asks can't make the
process keep much.
Method: the answers over a real channel, with a registration and a leader that the test makes up.
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
from tests.support.waiting import until

TIMEOUT_S = 20
NAME = "baton.offsets.v1.OffsetsService"
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Node:
    """What is known of the node."""

    listed: bool = True
    level: bool = True
    known: bool = True
    asked: int = 0

    async def caught_up(self) -> bool:
        self.asked += 1
        if not self.known:
            raise NoQuorum("etcd is away")
        return self.level


@asynccontextmanager
async def probed(folder: Path) -> AsyncIterator[tuple[Health, grpc.aio.Channel]]:
    port = keep_ports(folder / "ports.json", ["health"])["health"]
    async with serve_health("127.0.0.1", port) as answers, connect(f"127.0.0.1:{port}") as channel:
        yield answers, channel


async def told(channel: grpc.aio.Channel) -> set[str]:
    names = ("", NAME, LIVE, STARTED, READY)
    return {name for name in names if await _serves(channel, name)}


async def _serves(channel: grpc.aio.Channel, name: str) -> bool:
    return await ask_health(channel, service=name, timeout_s=TIMEOUT_S) == SERVING


async def test_a_process_that_recovers_lives_and_has_not_started(tmp_path: Path) -> None:
    async with probed(tmp_path) as (answers, channel):
        assert await told(channel) == {LIVE}
        await answers.recovered()
        assert await told(channel) == {LIVE, STARTED}


async def test_a_node_is_ready_while_it_is_listed_and_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "LOOK_INTERVAL_S", 0.01)
    node = Node(level=False)

    async def ready() -> bool:
        return READY in await told(channel)

    async def unready() -> bool:
        return not await ready()

    async with probed(tmp_path) as (answers, channel), asyncio.TaskGroup() as tasks:
        await answers.recovered()
        await answers.serves([NAME])
        following = tasks.create_task(answers.follow(lambda: node.listed, node.caught_up))
        await until(lambda: node.asked > 2)
        assert await told(channel) == {"", NAME, LIVE, STARTED}, "takes calls, but lags behind"
        node.level = True
        await until(ready)
        node.known = False
        before = node.asked
        await until(lambda: node.asked > before + 2)
        assert await ready(), "nobody knows better"
        node.known, node.listed = True, False
        await until(unready)
        node.listed = True
        await until(ready)
        await answers.drains()
        assert await told(channel) == {LIVE, STARTED}
        await until(following.done)


async def test_without_a_port_of_its_own_the_answers_are_given_elsewhere() -> None:
    async with serve_health("127.0.0.1", 0) as answers:
        server = grpc.aio.server()
        answers.add(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with connect(f"127.0.0.1:{port}") as channel:
            assert await told(channel) == {LIVE}
        await server.stop(None)


# ---- what asking costs


def watch(channel: grpc.aio.Channel, name: str = "") -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)


async def test_a_watch_is_told_what_changes(tmp_path: Path) -> None:
    async with probed(tmp_path) as (answers, channel):
        watching, later = watch(channel, READY), watch(channel, NAME)
        assert (await watching.read()).status == NOT_SERVING
        assert (await later.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        await answers.recovered()
        await answers.serves([NAME])
        assert (await later.read()).status == health_pb2.HealthCheckResponse.SERVING
        await answers.drains()
        assert (await later.read()).status == NOT_SERVING
        watching.cancel()
        later.cancel()


async def test_all_names_are_listed(tmp_path: Path) -> None:
    async with probed(tmp_path) as (_, channel):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        listed = await stub.List(health_pb2.HealthListRequest(), timeout=TIMEOUT_S)  # type: ignore[attr-defined]
        served = {name for name, one in listed.statuses.items() if one.status != NOT_SERVING}
        assert served == {LIVE}
        assert set(listed.statuses) == {"", LIVE, STARTED, READY}


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_long_request_is_not_read_at_the_port_for_health(
    tmp_path: Path, method: str
) -> None:
    async with probed(tmp_path) as (_, channel):
        call: Any = getattr(health_pb2_grpc.HealthStub(channel), method)
        asked = call(health_pb2.HealthCheckRequest(service="x" * 2048), timeout=TIMEOUT_S)
        assert await asked.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "message larger than max" in await asked.details()


async def test_a_name_longer_than_any_is_not_watched(tmp_path: Path) -> None:
    async with probed(tmp_path) as (_, channel):
        asked = watch(channel, "x" * (health.NAME_CHARACTERS_MAX + 1))
        assert await asked.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_no_more_watches_are_held_than_there_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "WATCHES_MAX", 2)
    async with probed(tmp_path) as (_, channel):
        held = [watch(channel), watch(channel)]
        for one in held:
            await one.read()
        assert await watch(channel).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        held.pop().cancel()

        async def another() -> bool:
            """The end of the other one may be noticed later than this one begins."""
            try:
                return bool(await watch(channel).read())
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                return False

        await until(another)
        held.pop().cancel()
