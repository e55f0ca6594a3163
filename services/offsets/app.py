"""The offsets service put together: disk, table, group commit, servicer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc

from services.offsets.config import OffsetsSettings
from services.offsets.core.calls import Instant
from services.offsets.disk import Disk, Entry
from services.offsets.group_commit import GroupCommit
from services.offsets.metrics import OffsetsMetrics
from services.offsets.persistence import DurableKey, entry_of, recover
from services.offsets.server import OffsetsServicer, Parts
from services.runtime.process import App, Runtime

SERVICE = "baton.offsets.v1.OffsetsService"


@asynccontextmanager
async def build(settings: OffsetsSettings, runtime: Runtime) -> AsyncIterator[App]:
    """Recover the progress and serve it until the block ends."""
    clock = runtime.clock
    with Disk(settings.data_dir) as disk:
        now = Instant(clock.monotonic_ms(), clock.unix_ms())
        table = recover(disk, settings.limits, now)
        metrics = OffsetsMetrics(runtime.registry, table)

        async def write(entries: Sequence[Entry]) -> None:
            with metrics.write_seconds.time():
                await disk.write(entries)
            metrics.write_entries.inc(len(entries))

        commits: GroupCommit[DurableKey] = GroupCommit(write, entry_of(table))
        servicer = OffsetsServicer(
            Parts(table=table, commits=commits, clock=clock, metrics=metrics, hub=runtime.hub)
        )
        add = partial(pb_grpc.add_OffsetsServiceServicer_to_server, servicer)
        yield App(servicers={SERVICE: add}, loops=[commits.run], drain=commits.settled_all)
