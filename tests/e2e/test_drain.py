"""Goal: a node is drained, restarted and undrained under load, and no message is lost or handled
twice; the command refuses what would stop the set.

Method: a real cluster of a broker of two nodes and three offsets; one producer and two consumers
that run throughout; the operator's commands as processes.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from batonmq.admin.admin import Admin
from batonmq.admin.drains import drain_node, undrain_node
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from tests.cli.baton import BATON, CommandResult
from tests.e2e.leadership import in_sync, leader
from tests.e2e.numbered_traffic import QUEUES, TOPIC, NumberedTraffic
from tests.support.cluster import SEGMENT_BYTES, fork_server
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

STEP = 300
SLOW = {"replica_lag_ms_max": 10_000}
"""A slow machine must not remove the only possible successor from the in-sync set."""


async def baton(cluster: LocalCluster, *words: str) -> CommandResult:
    process = await asyncio.create_subprocess_exec(
        *BATON,
        *("--nameserver", cluster.nameserver, "--format", "json"),
        *words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await process.communicate()
    return CommandResult(process.returncode or 0, out.decode(), err.decode())


async def node_id_of_leader(admin: Admin, service: str) -> str:
    """Return the node id of the only leader of a service."""
    leaders: list[str] = []

    async def look() -> bool:
        nodes = (await admin.cluster()).nodes
        leaders[:] = [one.node_id for one in nodes if one.service == service and one.leader]
        return len(leaders) == 1

    await until(look, timeout_s=60)
    return leaders[0]


async def maintain(
    admin: Admin, cluster: LocalCluster, traffic: NumberedTraffic, service: str, broker: str
) -> None:
    """Drain the leader, restart it, check that it does not lead, and undrain it."""
    await in_sync(admin, service, broker)
    process = await leader(admin, cluster, service, broker=broker)
    node_id = await node_id_of_leader(admin, service)
    planned = await drain_node(admin, service, node_id)
    assert await node_id_of_leader(admin, service) == node_id, "a dry run changes nothing"
    (done,) = (await baton(cluster, "cluster", "drain", node_id)).json
    assert done["state"] == "drained"
    assert done["leader_id"] in planned.successors
    await traffic.proceed(STEP)
    await cluster.stop(process)
    await traffic.proceed(STEP)
    assert [one.node_id for one in (await admin.cluster()).drained] == [node_id]
    await cluster.start(process)
    await in_sync(admin, service, broker)
    await traffic.proceed(STEP)
    assert await node_id_of_leader(admin, service) == done["leader_id"]
    (undrained,) = (await baton(cluster, "cluster", "undrain", node_id)).json
    assert undrained["state"] == "undrained"


async def check_refusals(admin: Admin, cluster: LocalCluster) -> None:
    """Check that the command refuses the last node of a set, and services without copies."""
    first, second = sorted(
        node.node_id for node in (await admin.cluster()).nodes if node.service == "storage"
    )
    (shown,) = (await baton(cluster, "cluster", "drain", first, "--dry-run")).json
    assert (shown["state"], shown["successors"]) == ("would be drained", [second])
    await drain_node(admin, "storage", first, by="ops@host")
    refused = await baton(cluster, "cluster", "drain", second)
    assert (refused.code, "NOT_DRAINABLE" in refused.err) == (1, True)
    nodes = (await baton(cluster, "cluster", "status")).json["nodes"]
    assert [one["node_id"] for one in nodes if one["drained"]] == [first]
    await undrain_node(admin, "storage", first)
    lockmgr = await node_id_of_leader(admin, "lockmgr")
    refused = await baton(cluster, "cluster", "drain", lockmgr)
    assert refused.code == 1
    assert "a node of lockmgr is not drained: it keeps its state in etcd" in refused.err


@pytest.mark.long
async def test_node_is_drained_restarted_and_undrained_under_load(tmp_path: Path) -> None:
    options = ClusterOptions(
        storage_replicas=2,
        offsets=3,
        etcd_fsync=False,
        auto_restart=False,
        settings={"storage": {"segment_bytes": SEGMENT_BYTES, **SLOW}, "offsets": SLOW},
    )
    async with (
        LocalCluster(tmp_path / "cluster", options, start=fork_server().start) as cluster,
        Admin(cluster.nameserver) as admin,
    ):
        await admin.create_topic(TOPIC, QUEUES)
        traffic = NumberedTraffic(cluster.nameserver)
        async with traffic.running("first", "second"):
            await traffic.proceed(STEP)
            await maintain(admin, cluster, traffic, "storage", "broker-0")
            await maintain(admin, cluster, traffic, "offsets", "")
            await traffic.proceed(STEP)
            await check_refusals(admin, cluster)
