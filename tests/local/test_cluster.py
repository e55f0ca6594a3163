"""Goal: a local cluster that fails reports why, stops all processes, and hides no other error.

Method: real clusters that are made to fail, at the start and later.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from batonmq_server.local.cluster import ClusterFailed
from tests.support.cluster import local_cluster
from tests.support.conditions import lives

pytestmark = pytest.mark.e2e


async def test_service_that_keeps_ending_fails_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batonmq_server.local.supervisor.DEATHS_MAX", 0)
    pids: list[int] = []
    reports: list[str] = []
    with pytest.raises(ClusterFailed, match="storage ended 1 times within 60 s"):
        async with local_cluster(tmp_path, report=reports.append) as cluster:
            pids += [endpoint.pid for endpoint in cluster.endpoints() if endpoint.pid]
            await cluster.kill("storage")
            await asyncio.Event().wait()
    assert len(pids) == 5
    assert not any(map(lives, pids))
    assert reports[0].startswith("storage ended: SIGKILL")


async def test_service_that_does_not_start_is_reported_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(ClusterFailed, match="unknown variable BATON_OFFSETS_NONSENSE"):
        async with local_cluster(tmp_path, offsets={"nonsense": 1}):
            raise AssertionError("it started")


async def test_error_of_the_body_is_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="mine"):
        async with local_cluster(tmp_path):
            raise LookupError("mine")


async def test_cluster_on_a_running_etcd_starts_none(tmp_path: Path, etcd_endpoint: str) -> None:
    async with local_cluster(tmp_path, etcd=etcd_endpoint, cluster="guest") as cluster:
        etcd, *services = cluster.endpoints()
        assert (etcd.address, etcd.pid) == (etcd_endpoint, None)
        assert all(service.pid for service in services)
    assert not (tmp_path / "etcd").exists()
