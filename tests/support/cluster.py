"""A real cluster for end-to-end tests: real etcd, real service processes, loopback ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from batonmq_server.local.cluster import LocalCluster, to_stderr
from batonmq_server.local.fork_server import ForkServer
from batonmq_server.local.layout import ClusterOptions, highly_available

SEGMENT_BYTES = 16 * 1024 * 1024
"""Segments are preallocated: with the default of 1 GiB a test run would fill a small disk."""
REPO = Path(__file__).resolve().parents[2]
PROGRAMS = (
    "batonmq_server.gateway",
    "batonmq_server.lockmgr",
    "batonmq_server.nameserver",
    "batonmq_server.offsets",
    "batonmq_server.storage",
    "tests.support.member",
)


@cache
def fork_server() -> ForkServer:
    """Return the fork server of this pytest process."""
    return ForkServer(PROGRAMS, REPO)


@asynccontextmanager
async def local_cluster(
    data_dir: Path,
    *,
    etcd: str = "",
    cluster: str = "baton",
    brokers: int = 1,
    offsets_sets: int = 1,
    storage_replicas: int = 1,
    gateways: int = 0,
    available: bool = False,
    secure: bool = False,
    auto_restart: bool = True,
    report: Callable[[str], None] = to_stderr,
    **settings: Mapping[str, object],
) -> AsyncIterator[LocalCluster]:
    """Start a cluster, whose etcd does not wait for the disk; stop it at the end of the block.

    Use it in the body of a test, not in a fixture: it belongs to the task that enters it.

    Args:
        data_dir: A cluster on the same directory later has the same messages and addresses.
        etcd: host:port of an etcd to share; each cluster needs a name of its own.
        brokers: Storage nodes: `storage`, `storage-1` and so on.
        offsets_sets: `offsets`, `offsets-b` and so on.
        storage_replicas: Nodes of each broker.
        gateways: Gateways for clients of RocketMQ 5.
        available: Whether to start enough processes to lose one of each service and of etcd.
        secure: Whether all connections use mutual TLS.
        settings: By service, such as `storage={"segment_bytes": 65536}`.
    """
    settings["storage"] = {"segment_bytes": SEGMENT_BYTES} | dict(settings.get("storage", {}))
    options = ClusterOptions(
        cluster=cluster,
        etcd=etcd,
        etcd_fsync=False,
        brokers=brokers,
        offsets_sets=offsets_sets,
        storage_replicas=storage_replicas,
        gateways=gateways,
        secure=secure,
        settings=settings,
        auto_restart=auto_restart,
    )
    if available:
        options = highly_available(options)
    async with LocalCluster(data_dir, options, report, fork_server().start) as running:
        yield running
