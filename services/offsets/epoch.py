"""The service on what the disk has: table, group commit, servicer; for one epoch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import grpc.aio

from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq_server.offsets.core.change_log import Entry
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.resets import ResetExecutor, ResetHistory
from batonmq_server.offsets.core.values import Instant, QueueLimits
from batonmq_server.offsets.event_publisher import EventPublisher
from batonmq_server.offsets.group_commit import GroupCommit
from batonmq_server.offsets.group_exporter import EpochState, GroupExporter
from batonmq_server.offsets.group_importer import GroupImporter, PlacementDirectory
from batonmq_server.offsets.group_modes import GroupModes
from batonmq_server.offsets.metrics import OffsetsMetrics
from batonmq_server.offsets.persistence import (
    DurableKey,
    ProgressStore,
    entries_of,
    find_token_changes,
    next_change,
    recover_in_steps,
    recover_standalone,
)
from batonmq_server.offsets.placement_resolver import PlacementResolver
from batonmq_server.offsets.server import OffsetsServicer, Parts
from batonmq_server.offsets.telemetry import OffsetsTelemetry
from batonmq_server.runtime.mirror import Mirror

Write = Callable[[Sequence[Entry]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochContext:
    """What all epochs of a process share."""

    limits: QueueLimits
    clock: Clock
    metrics: OffsetsMetrics
    events: EventPublisher
    gates: Mirror
    directory: PlacementDirectory


@dataclass(frozen=True, slots=True)
class OffsetsEpoch:
    """A service for one epoch; `commits.run` and `importer.run` run beside it."""

    disk: ProgressStore
    table: ProgressTable
    commits: GroupCommit[DurableKey]
    gates: Mirror
    servicer: OffsetsServicer
    importer: GroupImporter

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        pb_grpc.add_OffsetsServiceServicer_to_server(self.servicer, server)


def standalone_epoch(disk: ProgressStore, context: EpochContext) -> OffsetsEpoch:
    """The service of a node without followers, in an epoch of its own.

    Raises:
        DataLoss: what is stored can't be read.
    """
    changes, table, records = recover_standalone(disk, context.limits, _now(context.clock))

    async def write(entries: Sequence[Entry]) -> None:
        change = next_change(changes, table.epoch, entries)
        await disk.write(change.entries)
        changes.append(change)

    return _serving(disk, (table, records), write, lambda: None, context)


async def leader_epoch(
    disk: ProgressStore,
    epoch: int,
    write: Write,
    check_room: Callable[[], None],
    context: EpochContext,
) -> OffsetsEpoch:
    """The service of a leader.

    Args:
        write: Makes entries durable, wherever they have to be.
        check_room: Raises if nothing may be changed at the moment.

    Raises:
        DataLoss: what is stored can't be read.
    """
    recovered = await recover_in_steps(disk, context.limits, epoch, _now(context.clock))
    return _serving(disk, recovered, write, check_room, context)


def _serving(
    disk: ProgressStore,
    recovered: tuple[ProgressTable, ResetHistory],
    write: Write,
    check_room: Callable[[], None],
    context: EpochContext,
) -> OffsetsEpoch:
    (table, records), metrics = recovered, context.metrics

    async def timed(entries: Sequence[Entry]) -> None:
        with metrics.write_seconds.time():
            await write(entries)
        metrics.write_entries.inc(len(entries))

    commits: GroupCommit[DurableKey] = GroupCommit(timed, entries_of(table, records), check_room)
    metrics.show(table, lambda: commits.full is not None)
    state = EpochState(table=table, records=records, commits=commits, disk=disk)
    directory = context.directory
    parts = Parts(
        table=table,
        resets=ResetExecutor(table, records),
        commits=commits,
        clock=context.clock,
        modes=GroupModes(context.gates),
        telemetry=OffsetsTelemetry(metrics, context.events, table),
        token_changes=partial(find_token_changes, disk),
        resolver=PlacementResolver(table, directory.offsets_set, directory.etcd, directory.places),
        exporter=GroupExporter(state),
        placement_lock=state.placement_lock,
    )
    importer = GroupImporter(state, directory, context.clock)
    return OffsetsEpoch(disk, table, commits, context.gates, OffsetsServicer(parts), importer)


def _now(clock: Clock) -> Instant:
    return Instant(clock.monotonic_ms(), clock.unix_ms())
