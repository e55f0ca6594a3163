"""Goal: a cluster is upgraded node by node under load, and no message is lost or handled twice, by
clients of this version and of the earlier one.

Method: the previous commit's wheels against this tree; BATON_UPGRADE_REVISION names another commit.
The processes of storage, or of all services that BATON_UPGRADE_SERVICES names, start with the
earlier version, and are stopped and started with this one in the order of
docs/how-to/rolling-upgrade.md, leaders after a drain.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batonmq.admin.admin import Admin
from batonmq.admin.drains import drain_node, next_leader, undrain_node
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from batonmq_server.local.process_host import ProcessHost
from tests.e2e.earlier_version import UPGRADE, earlier_version
from tests.e2e.leadership import in_sync, leader
from tests.e2e.numbered_traffic import QUEUES, TOPIC, NumberedTraffic
from tests.support.cluster import SEGMENT_BYTES
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

STEP = 200
SLOW = {"replica_lag_ms_max": 10_000}
ORDER = ("nameserver", "lockmgr", "offsets", "storage")
SETS = {"offsets": "offsets", "storage": "broker-0"}
CLIENT = Path(__file__).with_name("earlier_client.py")
EARLIER_TOPIC = "earlier"


def with_version(version: Path) -> tuple[str, ...]:
    """Return the command of a Python that finds packages in a folder first."""
    return ("/usr/bin/env", f"PYTHONPATH={version}", sys.executable)


class Versions:
    """The version of each process: a link that its PYTHONPATH names."""

    def __init__(self, folder: Path, site: Path, names: tuple[str, ...]) -> None:
        self._folder, self._none = folder, folder / "none"
        self._none.mkdir(parents=True)
        for name in names:
            (folder / name).symlink_to(site)

    def hosts(self, names: tuple[str, ...]) -> dict[str, ProcessHost]:
        """Return what starts each process with its version."""
        return {
            name: ProcessHost(launcher=with_version(self._folder / name)[:-1]) for name in names
        }

    def upgrade(self, name: str) -> None:
        """Start a process with this version from now on."""
        (self._folder / name).unlink()
        (self._folder / name).symlink_to(self._none)


def package(version: Path) -> str:
    """Return where Python finds the services with this PYTHONPATH."""
    return subprocess.run(
        [*with_version(version), "-c", "import batonmq_server; print(batonmq_server.__file__)"],
        cwd=version,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


class EarlierClient:
    """A producer and a consumer of the earlier version, in a process."""

    def __init__(self, site: Path, nameserver: str) -> None:
        self._site, self._nameserver = site, nameserver
        self.handled_count = 0
        self.result: dict[str, Any] = {}

    async def run(self, ends: asyncio.Event) -> None:
        """Run the client until the event, and until it has handled what it sent."""
        process = await asyncio.create_subprocess_exec(
            *with_version(self._site),
            *(str(CLIENT), self._nameserver, EARLIER_TOPIC, "earlier-readers"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            limit=16 * 1024 * 1024,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_close_after(ends, process.stdin))
            async for line in process.stdout:
                self.result = json.loads(line)
                if "sent" not in self.result:
                    self.handled_count = self.result["handled"]
        assert await process.wait() == 0

    def check(self) -> None:
        """Assert that the earlier package ran, and each number was handled once."""
        assert self.result["package"].startswith(str(self._site))
        assert self.result["handled"] == list(range(self.result["sent"])), "lost or handled twice"


async def _close_after(ends: asyncio.Event, writer: asyncio.StreamWriter) -> None:
    await ends.wait()
    writer.close()


async def upgrade(cluster: LocalCluster, versions: Versions, name: str) -> None:
    """Stop a process with SIGTERM, and start it with this version."""
    await cluster.stop(name)
    versions.upgrade(name)
    await cluster.start(name)


async def upgrade_set(
    admin: Admin, cluster: LocalCluster, versions: Versions, service: str
) -> None:
    """Upgrade the followers of a set, then its leader after a drain."""
    replica_set = SETS[service]
    await in_sync(admin, service, replica_set)
    leading = await leader(admin, cluster, service, broker=replica_set)
    for name in cluster.options.names_of(service):
        if name != leading:
            await upgrade(cluster, versions, name)
            await in_sync(admin, service, replica_set)
    (node_id,) = [
        node.node_id
        for node in (await admin.cluster()).nodes
        if (node.service, node.leader) == (service, True)
    ]
    await drain_node(admin, service, node_id, by="ops@host")
    assert await next_leader(admin, service, replica_set, node_id, timeout_s=60)
    await upgrade(cluster, versions, leading)
    await in_sync(admin, service, replica_set)
    await undrain_node(admin, service, node_id)


@pytest.mark.long
async def test_cluster_is_upgraded_node_by_node_under_load(tmp_path: Path) -> None:
    site = earlier_version()
    services = [one for one in ORDER if one in UPGRADE.services.split(",")]
    plain: dict[str, Any] = {"storage_replicas": 2, "offsets": 3 if "offsets" in services else 1}
    names = tuple(one.name for one in ClusterOptions(**plain).instances if one.service in services)
    versions = Versions(tmp_path / "versions", site, names)
    options = ClusterOptions(
        **plain,
        etcd_fsync=False,
        auto_restart=False,
        settings={"storage": {"segment_bytes": SEGMENT_BYTES, **SLOW}, "offsets": SLOW},
        hosts=versions.hosts(names),
    )
    assert package(tmp_path / "versions" / names[0]).startswith(str(site.resolve()))
    async with (
        LocalCluster(tmp_path / "cluster", options) as cluster,
        Admin(cluster.nameserver) as admin,
    ):
        for topic in (TOPIC, EARLIER_TOPIC):
            await admin.create_topic(topic, QUEUES)
        traffic, ends = NumberedTraffic(cluster.nameserver), asyncio.Event()
        client = EarlierClient(site, cluster.nameserver)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.run(ends))
            async with traffic.running("first", "second"):
                await traffic.proceed(STEP)
                for service in services:
                    if service in SETS:
                        await upgrade_set(admin, cluster, versions, service)
                    for name in () if service in SETS else cluster.options.names_of(service):
                        await upgrade(cluster, versions, name)
                    await traffic.proceed(STEP)
                count = client.handled_count
                await until(lambda: client.handled_count > count, timeout_s=60)
            ends.set()
        client.check()
        assert package(tmp_path / "versions" / names[0]).startswith(str(Path.cwd()))
