"""The offsets service in this process: a real disk, a real server, a real channel.

The mirror of the gates does not follow etcd: a test adds the gates of its groups.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._telemetry.event_hub import EventHub
from batonmq_server.offsets.core.values import QueueLimits
from batonmq_server.offsets.disk import LmdbDisk
from batonmq_server.offsets.epoch import EpochContext, standalone_epoch
from batonmq_server.offsets.event_publisher import EventPublisher
from batonmq_server.offsets.metrics import OffsetsMetrics
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.group_gates import GATES_PREFIX
from tests.offsets.replica_cluster import ReplicaSet, replica_set
from tests.offsets.service_calls import Service, no_storage, single_set_directory
from tests.support.grpc_server import serving


@pytest.fixture
async def etcd(etcd_endpoint: str) -> AsyncIterator[EtcdSession]:
    """The keys of a cluster that no other test uses."""
    async with EtcdSession(etcd_endpoint, f"test-{secrets.token_hex(8)}", Clock()) as session:
        yield session


@pytest.fixture
async def service(tmp_path: Path, etcd: EtcdSession) -> AsyncIterator[Service]:
    clock, registry = Clock(), CollectorRegistry()
    hub = EventHub("offsets/offsets-0", 1, clock)
    limits = QueueLimits(ack_ranges_max=1_000)
    gates = EtcdMirror(etcd, GATES_PREFIX)
    with LmdbDisk(tmp_path) as disk:
        offsets = standalone_epoch(
            disk,
            EpochContext(
                limits=limits,
                clock=clock,
                metrics=OffsetsMetrics(registry),
                events=EventPublisher(hub),
                gates=gates,
                directory=single_set_directory(etcd),
                storage=no_storage,
                settle_ms=0,
            ),
        )
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(offsets.commits.run())
            async with serving(offsets.add_to) as channel:
                yield Service(pb_grpc.OffsetsServiceStub(channel), offsets, hub, registry)
            writer.cancel()


@pytest.fixture
async def scene(etcd_endpoint: str, tmp_path: Path) -> AsyncIterator[ReplicaSet]:
    """A replica set in a cluster of its own, without nodes."""
    async with replica_set(etcd_endpoint, f"test-{secrets.token_hex(8)}", tmp_path) as opened:
        yield opened
