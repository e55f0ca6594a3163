"""Puts the lock manager together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as lockmgr_grpc
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from batonmq_server.lockmgr.access import RULES
from batonmq_server.lockmgr.candidate import Candidate
from batonmq_server.lockmgr.config import LockmgrSettings
from batonmq_server.lockmgr.membership import PREFIX as GROUPS
from batonmq_server.lockmgr.membership import Membership
from batonmq_server.lockmgr.offsets_client import OffsetsPeers
from batonmq_server.lockmgr.server import LockmgrServicer
from batonmq_server.runtime.app import App
from batonmq_server.runtime.etcd.mirror import EtcdMirror, all_ready
from batonmq_server.runtime.group_gates import GATES_PREFIX as GATES
from batonmq_server.runtime.group_placements import OFFSETS_SERVICE, GroupPlacements
from batonmq_server.runtime.group_placements import PLACEMENTS_PREFIX as PLACES
from batonmq_server.runtime.leader_channels import LeaderChannels
from batonmq_server.runtime.service_runtime import Runtime

SERVICE = "baton.lockmgr.v1.LockmgrService"


@asynccontextmanager
async def build(settings: LockmgrSettings, runtime: Runtime) -> AsyncIterator[App]:
    """The parts of a lock manager, for the runtime to run."""
    groups, gates = EtcdMirror(runtime.etcd, GROUPS), EtcdMirror(runtime.etcd, GATES)
    places = EtcdMirror(runtime.etcd, PLACES)
    peers: OffsetsPeers = LeaderChannels(
        runtime.nodes, OFFSETS_SERVICE, offsets_grpc.OffsetsServiceStub, runtime.connect
    )
    leader = Candidate(
        settings, runtime, Membership(groups, gates), peers, GroupPlacements(places, runtime.nodes)
    )
    servicer = LockmgrServicer(leader, runtime.clock, settings.hold_ms_max)
    try:
        yield App(
            servicers={
                SERVICE: lambda server: lockmgr_grpc.add_LockmgrServiceServicer_to_server(
                    servicer, server
                )
            },
            rules=RULES,
            leader=False,
            loops=[groups.run, gates.run, places.run, leader.run, leader.registration.run],
            long_polls=frozenset({"Acquire"}),
            caught_up=partial(all_ready, groups, gates, places),
            drain=leader.settle,
        )
    finally:
        await peers.close()
