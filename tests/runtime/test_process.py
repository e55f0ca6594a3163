"""The life cycle of a service process, seen from outside.

Goal: every service has health checks by name, reflection, metrics and a node entry in etcd; on
SIGTERM it drains and stops.
Method: a real offsets process on a real etcd.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.nameserver.v1.stored_node_pb2 import StoredNode
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from batonmq._common.health import SERVING, ask_health
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.channels import connect
from batonmq.errors import NoDeadline
from batonmq_server.local.child_process import (
    ChildProcess,
    ProcessStarter,
    Program,
    start_program,
)
from batonmq_server.local.ports import keep_ports
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.health import LIVE, READY, STARTED
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord
from tests.support.cluster import fork_server
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
TIMEOUT_S = 20
SERVICE = "baton.offsets.v1.OffsetsService"
KEY = "nodes/offsets/offsets-7"


@dataclass
class Running:
    """A process that serves."""

    child: ChildProcess
    node: StoredNode

    def log(self) -> str:
        return "\n".join(self.child.last_lines(200))


@asynccontextmanager
async def offsets(
    etcd: EtcdSession,
    endpoint: str,
    folder: Path,
    *,
    start: ProcessStarter | None = None,
    **more: object,
) -> AsyncIterator[Running]:
    async def registered() -> bool:
        return await etcd.get(KEY) is not None

    settings = {
        "cluster": etcd.prefix.split("/")[2],
        "etcd": endpoint,
        "node_id": "offsets-7",
        "data_dir": str(folder / "data"),
        "log_format": "json",
    }
    child = ChildProcess(
        Program(
            name="offsets",
            command=[sys.executable, "-m", "batonmq_server.offsets"],
            log_path=folder / "log",
            is_ready=registered,
            env={
                f"BATON_OFFSETS_{key.upper()}": str(value)
                for key, value in {**settings, **more}.items()
            },
            drop=("BATON_",),
        ),
        start or fork_server().start,
    )
    child.spawn()
    try:
        await child.ready(30)
        stored = await etcd.get(KEY)
        assert stored is not None
        yield Running(child, StoredNode.FromString(stored.value))
    finally:
        child.kill_now()


async def test_process_serves_the_common_endpoints_and_stops_cleanly(
    etcd: EtcdSession, etcd_endpoint: str, tmp_path: Path
) -> None:
    async with offsets(etcd, etcd_endpoint, tmp_path) as running:
        async with connect(running.node.address) as channel:
            await until(lambda: _serves(channel, ""))
            assert await _serves(channel, SERVICE)
            assert await _serves(channel, "baton.metrics.v1.MetricsService")
            assert SERVICE in await _listed(channel)
            stub = offsets_grpc.OffsetsServiceStub(channel)
            request = offsets_pb.QueryGroupRequest(group="g")
            assert not (await stub.QueryGroup(request, timeout=TIMEOUT_S)).queues
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.QueryGroup(request)
            assert type(from_rpc_error(refused.value)) is NoDeadline
        for reason in ("OK", "NO_DEADLINE"):
            sample = f'baton_rpc_calls_total{{method="QueryGroup",reason="{reason}"'
            await until(partial(_shows, running.node.metrics_address, sample))
        assert (await etcd.get(KEY)) is not None
        running.child.send(signal.SIGTERM)
        assert await running.child.ended() == 0
        assert await etcd.get(KEY) is None, "deleted at once, not when the lease expires"
        assert '"event": "draining' in running.log()
        assert '"event": "stopped"' in running.log()


async def test_garbage_collections_skip_what_the_start_has_made(
    etcd: EtcdSession, etcd_endpoint: str, tmp_path: Path
) -> None:
    """Started alone: a process of the fork server has frozen objects from its beginning."""
    async with offsets(etcd, etcd_endpoint, tmp_path, start=start_program) as running:
        await until(lambda: "frozen_objects=" in running.log())
        frozen = re.search(r"frozen_objects=(\d+)", running.log())
        assert frozen is not None
        assert int(frozen[1]) > 10_000


async def test_process_registers_its_dns_names_and_serves_health_on_its_own_port(
    etcd: EtcdSession, etcd_endpoint: str, tmp_path: Path
) -> None:
    ports = keep_ports(tmp_path / "ports.json", ["health", "metrics"])
    name = "offsets-7.offsets.baton.svc"
    async with (
        offsets(
            etcd,
            etcd_endpoint,
            tmp_path,
            health_port=ports["health"],
            metrics_port=ports["metrics"],
            advertise_address=f"{name}:10912",
            outside_address="127.0.0.1:30930",
        ) as running,
        connect(f"127.0.0.1:{ports['health']}") as channel,
    ):
        assert running.node.address == f"{name}:10912"
        assert running.node.metrics_address == f"{name}:{ports['metrics']}"
        assert running.node.outside_address == "127.0.0.1:30930"
        for name in (LIVE, STARTED, READY, SERVICE):
            await until(partial(_serves, channel, name))
        request = offsets_pb.QueryGroupRequest(group="g")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await offsets_grpc.OffsetsServiceStub(channel).QueryGroup(request, timeout=TIMEOUT_S)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED, (
            "the health port serves nothing else"
        )


async def test_process_with_a_taken_port_ends_with_an_error(
    etcd: EtcdSession, etcd_endpoint: str, tmp_path: Path
) -> None:
    async with offsets(etcd, etcd_endpoint, tmp_path) as running:
        port = running.node.address.rpartition(":")[2]
        other = ChildProcess(
            Program(
                name="other",
                command=[sys.executable, "-m", "batonmq_server.offsets"],
                log_path=tmp_path / "other.log",
                is_ready=running.child.program.is_ready,
                env=dict(running.child.program.env)
                | {"BATON_OFFSETS_PORT": port, "BATON_OFFSETS_DATA_DIR": str(tmp_path / "other")},
                drop=("BATON_",),
            ),
            fork_server().start,
        )
        other.spawn()
        assert await other.ended() == 1
        *_, error_line = (tmp_path / "other.log").read_text().splitlines()
        event = json.loads(error_line)["event"]
        assert event.startswith("process ends error=RuntimeError: Failed to bind")
        assert f":{port}" in event


@pytest.mark.parametrize(
    ("service", "replica_set"), [("offsets", "offsets"), ("storage", "broker-a")]
)
async def test_node_without_replicas_does_not_start_while_others_of_its_set_may_be_elected(
    service: str, replica_set: str, etcd: EtcdSession, etcd_endpoint: str, tmp_path: Path
) -> None:
    """Otherwise it would write data that the others never get, and one side would be dropped."""
    key = etcd.key("replicas", service, replica_set)
    node_id = f"{replica_set}-0"
    await etcd.put(key, ReplicaSetRecord(7, node_id, frozenset({node_id, "other"}), 7).encode())
    upper = f"BATON_{service.upper()}"
    settings = {
        "CLUSTER": etcd.prefix.split("/")[2],
        "ETCD": etcd_endpoint,
        "NODE_ID": node_id,
        "REPLICA_SET" if service == "offsets" else "BROKER": replica_set,
        "DATA_DIR": str(tmp_path / "data"),
    }
    entry = f"nodes/{service}/{node_id}"

    async def registered() -> bool:
        return await etcd.get(entry) is not None

    child = ChildProcess(
        Program(
            name=service,
            command=[sys.executable, "-m", f"batonmq_server.{service}"],
            log_path=tmp_path / "log",
            is_ready=registered,
            env={f"{upper}_{name}": value for name, value in settings.items()},
            drop=("BATON_",),
        ),
        fork_server().start,
    )
    child.spawn()
    assert await child.ended() == 2
    (error_line,) = child.last_lines(1)
    assert f"other may be elected, so it must not run without {upper}_REPLICAS" in error_line
    assert not (tmp_path / "data").exists(), "no file is written"
    await etcd.put(key, ReplicaSetRecord(7, node_id, frozenset({node_id}), 7).encode())
    child.spawn()
    try:
        await child.ready(30)
    finally:
        child.kill_now()


@pytest.mark.parametrize(
    ("service", "replicas"),
    [
        ("storage", ""), ("storage", "a-0,a-1"), ("offsets", ""), ("offsets", "a-0,a-1"),
        ("lockmgr", ""), ("nameserver", ""),
    ],
)  # fmt: skip
async def test_process_that_waits_for_etcd_stops_at_once_on_sigterm(
    service: str, replicas: str, tmp_path: Path
) -> None:
    """Its etcd does not answer: it would wait without end."""
    ports = keep_ports(tmp_path / "ports.json", ["etcd", "health"])
    settings = {
        "ETCD": f"127.0.0.1:{ports['etcd']}",
        "NODE_ID": "a-0",
        "HEALTH_PORT": str(ports["health"]),
    }
    if service in ("storage", "offsets"):
        settings["DATA_DIR"] = str(tmp_path / "data")
    if replicas:
        settings |= {"REPLICAS": replicas, "BROKER" if service == "storage" else "REPLICA_SET": "a"}
    log = tmp_path / "log"
    child = ChildProcess(
        Program(
            name=service,
            command=[sys.executable, "-m", f"batonmq_server.{service}"],
            log_path=log,
            is_ready=_never,
            env={f"BATON_{service.upper()}_{name}": value for name, value in settings.items()},
            drop=("BATON_",),
        ),
        fork_server().start,
    )
    child.spawn()
    try:
        await until(lambda: log.exists() and "etcd: UNAVAILABLE" in log.read_text(), 30)
        async with asyncio.timeout(30):
            child.send(signal.SIGTERM)
            assert await child.ended() == 0
        assert "stopped" in child.last_lines(1)[0]
    finally:
        child.kill_now()


async def _never() -> bool:
    return False


async def _serves(channel: grpc.aio.Channel, service: str) -> bool:
    return await ask_health(channel, service=service, timeout_s=TIMEOUT_S) == SERVING


async def _listed(channel: grpc.aio.Channel) -> list[str]:
    """Services by reflection."""
    generated: Any = reflection_pb2_grpc
    stub = generated.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in stub.ServerReflectionInfo(iter([request]), timeout=TIMEOUT_S):
        return [service.name for service in answer.list_services_response.service]
    return []


async def _shows(metrics_address: str, sample: str) -> bool:
    return sample in await _metrics(metrics_address)


async def _metrics(address: str) -> str:
    return await asyncio.to_thread(_get, f"http://{address}/metrics")


def _get(url: str) -> str:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=TIMEOUT_S) as answer:
        text: bytes = answer.read()
    return text.decode()
