"""One epoch of the offsets service: table, group commit and servicer on the stored progress."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass

import grpc.aio

from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq_server.offsets.core.change_log import Entry
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.resets import ResetHistory
from batonmq_server.offsets.core.values import Instant, QueueLimits
from batonmq_server.offsets.epoch_state import EpochState
from batonmq_server.offsets.event_publisher import EventPublisher
from batonmq_server.offsets.group_commit import GroupCommit
from batonmq_server.offsets.group_exporter import GroupExporter
from batonmq_server.offsets.group_importer import GroupImporter, PlacementDirectory
from batonmq_server.offsets.group_modes import GroupModes
from batonmq_server.offsets.log_end_reader import LogEndReader, StorageStub
from batonmq_server.offsets.metrics import OffsetsMetrics
from batonmq_server.offsets.offsets_calls import ServicerParts
from batonmq_server.offsets.persistence import (
    DurableKey,
    ProgressStore,
    entries_of,
    next_change,
    recover_in_steps,
    recover_standalone,
)
from batonmq_server.offsets.placement_resolver import PlacementResolver
from batonmq_server.offsets.server import OffsetsServicer
from batonmq_server.offsets.telemetry import OffsetsTelemetry
from batonmq_server.offsets.tombstone_expiry import TombstoneExpiry
from batonmq_server.offsets.topic_queues import TopicQueues
from batonmq_server.runtime.etcd.mirror import EtcdMirror

Write = Callable[[Sequence[Entry]], Awaitable[None]]
"""Makes entries durable: on the own disk, or in the whole in-sync set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochContext:
    """The parts that all epochs of a process share.

    Attributes:
        gates: Mirror of the gates of the groups; its owner runs it.
        directory: The placements of groups, and the other replica sets.
        storage: The leaders of the brokers.
        settle_ms: See `LogEndReader`.
    """

    limits: QueueLimits
    clock: Clock
    metrics: OffsetsMetrics
    events: EventPublisher
    gates: EtcdMirror
    directory: PlacementDirectory
    storage: StorageStub
    settle_ms: int


@dataclass(frozen=True, slots=True)
class OffsetsEpoch:
    """The service for one epoch; its owner runs `commits.run` and all of `loops` as tasks."""

    disk: ProgressStore
    table: ProgressTable
    commits: GroupCommit[DurableKey]
    gates: EtcdMirror
    servicer: OffsetsServicer
    loops: Sequence[Callable[[], Coroutine[object, object, None]]]

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the servicer to a gRPC server."""
        pb_grpc.add_OffsetsServiceServicer_to_server(self.servicer, server)


def standalone_epoch(disk: ProgressStore, context: EpochContext) -> OffsetsEpoch:
    """Return the service of a node without followers, in a new epoch.

    Raises:
        DataLoss: a stored value can't be read.
    """
    changes, table, history = recover_standalone(disk, context.limits, _now(context.clock))

    async def write(entries: Sequence[Entry]) -> None:
        change = next_change(changes, table.epoch, entries)
        await disk.write(change.entries)
        changes.append(change)

    return _epoch_of(_state_of(disk, table, history, write, lambda: None, context), context)


async def leader_epoch(
    disk: ProgressStore,
    epoch: int,
    write: Write,
    check_room: Callable[[], None],
    context: EpochContext,
) -> OffsetsEpoch:
    """Return the service of an elected leader.

    Args:
        write: Returns when the entries are durable in the in-sync set.
        check_room: Raises if no change can be made at the moment.

    Raises:
        DataLoss: a stored value can't be read.
    """
    table, history = await recover_in_steps(disk, context.limits, epoch, _now(context.clock))
    return _epoch_of(_state_of(disk, table, history, write, check_room, context), context)


def _state_of(
    disk: ProgressStore,
    table: ProgressTable,
    history: ResetHistory,
    write: Write,
    check_room: Callable[[], None],
    context: EpochContext,
) -> EpochState:
    """Return the recovered state with a group commit that writes its changes."""
    commits: GroupCommit[DurableKey] = GroupCommit(
        _measured(write, context.metrics), entries_of(table, history), check_room
    )
    return EpochState(table=table, history=history, commits=commits, disk=disk)


def _measured(write: Write, metrics: OffsetsMetrics) -> Write:
    """Return `write` with its time and its entries counted."""

    async def measured(entries: Sequence[Entry]) -> None:
        with metrics.write_seconds.time():
            await write(entries)
        metrics.write_entries.inc(len(entries))

    return measured


def _epoch_of(state: EpochState, context: EpochContext) -> OffsetsEpoch:
    """Return the service on a state, and show the state in the metrics."""
    commits = state.commits
    context.metrics.show_table(state.table, lambda: commits.disk_full is not None)
    return OffsetsEpoch(
        state.disk,
        state.table,
        commits,
        context.gates,
        OffsetsServicer(_servicer_parts(state, context)),
        loops=[
            GroupImporter(state, context.directory, context.clock).run,
            LogEndReader(state.table, context.storage, context.clock, context.settle_ms).run,
            TombstoneExpiry(state, context.clock).run,
        ],
    )


def _servicer_parts(state: EpochState, context: EpochContext) -> ServicerParts:
    """Return the parts that the calls of the epoch work with."""
    directory = context.directory
    return ServicerParts(
        state=state,
        clock=context.clock,
        modes=GroupModes(context.gates),
        telemetry=OffsetsTelemetry(context.metrics, context.events, state.table),
        resolver=PlacementResolver(
            state.table, directory.offsets_set, directory.etcd, directory.placements
        ),
        queues=TopicQueues(directory.etcd),
        exporter=GroupExporter(state),
    )


def _now(clock: Clock) -> Instant:
    return Instant(clock.monotonic_ms(), clock.unix_ms())
