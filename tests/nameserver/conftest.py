"""Fixtures of the nameserver's tests: a cluster with keys of its own in etcd, and a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest_asyncio

from batonmq._common.clock import Clock
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import OffsetsUnreachable
from batonmq_server.offsets.epoch import OffsetsEpoch
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.replica import Direct, Replica, offsets_service, register_broker, replica
from tests.support.conditions import until


@pytest_asyncio.fixture
async def session(etcd_endpoint: str, cluster: str) -> AsyncIterator[EtcdSession]:
    """The cluster's keys; there are none yet."""
    async with EtcdSession(etcd_endpoint, cluster, Clock()) as opened:
        yield opened


@pytest_asyncio.fixture
async def offsets(session: EtcdSession, tmp_path: Path) -> AsyncIterator[OffsetsEpoch]:
    """The offsets service of the cluster, registered."""
    async with offsets_service(session, tmp_path / "offsets") as running:
        yield running


@pytest_asyncio.fixture
async def etcd(session: EtcdSession, offsets: OffsetsEpoch) -> EtcdSession:
    """The cluster's keys, with one broker registered beside offsets."""
    await register_broker(session, "broker-a")
    return session


@pytest_asyncio.fixture
async def nameserver(etcd_endpoint: str, cluster: str, etcd: EtcdSession) -> AsyncIterator[Replica]:
    """A replica with the topic `flights`."""
    async with replica(etcd_endpoint, cluster) as running:
        await until(lambda: is_created(running, "flights", 8))
        yield running


async def is_created(running: Replica, topic: str, queue_count: int) -> bool:
    """Create a topic; return whether offsets answered in time, which a busy disk may prevent."""
    try:
        await running.create(topic, queue_count)
    except grpc.aio.AioRpcError as failure:
        if isinstance(from_rpc_error(failure), OffsetsUnreachable):
            return False
        raise
    return True


@pytest_asyncio.fixture
async def direct(nameserver: Replica) -> AsyncIterator[Direct]:
    """A second replica without a server, which follows etcd."""
    async with asyncio.TaskGroup() as tasks:
        second = Direct(nameserver.runtime, tasks)
        second.follow()
        await second.catalog.ready()
        yield second
        second.stop_following()
