"""The lock manager as a process.

Goal: `python -m batonmq_server.lockmgr` leads, its locks survive it, and it stops cleanly.

Method: real lock manager processes and a real etcd; offsets runs in the test's process.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as pb_grpc
from batonmq._connection.channels import connect
from batonmq_server.local.child_process import ChildProcess, Program
from tests.lockmgr.scene import TIMEOUT_S, Member, Scene
from tests.support.cluster import fork_server
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@asynccontextmanager
async def process(s: Scene, number: int, log: Path) -> AsyncIterator[ChildProcess]:
    """Run a lock manager process in the scene's cluster; kill it at the end of the block."""
    env = {
        "BATON_LOCKMGR_CLUSTER": s.cluster,
        "BATON_LOCKMGR_ETCD": s.endpoint,
        "BATON_LOCKMGR_NODE_ID": f"lockmgr-{number}",
        "BATON_LOCKMGR_LEADER_LEASE_MS": "6000",
        "BATON_LOCKMGR_LOG_FORMAT": "json",
    }
    running = started(log / f"lockmgr-{number}.log", env=env)
    try:
        yield running
    finally:
        running.kill_now()


def started(log_path: Path, *arguments: str, env: Mapping[str, str]) -> ChildProcess:
    """Start `python -m batonmq_server.lockmgr` with these arguments and variables."""

    async def is_ready() -> bool:
        raise NotImplementedError  # a test reads from etcd whether it leads

    program = Program(
        name="lockmgr",
        command=[sys.executable, "-m", "batonmq_server.lockmgr", *arguments],
        env=env,
        drop=("BATON_",),
        log_path=log_path,
        is_ready=is_ready,
    )
    child = ChildProcess(program, fork_server().start)
    child.spawn()
    return child


@asynccontextmanager
async def leading(s: Scene, number: int) -> AsyncIterator[pb_grpc.LockmgrServiceAsyncStub]:
    """Return a stub for the process, once it leads."""

    async def address() -> str:
        nodes = await s.registered("lockmgr")
        addresses = [n.address for n in nodes if n.node_id == f"lockmgr-{number}" and n.epoch]
        return addresses[0] if addresses else ""

    await until(address, timeout_s=40)
    async with connect(await address()) as channel:
        yield pb_grpc.LockmgrServiceStub(channel)


async def test_locks_survive_kill_9_and_sigterm(scene: Scene, tmp_path: Path) -> None:
    a = Member("a")
    generation = await scene.set_group(a)
    async with process(scene, 0, tmp_path) as first:
        async with leading(scene, 0) as stub:
            grant = await a.acquire(stub, generation)
        async with process(scene, 1, tmp_path) as second:
            first.send(signal.SIGKILL)
            async with leading(scene, 1) as stub:
                assert await a.state(stub, grant.token) == "OK"
            second.send(signal.SIGTERM)
            assert await second.ended() == 0
    assert "lockmgr-1" not in [node.node_id for node in await scene.registered("lockmgr")]
    assert (await scene.progress()).token == grant.token


async def test_sigterm_ends_a_held_request_with_a_reason(scene: Scene, tmp_path: Path) -> None:
    a, b = Member("a"), Member("b")
    async with process(scene, 0, tmp_path) as running, leading(scene, 0) as stub:
        await a.acquire(stub, await scene.set_group(a))
        await scene.deliver(1, 0, 5)
        generation = await scene.set_group(a, b)
        async with asyncio.TaskGroup() as tasks:
            acquiring = tasks.create_task(b.refusal(stub, generation, hold_ms=15_000))

            async def waiting() -> bool:
                entries = (await stub.List(pb.ListRequest(), timeout=TIMEOUT_S)).entries
                return list(entries[0].waiters) == ["b"]

            await until(waiting)
            running.send(signal.SIGTERM)
        assert acquiring.result().reason == "NOT_SERVING"
        assert await running.ended() == 0


async def test_settings_are_printed_and_unknown_ones_rejected(tmp_path: Path) -> None:
    async def run(*arguments: str, **env: str) -> tuple[int | None, str]:
        running = started(tmp_path / "lockmgr.log", *arguments, env=env)
        status = await running.ended()
        return status, "\n".join(running.last_lines(100))

    status, stdout = await run("--print-config", BATON_LOCKMGR_LOCK_LEASE_MS="12000")
    settings = json.loads(stdout)
    assert (status, settings["lock_lease_ms"], settings["node_id"]) == (0, 12_000, "lockmgr-0")
    status, problems = await run(BATON_LOCKMGR_LOCK_LEASE="12000")
    assert status == 2
    assert "BATON_LOCKMGR_LOCK_LEASE" in problems
    status, problems = await run(BATON_LOCKMGR_LOCK_LEASE_MS="3000")
    assert status == 2
    assert "BATON_LOCKMGR_LOCK_LEASE_MS" in problems
    assert "lock_lease_ms must be more than 3000, got 3000" in problems
    status, stdout = await run("--print-config", BATON_LOCKMGR_PROFILE="defibus")
    assert (status, json.loads(stdout)["profile"]) == (0, "defibus")
