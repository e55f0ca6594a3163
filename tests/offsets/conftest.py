"""The offsets service in this process: a real disk, a real server, a real channel.

The mirror of the gates does not follow etcd: a test adds the gates of its groups.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from batonmq._common.clock import Clock
from batonmq_server.offsets import placement_resolver
from batonmq_server.offsets.core.values import QueueLimits
from batonmq_server.offsets.disk import LmdbDisk
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.offsets.replica_cluster import ReplicaSet, replica_set
from tests.offsets.running_service import service_on
from tests.offsets.service_calls import TIMEOUT_S, Service


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the service wait for a slow etcd: tests do not repeat calls, as clients do."""
    monkeypatch.setattr(placement_resolver, "RESOLVE_TIMEOUT_S", float(TIMEOUT_S))


@pytest.fixture
async def etcd(etcd_endpoint: str) -> AsyncIterator[EtcdSession]:
    """The keys of a cluster that no other test uses."""
    async with EtcdSession(etcd_endpoint, f"test-{secrets.token_hex(8)}", Clock()) as session:
        yield session


@pytest.fixture
async def service(tmp_path: Path, etcd: EtcdSession) -> AsyncIterator[Service]:
    with LmdbDisk(tmp_path) as disk:
        async with service_on(disk, etcd, limits=QueueLimits(ack_ranges_max=1_000)) as opened:
            yield opened


@pytest.fixture
async def scene(etcd_endpoint: str, tmp_path: Path) -> AsyncIterator[ReplicaSet]:
    """A replica set in a cluster of its own, without nodes."""
    async with replica_set(etcd_endpoint, f"test-{secrets.token_hex(8)}", tmp_path) as opened:
        yield opened
