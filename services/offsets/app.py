"""The offsets service put together: disk, table, group commit, servicer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc.aio
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from prometheus_client import CollectorRegistry

from batonmq.common.clock import Clock
from services.offsets.config import OffsetsSettings
from services.offsets.core.calls import Instant, Limits
from services.offsets.core.table import ProgressTable
from services.offsets.disk import Disk, Entry
from services.offsets.group_commit import GroupCommit
from services.offsets.metrics import OffsetsMetrics
from services.offsets.persistence import DurableKey, Stored, entry_of, recover
from services.offsets.server import OffsetsServicer, Parts
from services.runtime.events import EventHub
from services.runtime.process import App, Runtime

SERVICE = "baton.offsets.v1.OffsetsService"


@dataclass(frozen=True, slots=True)
class Offsets:
    """A service ready to be added to a server; `commits.run` has to run beside it."""

    disk: Stored
    table: ProgressTable
    commits: GroupCommit[DurableKey]
    servicer: OffsetsServicer

    def add(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        pb_grpc.add_OffsetsServiceServicer_to_server(self.servicer, server)


@contextmanager
def opened(
    folder: Path, limits: Limits, clock: Clock, registry: CollectorRegistry, hub: EventHub
) -> Iterator[Offsets]:
    """Recover what is in `folder`; the block may use it, and nobody else."""
    with Disk(folder) as disk:
        yield recovered(disk, limits, clock, registry, hub)


def recovered(
    disk: Stored, limits: Limits, clock: Clock, registry: CollectorRegistry, hub: EventHub
) -> Offsets:
    """The service on what `disk` has; nobody else uses it."""
    table = recover(disk, limits, Instant(clock.monotonic_ms(), clock.unix_ms()))
    metrics = OffsetsMetrics(registry, table)
    commits: GroupCommit[DurableKey] = GroupCommit(partial(_write, disk, metrics), entry_of(table))
    parts = Parts(table=table, commits=commits, clock=clock, metrics=metrics, hub=hub)
    return Offsets(disk, table, commits, OffsetsServicer(parts))


async def _write(disk: Stored, metrics: OffsetsMetrics, entries: Sequence[Entry]) -> None:
    with metrics.write_seconds.time():
        await disk.write(entries)
    metrics.write_entries.inc(len(entries))


@asynccontextmanager
async def build(settings: OffsetsSettings, runtime: Runtime) -> AsyncIterator[App]:
    """The app of the process."""
    with opened(
        settings.data_dir, settings.limits, runtime.clock, runtime.registry, runtime.hub
    ) as offsets:
        yield served(offsets)


def served(offsets: Offsets) -> App:
    """The app that serves `offsets`."""
    return App(
        servicers={SERVICE: offsets.add},
        loops=[offsets.commits.run],
        epoch=offsets.table.epoch,
        drain=offsets.commits.settled_all,
    )
