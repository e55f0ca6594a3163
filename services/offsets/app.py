"""The offsets service put together: disk, table, group commit, servicer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import grpc.aio
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from prometheus_client import CollectorRegistry

from batonmq.common.clock import Clock
from services.offsets.config import OffsetsSettings
from services.offsets.core.calls import Instant, Limits
from services.offsets.core.resets import Resets
from services.offsets.core.table import ProgressTable
from services.offsets.disk import Disk, Entry
from services.offsets.group_commit import GroupCommit
from services.offsets.metrics import OffsetsMetrics
from services.offsets.modes import Modes
from services.offsets.persistence import DurableKey, Stored, entries_of, find_handovers, recover
from services.offsets.server import OffsetsServicer, Parts
from services.offsets.telemetry import Telemetry
from services.runtime.events import EventHub
from services.runtime.gates import PREFIX as GATES
from services.runtime.mirror import Mirror
from services.runtime.process import App, Runtime

SERVICE = "baton.offsets.v1.OffsetsService"


@dataclass(frozen=True, slots=True)
class Offsets:
    """A service ready to be added to a server; `commits.run` and `gates.run` run beside it."""

    disk: Stored
    table: ProgressTable
    commits: GroupCommit[DurableKey]
    gates: Mirror
    servicer: OffsetsServicer

    def add(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        pb_grpc.add_OffsetsServiceServicer_to_server(self.servicer, server)


def recovered(
    disk: Stored,
    limits: Limits,
    clock: Clock,
    registry: CollectorRegistry,
    hub: EventHub,
    gates: Mirror,
) -> Offsets:
    """The service on what `disk` has; nobody else uses it."""
    table, records = recover(disk, limits, Instant(clock.monotonic_ms(), clock.unix_ms()))
    metrics = OffsetsMetrics(registry, table, lambda: commits.full is not None)
    commits: GroupCommit[DurableKey] = GroupCommit(
        partial(_write, disk, metrics), entries_of(table, records)
    )
    parts = Parts(
        table=table,
        resets=Resets(table, records),
        commits=commits,
        clock=clock,
        modes=Modes(gates),
        telemetry=Telemetry(metrics, hub),
        handovers=partial(find_handovers, disk),
    )
    return Offsets(disk, table, commits, gates, OffsetsServicer(parts))


async def _write(disk: Stored, metrics: OffsetsMetrics, entries: Sequence[Entry]) -> None:
    with metrics.write_seconds.time():
        await disk.write(entries)
    metrics.write_entries.inc(len(entries))


@asynccontextmanager
async def build(settings: OffsetsSettings, runtime: Runtime) -> AsyncIterator[App]:
    """The app of the process."""
    gates = Mirror(runtime.etcd, GATES)
    with Disk(settings.data_dir, free_bytes_min=settings.disk_free_bytes_min) as disk:
        yield served(
            recovered(disk, settings.limits, runtime.clock, runtime.registry, runtime.hub, gates)
        )


def served(offsets: Offsets) -> App:
    """The app that serves `offsets`."""
    return App(
        servicers={SERVICE: offsets.add},
        loops=[offsets.commits.run, offsets.gates.run],
        epoch=offsets.table.epoch,
        drain=offsets.commits.drain,
    )
