"""Goal: locks of one moment are written together, however many they are.

Method: a lock store at a real etcd.
"""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from batonmq._common.clock import Clock
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq_server.lockmgr.core.lock_entry import LockRecord
from batonmq_server.lockmgr.lock_store import LockStore, LockWrite
from batonmq_server.runtime.etcd.session import Compare, EtcdSession

LOCK = LockRecord(owner=Incarnation("c1", 1, 0), token=1)


@pytest.mark.parametrize("gates", [1, 60])
async def test_locks_of_one_moment_are_all_written(
    etcd_endpoint: str, cluster: str, gates: int
) -> None:
    writes = [
        LockWrite(
            GroupQueue(f"group-{number % gates}", "orders", "broker-a", number),
            LOCK, 0, Compare(f"gates/group-{number % gates}", mod_revision=0),
        )
        for number in range(250)
    ]  # fmt: skip
    async with EtcdSession(etcd_endpoint, cluster, Clock()) as etcd, asyncio.TaskGroup() as tasks:
        store = LockStore(etcd, Compare("elections/lockmgr", create_revision=0), Random(1))
        running = tasks.create_task(store.run())
        async with asyncio.timeout(20):
            calls = [tasks.create_task(store.persist(write)) for write in writes]
            results = [await call for call in calls]
            stored = await store.load()
        running.cancel()
    assert all(isinstance(result, int) for result in results)
    assert len(set(results)) <= 10, "written together"
    assert {key for key, _, _ in stored} == {write.key for write in writes}
