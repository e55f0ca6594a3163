"""The nameserver during an outage of etcd.

Goal: reads answer from the last known state, writes are refused, and no member is removed.
Method: an etcd of the test's own that is killed and started again on its data.
"""

from __future__ import annotations

from pathlib import Path

import grpc.aio
import pytest

from batonmq._common.clock import Clock
from batonmq_server.local.etcd import EtcdProcess
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.replica import (
    Replica,
    ids,
    offsets_service,
    refusal,
    register_broker,
    replica,
)
from tests.support.conditions import until

pytestmark = pytest.mark.e2e


async def test_etcd_outage_refuses_changes_and_keeps_reads(tmp_path: Path) -> None:
    async with (
        EtcdProcess(tmp_path) as etcd,
        EtcdSession(etcd.endpoint, "c", Clock()) as session,
        offsets_service(session, tmp_path / "offsets"),
    ):
        await register_broker(session, "broker-a")
        async with replica(etcd.endpoint, "c") as running:
            await running.create("flights")
            group = await running.join("g", "c1")
            route = await running.route("flights")
            etcd.child.kill_now()
            for change in (
                running.join("g", "c1"),
                running.join("g", "c2"),
                running.leave("g", "c1"),
                running.create("orders"),
                running.route("not-known-here"),
            ):
                assert (await refusal(change)).reason == "NO_QUORUM"
            assert await running.route("flights") == route
            assert await running.group("g") == group
            await etcd.start()
            await until(lambda: _joins(running, "c2"))
            assert ids(await running.group("g")) == ["c1", "c2"]
            assert await running.join("g", "c1") == await running.group("g")


async def _joins(running: Replica, client_id: str) -> bool:
    try:
        await running.join("g", client_id)
    except grpc.aio.AioRpcError:
        return False
    return True
