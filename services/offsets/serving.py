"""The service on what the disk has: table, group commit, servicer; for one epoch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import grpc.aio

from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq_server.offsets.arriving import Arriving, Origin
from batonmq_server.offsets.core.calls import Instant, Limits
from batonmq_server.offsets.core.changes import Entry
from batonmq_server.offsets.core.resets import Records, Resets
from batonmq_server.offsets.core.table import ProgressTable
from batonmq_server.offsets.group_commit import GroupCommit
from batonmq_server.offsets.here import Here
from batonmq_server.offsets.leaving import Keeping, Leaving
from batonmq_server.offsets.metrics import OffsetsMetrics
from batonmq_server.offsets.modes import Modes
from batonmq_server.offsets.persistence import (
    DurableKey,
    Stored,
    begin_life,
    entries_of,
    find_handovers,
    next_change,
    recover_meanwhile,
)
from batonmq_server.offsets.server import OffsetsServicer, Parts
from batonmq_server.offsets.stream import OffsetsStream
from batonmq_server.offsets.telemetry import Telemetry
from batonmq_server.runtime.etcd.mirror import EtcdMirror

Write = Callable[[Sequence[Entry]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all epochs of a process share."""

    limits: Limits
    clock: Clock
    metrics: OffsetsMetrics
    stream: OffsetsStream
    gates: EtcdMirror
    origin: Origin


@dataclass(frozen=True, slots=True)
class Offsets:
    """A service for one epoch; `commits.run` and `arriving.run` run beside it."""

    disk: Stored
    table: ProgressTable
    commits: GroupCommit[DurableKey]
    gates: EtcdMirror
    servicer: OffsetsServicer
    arriving: Arriving

    def add(self, server: grpc.aio.Server) -> None:
        """Add the servicer."""
        pb_grpc.add_OffsetsServiceServicer_to_server(self.servicer, server)


def alone(disk: Stored, around: Surroundings) -> Offsets:
    """The service of a node without followers, in an epoch of its own.

    Raises:
        DataLoss: what is stored can't be read.
    """
    changes, table, records = begin_life(disk, around.limits, _now(around.clock))

    async def write(entries: Sequence[Entry]) -> None:
        change = next_change(changes, table.epoch, entries)
        await disk.write(change.entries)
        changes.keep(change)

    return _serving(disk, (table, records), write, lambda: None, around)


async def elected(
    disk: Stored,
    epoch: int,
    write: Write,
    check_room: Callable[[], None],
    around: Surroundings,
) -> Offsets:
    """The service of a leader.

    Args:
        write: Makes entries durable, wherever they have to be.
        check_room: Raises if nothing may be changed at the moment.

    Raises:
        DataLoss: what is stored can't be read.
    """
    recovered = await recover_meanwhile(disk, around.limits, epoch, _now(around.clock))
    return _serving(disk, recovered, write, check_room, around)


def _serving(
    disk: Stored,
    recovered: tuple[ProgressTable, Records],
    write: Write,
    check_room: Callable[[], None],
    around: Surroundings,
) -> Offsets:
    (table, records), metrics = recovered, around.metrics

    async def timed(entries: Sequence[Entry]) -> None:
        with metrics.write_seconds.time():
            await write(entries)
        metrics.write_entries.inc(len(entries))

    commits: GroupCommit[DurableKey] = GroupCommit(timed, entries_of(table, records), check_room)
    metrics.show(table, lambda: commits.full is not None)
    keeping = Keeping(table=table, records=records, commits=commits, disk=disk)
    origin = around.origin
    parts = Parts(
        table=table,
        resets=Resets(table, records),
        commits=commits,
        clock=around.clock,
        modes=Modes(around.gates),
        telemetry=Telemetry(metrics, around.stream, table),
        handovers=partial(find_handovers, disk),
        here=Here(table, origin.offsets_set, origin.etcd, origin.places),
        leaving=Leaving(keeping),
        moving=keeping.moving,
    )
    arriving = Arriving(keeping, origin, around.clock)
    return Offsets(disk, table, commits, around.gates, OffsetsServicer(parts), arriving)


def _now(clock: Clock) -> Instant:
    return Instant(clock.monotonic_ms(), clock.unix_ms())
