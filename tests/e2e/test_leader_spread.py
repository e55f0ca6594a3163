"""Goal: leaders on one host are spread over two under load, and no message is lost or handled
twice.

Method: a real cluster of two brokers of two nodes, which listen at two addresses; the operator's
command as a process, while a producer and two consumers run.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from batonmq.admin.admin import Admin
from batonmq.admin.leader_spread import move_leader
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from batonmq_server.local.process_host import ProcessHost
from tests.e2e.leadership import in_sync
from tests.e2e.numbered_traffic import QUEUES, TOPIC, NumberedTraffic
from tests.e2e.test_drain import SLOW, STEP, baton
from tests.support.cluster import SEGMENT_BYTES, fork_server
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

BROKERS = ("broker-0", "broker-1")


async def leader_hosts(admin: Admin) -> Counter[str]:
    """Return the number of storage leaders by host."""
    nodes = [node for node in (await admin.cluster()).nodes if node.service == "storage"]
    return Counter(node.address.rpartition(":")[0] for node in nodes if node.leader)


async def gather(admin: Admin, host: str) -> None:
    """Make the nodes on one host the leaders of both brokers."""
    for broker in BROKERS:
        await in_sync(admin, "storage", broker)
    for node in (await admin.cluster()).nodes:
        if node.service == "storage" and node.address.startswith(f"{host}:"):
            assert await move_leader(admin, "storage", node.node_id, by="ops@host") == node.node_id

    async def gathered() -> bool:
        return await leader_hosts(admin) == {host: 2}

    await until(gathered)


@pytest.mark.long
async def test_leaders_are_spread_over_hosts_under_load(tmp_path: Path) -> None:
    second = ProcessHost(address="127.0.0.2")
    options = ClusterOptions(
        brokers=2,
        storage_replicas=2,
        etcd_fsync=False,
        auto_restart=False,
        settings={"storage": {"segment_bytes": SEGMENT_BYTES, **SLOW}},
        hosts={"storage-0-b": second, "storage-1-b": second},
    )
    async with (
        LocalCluster(tmp_path / "cluster", options, start=fork_server().start) as cluster,
        Admin(cluster.nameserver) as admin,
    ):
        await admin.create_topic(TOPIC, QUEUES)
        traffic = NumberedTraffic(cluster.nameserver)
        async with traffic.running("first", "second"):
            await traffic.proceed(STEP)
            await gather(admin, second.address)
            (planned,) = (await baton(cluster, "cluster", "spread-leaders", "--dry-run")).json
            assert (planned["state"], planned["from_host"]) == ("would move", second.address)
            assert await leader_hosts(admin) == {second.address: 2}, "a dry run changes nothing"
            (moved,) = (await baton(cluster, "cluster", "spread-leaders")).json
            assert moved == planned | {"state": "moved"}
            assert sorted((await leader_hosts(admin)).values()) == [1, 1]
            await traffic.proceed(STEP)
            assert (await baton(cluster, "cluster", "spread-leaders")).json == []
