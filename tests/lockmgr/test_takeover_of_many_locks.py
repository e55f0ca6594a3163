"""Goal: a new leader takes any number of locks over, and its lease does not expire meanwhile.

Method: a lock store and a takeover on fakes of etcd and offsets, and a task that counts how often
it runs.
"""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace
from typing import cast

from batonmq._common.aio import STEP_ITEMS
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq_server.lockmgr.core.lock_entry import LockPolicy, LockRecord, LockState
from batonmq_server.lockmgr.core.lock_table import LockTable
from batonmq_server.lockmgr.lock_proto import lock_to_pb
from batonmq_server.lockmgr.lock_store import LockStore
from batonmq_server.lockmgr.takeover import Takeover
from batonmq_server.lockmgr.term import Term
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, KeyValue

COUNT = 3_200
LOCK = LockRecord(owner=Incarnation("client-a", 1), token=1)
KEYS = [GroupQueue(f"group-{number % 7}", "news", "broker-a", number) for number in range(COUNT)]


class FakeEtcd:
    async def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        stored = (lock_to_pb(key, LOCK).SerializeToString() for key in KEYS)
        return [KeyValue(prefix, value, 1, 1) for value in stored], 1


class FakeOffsets:
    def sets(self) -> frozenset[str]:
        return frozenset({"offsets"})

    def set_of(self, group: str) -> str:
        return "offsets"

    async def announce(self, offsets_set: str) -> dict[GroupQueue, int]:
        return dict.fromkeys(KEYS, 1)


async def test_takeover_of_many_locks_does_not_block_the_renewal_of_the_lease() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    table = LockTable(LockPolicy())
    term = cast("Term", SimpleNamespace(table=table, offsets=FakeOffsets(), now_ms=lambda: 1_000))
    store = LockStore(cast("EtcdSession", FakeEtcd()), Compare("guard"), Random(1))
    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(count())
        loaded = await store.load()
        load_turns = turns
        await Takeover(term, loaded).begin()
        counting.cancel()
    assert table.counts() == {LockState.HELD: COUNT}
    assert load_turns >= COUNT // STEP_ITEMS
    assert turns - load_turns >= 3 * (COUNT // STEP_ITEMS), "loaded, sorted by set, and confirmed"
