"""The offsets service put together: a standalone node, or a node of a replica set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from baton.offsets.v1 import replication_service_pb2_grpc as replication_grpc
from batonmq_server.offsets.access import RULES
from batonmq_server.offsets.config import OffsetsSettings
from batonmq_server.offsets.disk import Disk, set_aside_damage
from batonmq_server.offsets.epoch import EpochContext, OffsetsEpoch, leader_epoch, standalone_epoch
from batonmq_server.offsets.event_publisher import EventPublisher
from batonmq_server.offsets.follower import Follower, ReplicationPeer
from batonmq_server.offsets.group_importer import PlacementDirectory
from batonmq_server.offsets.leadership import Leadership
from batonmq_server.offsets.metrics import OffsetsMetrics
from batonmq_server.offsets.persistence import ProgressStore, read_change_log
from batonmq_server.offsets.replication_server import ReplicationServicer
from batonmq_server.offsets.role import Role
from batonmq_server.runtime.gates import PREFIX as GATES
from batonmq_server.runtime.mirror import Mirror, all_ready
from batonmq_server.runtime.peers import Peer, Peers
from batonmq_server.runtime.places import OFFSETS
from batonmq_server.runtime.places import PREFIX as PLACES
from batonmq_server.runtime.process import App, Runtime
from batonmq_server.runtime.replicas import check_alone
from batonmq_server.runtime.role import WhileLeader
from batonmq_server.runtime.stuck import Stuck

SERVICE = "baton.offsets.v1.OffsetsService"
REPLICATION = "baton.offsets.v1.ReplicationService"


@asynccontextmanager
async def build(settings: OffsetsSettings, runtime: Runtime) -> AsyncIterator[App]:
    """The app of the process."""
    if len(settings.members) <= 1:
        await runtime.patiently(
            check_alone(runtime.etcd, "offsets", settings.replica_set, settings.node_id)
        )
    else:
        await asyncio.to_thread(set_aside_damage, settings.data_dir)
    with Disk(settings.data_dir, free_bytes_min=settings.disk_free_bytes_min) as disk:
        async with served(settings, runtime, disk) as app:
            yield app


@asynccontextmanager
async def served(
    settings: OffsetsSettings,
    runtime: Runtime,
    disk: ProgressStore,
    opened: Callable[[OffsetsEpoch], None] = lambda _: None,
) -> AsyncIterator[App]:
    """The app that serves what `disk` has; nobody else uses it.

    Args:
        opened: Told of the service of each epoch, before anything is answered.
    """
    others: Peers[pb_grpc.OffsetsServiceAsyncStub] = Peers(
        runtime.nodes, OFFSETS, pb_grpc.OffsetsServiceStub, runtime.connect
    )
    places = Mirror(runtime.etcd, PLACES)
    metrics = OffsetsMetrics(runtime.registry)
    metrics.replicas.set(len(settings.members))
    context = EpochContext(
        limits=settings.limits,
        clock=runtime.clock,
        metrics=metrics,
        events=EventPublisher(runtime.hub),
        gates=Mirror(runtime.etcd, GATES),
        directory=PlacementDirectory(settings.replica_set, runtime.etcd, places, others.stub),
    )
    peer: ReplicationPeer = Peer(
        runtime.nodes,
        OFFSETS,
        replication_grpc.ReplicationServiceStub,
        runtime.connect,
        replica_set=settings.replica_set,
    )
    try:
        if len(settings.members) <= 1:
            yield _alone(settings, disk, context, opened)
        else:
            changes = read_change_log(disk, kept_bytes_max=settings.replica_kept_bytes_max)
            stuck = Stuck(context.metrics.stuck)
            following = Follower(disk, changes, peer, settings, runtime, stuck)
            yield _replicated(settings, runtime, following, context, opened)
    finally:
        await peer.close()
        await others.close()


def _alone(
    settings: OffsetsSettings,
    disk: ProgressStore,
    context: EpochContext,
    opened: Callable[[OffsetsEpoch], None],
) -> App:
    """A node without followers: it serves from its start to its end."""
    offsets = standalone_epoch(disk, context)
    opened(offsets)
    return App(
        servicers={SERVICE: offsets.add_to},
        rules=RULES,
        loops=[
            offsets.commits.run,
            offsets.importer.run,
            context.gates.run,
            context.directory.places.run,
        ],
        epoch=offsets.table.epoch,
        replica_set=settings.replica_set,
        caught_up=partial(all_ready, context.gates, context.directory.places),
        drain=offsets.commits.drain,
    )


def _replicated(
    settings: OffsetsSettings,
    runtime: Runtime,
    following: Follower,
    context: EpochContext,
    opened: Callable[[OffsetsEpoch], None],
) -> App:
    """A node that is leader at times, and follower at others."""
    disk = following.disk

    async def serve_epoch(leadership: Leadership) -> OffsetsEpoch:
        offsets = await leader_epoch(
            disk, leadership.epoch, leadership.write, leadership.keeper.check_room, context
        )
        opened(offsets)
        return offsets

    role = Role(settings, runtime, following, serve_epoch, context.metrics)
    front = cast(pb_grpc.OffsetsServiceServicer, WhileLeader(role, lambda: role.offsets.servicer))
    return App(
        servicers={
            SERVICE: partial(pb_grpc.add_OffsetsServiceServicer_to_server, front),
            REPLICATION: partial(
                replication_grpc.add_ReplicationServiceServicer_to_server,
                ReplicationServicer(role, disk),
            ),
        },
        rules=RULES,
        loops=[
            role.run,
            role.member.registration.run,
            following.run,
            context.gates.run,
            context.directory.places.run,
        ],
        held=frozenset({"Fetch"}),
        leader=False,
        caught_up=role.member.in_sync,
        leave=role.member.leave,
    )
