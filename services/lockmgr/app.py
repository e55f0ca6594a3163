"""Builds the lock manager from its parts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as lockmgr_grpc
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from batonmq_server.lockmgr.access import RULES
from batonmq_server.lockmgr.candidate import Candidate
from batonmq_server.lockmgr.config import LockmgrSettings
from batonmq_server.lockmgr.group_membership import GroupMembership
from batonmq_server.lockmgr.offsets_client import OffsetsChannels
from batonmq_server.lockmgr.server import LockmgrServicer
from batonmq_server.runtime.app import App
from batonmq_server.runtime.etcd.mirror import EtcdMirror, all_ready
from batonmq_server.runtime.group_gates import GATES_PREFIX
from batonmq_server.runtime.group_placements import (
    OFFSETS_SERVICE,
    PLACEMENTS_PREFIX,
    GroupPlacements,
)
from batonmq_server.runtime.group_records import GroupRecords
from batonmq_server.runtime.leader_channels import LeaderChannels
from batonmq_server.runtime.service_runtime import Runtime

SERVICE = "baton.lockmgr.v1.LockmgrService"


@asynccontextmanager
async def build(settings: LockmgrSettings, runtime: Runtime) -> AsyncIterator[App]:
    """Yield a lock manager, ready to be run by the runtime."""
    groups, gates = GroupRecords(runtime.etcd), EtcdMirror(runtime.etcd, GATES_PREFIX)
    placements = EtcdMirror(runtime.etcd, PLACEMENTS_PREFIX)
    channels: OffsetsChannels = LeaderChannels(
        runtime.nodes, OFFSETS_SERVICE, offsets_grpc.OffsetsServiceStub, runtime.connect
    )
    candidate = Candidate(
        settings,
        runtime,
        GroupMembership(groups, gates),
        channels,
        GroupPlacements(placements, runtime.nodes),
    )
    servicer = LockmgrServicer(candidate, runtime.clock, settings.hold_ms_max)
    try:
        yield App(
            servicers={
                SERVICE: lambda server: lockmgr_grpc.add_LockmgrServiceServicer_to_server(
                    servicer, server
                )
            },
            rules=RULES,
            leader=False,
            loops=[
                groups.mirror.run,
                gates.run,
                placements.run,
                candidate.run,
                candidate.registration.run,
                candidate.siblings.run,
            ],
            long_polls=frozenset({"Acquire"}),
            caught_up=partial(all_ready, groups.mirror, gates, placements),
            drain=candidate.wait_for_changes,
        )
    finally:
        await channels.close()
