"""Puts the offsets process together: a standalone node, or a node of a replica set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import cast

from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from baton.offsets.v1 import replication_service_pb2_grpc as replication_grpc
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq_server.offsets.access import RULES
from batonmq_server.offsets.config import OffsetsSettings
from batonmq_server.offsets.disk import LmdbDisk, set_aside_damage
from batonmq_server.offsets.epoch import EpochContext, OffsetsEpoch, leader_epoch, standalone_epoch
from batonmq_server.offsets.event_publisher import EventPublisher
from batonmq_server.offsets.follower import Follower, ReplicationChannel
from batonmq_server.offsets.group_importer import PlacementDirectory
from batonmq_server.offsets.leadership import OffsetsLeadership
from batonmq_server.offsets.metrics import OffsetsMetrics
from batonmq_server.offsets.persistence import ProgressStore, read_change_log
from batonmq_server.offsets.replica import OffsetsReplica
from batonmq_server.offsets.replication_server import ReplicationServicer
from batonmq_server.runtime.app import App
from batonmq_server.runtime.etcd.mirror import EtcdMirror, all_ready
from batonmq_server.runtime.group_gates import GATES_PREFIX as GATES
from batonmq_server.runtime.group_placements import OFFSETS_SERVICE
from batonmq_server.runtime.group_placements import PLACEMENTS_PREFIX as PLACES
from batonmq_server.runtime.leader_channels import LeaderChannel, LeaderChannels
from batonmq_server.runtime.replication.follow_problem import FollowProblem
from batonmq_server.runtime.replication.leader_servicer import LeaderServicer
from batonmq_server.runtime.replication.replica_set import check_single_node
from batonmq_server.runtime.service_runtime import Runtime

SERVICE = "baton.offsets.v1.OffsetsService"
STORAGE_SERVICE = "storage"
REPLICATION = "baton.offsets.v1.ReplicationService"


@asynccontextmanager
async def build(settings: OffsetsSettings, runtime: Runtime) -> AsyncIterator[App]:
    """Return the app of the process, on the disk in its data directory."""
    if len(settings.members) <= 1:
        await runtime.unless_stopped(
            check_single_node(runtime.etcd, "offsets", settings.replica_set, settings.node_id)
        )
    else:
        await asyncio.to_thread(set_aside_damage, settings.data_dir)
    with LmdbDisk(settings.data_dir, free_bytes_min=settings.disk_free_bytes_min) as disk:
        async with served(settings, runtime, disk) as app:
            yield replace(app, data_dir=settings.data_dir)


@asynccontextmanager
async def served(
    settings: OffsetsSettings,
    runtime: Runtime,
    disk: ProgressStore,
    opened: Callable[[OffsetsEpoch], None] = lambda _: None,
) -> AsyncIterator[App]:
    """Return the app that serves the progress on `disk`; the app alone uses the disk.

    Args:
        opened: Called with the service of each epoch before it answers a call.
    """
    async with AsyncExitStack() as stack:
        context = _context(settings, runtime, stack)
        if len(settings.members) <= 1:
            yield _standalone_app(settings, disk, context, opened)
        else:
            follower = _follower(settings, runtime, disk, context, stack)
            yield _replicated_app(settings, runtime, follower, context, opened)


def _context(settings: OffsetsSettings, runtime: Runtime, stack: AsyncExitStack) -> EpochContext:
    """Return the parts that all epochs of the process share; `stack` closes their channels."""
    other_sets: LeaderChannels[pb_grpc.OffsetsServiceAsyncStub] = LeaderChannels(
        runtime.nodes, OFFSETS_SERVICE, pb_grpc.OffsetsServiceStub, runtime.connect
    )
    stack.push_async_callback(other_sets.close)
    storage: LeaderChannels[storage_grpc.StorageServiceAsyncStub] = LeaderChannels(
        runtime.nodes, STORAGE_SERVICE, storage_grpc.StorageServiceStub, runtime.connect
    )
    stack.push_async_callback(storage.close)
    metrics = OffsetsMetrics(runtime.registry)
    metrics.replicas.set(len(settings.members))
    return EpochContext(
        limits=settings.limits,
        clock=runtime.clock,
        metrics=metrics,
        events=EventPublisher(runtime.hub),
        gates=EtcdMirror(runtime.etcd, GATES),
        directory=PlacementDirectory(
            settings.replica_set, runtime.etcd, EtcdMirror(runtime.etcd, PLACES), other_sets.stub
        ),
        storage=storage.stub,
        settle_ms=settings.leader_lease_ms if len(settings.members) > 1 else 0,
    )


def _follower(
    settings: OffsetsSettings,
    runtime: Runtime,
    disk: ProgressStore,
    context: EpochContext,
    stack: AsyncExitStack,
) -> Follower:
    """Return the node as a follower of its set; `stack` closes its channel to the leader."""
    leader: ReplicationChannel = LeaderChannel(
        runtime.nodes,
        OFFSETS_SERVICE,
        replication_grpc.ReplicationServiceStub,
        runtime.connect,
        replica_set=settings.replica_set,
    )
    stack.push_async_callback(leader.close)
    changes = read_change_log(disk, kept_bytes_max=settings.replica_kept_bytes_max)
    return Follower(disk, changes, leader, settings, runtime, FollowProblem(context.metrics.stuck))


def _standalone_app(
    settings: OffsetsSettings,
    disk: ProgressStore,
    context: EpochContext,
    opened: Callable[[OffsetsEpoch], None],
) -> App:
    """Return the app of a node without followers: it serves in one epoch until it stops."""
    offsets = standalone_epoch(disk, context)
    opened(offsets)
    return App(
        servicers={SERVICE: offsets.add_to},
        rules=RULES,
        loops=[
            offsets.commits.run,
            *offsets.loops,
            context.gates.run,
            context.directory.placements.run,
        ],
        epoch=offsets.table.epoch,
        replica_set=settings.replica_set,
        caught_up=partial(all_ready, context.gates, context.directory.placements),
        drain=offsets.commits.drain,
    )


def _replicated_app(
    settings: OffsetsSettings,
    runtime: Runtime,
    follower: Follower,
    context: EpochContext,
    opened: Callable[[OffsetsEpoch], None],
) -> App:
    """Return the app of a node of a replica set: leader or follower, as elections decide."""
    disk = follower.disk

    async def serve_epoch(leadership: OffsetsLeadership) -> OffsetsEpoch:
        offsets = await leader_epoch(
            disk, leadership.epoch, leadership.write, leadership.in_sync_set.check_size, context
        )
        opened(offsets)
        return offsets

    replica = OffsetsReplica(settings, runtime, follower, serve_epoch, context.metrics)
    front = cast(
        pb_grpc.OffsetsServiceServicer, LeaderServicer(replica, lambda: replica.offsets.servicer)
    )
    return App(
        servicers={
            SERVICE: partial(pb_grpc.add_OffsetsServiceServicer_to_server, front),
            REPLICATION: partial(
                replication_grpc.add_ReplicationServiceServicer_to_server,
                ReplicationServicer(replica, disk),
            ),
        },
        rules=RULES,
        loops=[
            replica.run,
            replica.registration.run,
            replica.siblings.run,
            follower.run,
            context.gates.run,
            context.directory.placements.run,
        ],
        long_polls=frozenset({"Fetch"}),
        leader=False,
        caught_up=replica.is_in_sync,
        resign=replica.resign,
    )
