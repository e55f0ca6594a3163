"""The offsets service on a disk, as an epoch without replicas and behind a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._telemetry.event_hub import EventHub
from batonmq_server.offsets.core.values import QueueLimits
from batonmq_server.offsets.disk import LmdbDisk
from batonmq_server.offsets.epoch import EpochContext, OffsetsEpoch, standalone_epoch
from batonmq_server.offsets.event_publisher import EventPublisher
from batonmq_server.offsets.metrics import OffsetsMetrics
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.group_gates import GATES_PREFIX
from tests.offsets.service_calls import Service, no_storage, single_set_directory
from tests.support.grpc_server import serving

DEFAULT_LIMITS = QueueLimits()


def new_hub() -> EventHub:
    return EventHub("offsets/offsets-0", 1, Clock())


def epoch_on(
    disk: LmdbDisk,
    etcd: EtcdSession,
    *groups: str,
    hub: EventHub,
    registry: CollectorRegistry,
    limits: QueueLimits = DEFAULT_LIMITS,
) -> OffsetsEpoch:
    """Return an epoch of the only offsets set, to which `groups` are assigned; no task runs yet."""
    return standalone_epoch(
        disk,
        EpochContext(
            limits=limits,
            clock=Clock(),
            metrics=OffsetsMetrics(registry),
            events=EventPublisher(hub),
            gates=EtcdMirror(etcd, GATES_PREFIX),
            directory=single_set_directory(etcd, *groups),
            storage=no_storage,
            settle_ms=0,
        ),
    )


@asynccontextmanager
async def service_on(
    disk: LmdbDisk, etcd: EtcdSession, *groups: str, limits: QueueLimits = DEFAULT_LIMITS
) -> AsyncIterator[Service]:
    """Serve such an epoch."""
    hub, registry = new_hub(), CollectorRegistry()
    offsets = epoch_on(disk, etcd, *groups, hub=hub, registry=registry, limits=limits)
    async with asyncio.TaskGroup() as tasks:
        writer = tasks.create_task(offsets.commits.run())
        async with serving(offsets.add_to) as channel:
            yield Service(pb_grpc.OffsetsServiceStub(channel), offsets, hub, registry)
        writer.cancel()
