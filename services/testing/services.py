"""The four services for the simulation: as in production, but with disks in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from batonmq_server.lockmgr import app as lockmgr_app
from batonmq_server.lockmgr.config import LockmgrSettings
from batonmq_server.nameserver import app as nameserver_app
from batonmq_server.nameserver.config import NameserverSettings
from batonmq_server.offsets import app as offsets_app
from batonmq_server.offsets.config import OffsetsSettings
from batonmq_server.runtime.app import App
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.storage import app as storage_app
from batonmq_server.storage.config import StorageSettings
from batonmq_server.storage.node import recover_directory
from batonmq_server.storage.tier_reader import open_tier
from batonmq_server.testing.memory_disks import MemoryDisk, delayed_sync
from batonmq_server.testing.processes import MemoryEnvironment, ServiceSpec

_SEGMENT_BYTES = 8 * 1024 * 1024
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "nameserver": {
        "inspect_interval_ms": 60_000,
        "shrink_interval_ms": 10_000,
        "etcd_check_interval_ms": 3_600_000,
    },
    "lockmgr": {},
    "offsets": {"data_dir": Path("in-memory")},
    "storage": {
        "segment_bytes": _SEGMENT_BYTES,
        "retention_ms": 0,
        "disk_interval_ms": 60_000,
        "scrub_bytes_per_s": 0,
    },
}
"""Settings that differ from the defaults: no message is deleted, and housekeeping is rare, because
each of its timers is a step in virtual time."""
_NODE_LEASE_MS = 60_000


def cluster(
    environment: MemoryEnvironment,
    brokers: Sequence[str],
    settings: Mapping[str, Mapping[str, object]],
) -> list[ServiceSpec]:
    """Return one instance of each service, and all brokers, in the order of their start.

    They publish no metrics unless `settings` says so, so that an idle cluster has no timers.

    Args:
        settings: Settings by service, in addition to `SETTINGS`.
    """

    def of(service: str) -> dict[str, Any]:
        common = {"node_lease_ms": _NODE_LEASE_MS, "metrics_stream": False}
        return {**common, **SETTINGS[service], **settings.get(service, {})}

    return [
        nameserver(NameserverSettings(**of("nameserver"))),
        offsets(environment, OffsetsSettings(**of("offsets"))),
        *(storage(environment, StorageSettings(**of("storage"), node_id=one)) for one in brokers),
        lockmgr(LockmgrSettings(**of("lockmgr"))),
    ]


def nameserver(settings: NameserverSettings) -> ServiceSpec:
    """Return the specification of a nameserver."""
    return ServiceSpec(settings.node_id, "nameserver", settings, nameserver_app.build)


def lockmgr(settings: LockmgrSettings) -> ServiceSpec:
    """Return the specification of a lock manager."""
    return ServiceSpec(settings.node_id, "lockmgr", settings, lockmgr_app.build)


def offsets(environment: MemoryEnvironment, settings: OffsetsSettings) -> ServiceSpec:
    """Return the specification of an offsets node, on its disk in the environment."""

    @asynccontextmanager
    async def build(settings: OffsetsSettings, runtime: Runtime) -> AsyncIterator[App]:
        disk = environment.offsets_disk_of(settings.node_id)
        async with offsets_app.served(settings, runtime, disk, environment.offsets_opened) as app:
            yield app

    return ServiceSpec(settings.node_id, "offsets", settings, build)


def storage(environment: MemoryEnvironment, settings: StorageSettings) -> ServiceSpec:
    """Return the specification of a storage node, on its disk in the environment."""

    @asynccontextmanager
    async def build(settings: StorageSettings, runtime: Runtime) -> AsyncIterator[App]:
        disk = environment.storage_disks.setdefault(settings.node_id, MemoryDisk())
        in_no_thread = delayed_sync(runtime.random, environment.write_s)
        opened = partial(environment.storage_opened, settings.node_id)
        if len(settings.members) > 1:
            async with storage_app.replicated(
                settings, runtime, disk, in_no_thread, opened, environment.objects
            ) as app:
                yield app
            return
        tier = open_tier(settings, in_no_thread, environment.objects)
        recovering = recover_directory(
            disk,
            segment_bytes=settings.segment_bytes,
            monotonic_ms=runtime.clock.monotonic_ms,
            remote=tier,
        )
        with recovering as node:
            opened(node)
            async with storage_app.served(settings, runtime, node, in_no_thread, tier) as app:
                yield app

    return ServiceSpec(settings.node_id, "storage", settings, build)
