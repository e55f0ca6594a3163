"""Goal: a leader takes any number of locks over, and looks after them, without a long pause.

Method: a lock store and a takeover on fakes of etcd and offsets, and a task that counts how often
it runs; entries that fail when they are looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random
from types import SimpleNamespace
from typing import cast

from batonmq._common.aio import STEP_ITEMS
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq_server.lockmgr.core.lock_entry import LockEntry, LockPolicy, LockRecord, LockState
from batonmq_server.lockmgr.core.lock_table import LockTable
from batonmq_server.lockmgr.leader import Leader
from batonmq_server.lockmgr.lock_proto import lock_to_pb
from batonmq_server.lockmgr.lock_store import LockStore
from batonmq_server.lockmgr.takeover import Takeover
from batonmq_server.lockmgr.term import Term
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, KeyValue

COUNT, POLICY = 3_200, LockPolicy()
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


class Turns:
    """Counts how often other tasks run."""

    count = 0

    async def run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


async def test_takeover_of_many_locks_does_not_block_the_renewal_of_the_lease() -> None:
    turns, table = Turns(), LockTable(LockPolicy())
    term = cast("Term", SimpleNamespace(table=table, offsets=FakeOffsets(), now_ms=lambda: 1_000))
    store = LockStore(cast("EtcdSession", FakeEtcd()), Compare("guard"), Random(1))
    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(turns.run())
        loaded = await store.load()
        load_turns = turns.count
        await Takeover(term, loaded).begin()
        counting.cancel()
    assert table.counts() == {LockState.HELD: COUNT}
    assert load_turns >= COUNT // STEP_ITEMS
    assert turns.count - load_turns >= 3 * (COUNT // STEP_ITEMS), (
        "loaded, sorted by set, and confirmed"
    )


async def test_number_of_locks_is_counted_while_other_tasks_run() -> None:
    turns, table, counted = Turns(), LockTable(LockPolicy()), asyncio.Event()
    for key in KEYS:
        table.load(key, LOCK, 1, 0)
    shown: list[Mapping[LockState, int]] = []

    def set_gauges(term: int, counts: Mapping[LockState, int], watchers: int) -> None:
        shown.append(counts)
        counted.set()

    term = SimpleNamespace(
        number=1, now_ms=lambda: 0, metrics=SimpleNamespace(set_gauges=set_gauges)
    )
    notifier = SimpleNamespace(streams=())
    leader = SimpleNamespace(_table=table, _term=term, _notifier=notifier)
    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(turns.run())
        keeping = tasks.create_task(Leader._keep_house(cast("Leader", leader)))
        await counted.wait()
        counting.cancel()
        keeping.cancel()
    assert shown == [{LockState.PENDING: COUNT}]
    assert turns.count >= COUNT // STEP_ITEMS


def test_housekeeping_looks_only_at_queues_with_waiters_or_without_a_lock() -> None:
    table, late_ms = LockTable(POLICY), POLICY.waiter_memory_ms + 1
    for key in KEYS[:10]:
        table.load(key, LOCK, 1, 0)
        table.confirm(key, 1, 0)
    table.add_waiter(KEYS[0], Incarnation("client-b", 2), 0)
    table.add_waiter(KEYS[10], Incarnation("client-b", 2), 0)
    table.drop_old_waiters(0)
    for key in KEYS[1:10]:
        table._entries[key] = cast("LockEntry", object())
    table.drop_old_waiters(late_ms)
    assert not table.get(KEYS[0]).waiters  # type: ignore[union-attr]
    assert table.get(KEYS[10]) is None
    assert not table._transient


def test_lock_that_is_gone_from_etcd_is_dropped_as_one_that_was_only_requested() -> None:
    table, late_ms = LockTable(POLICY), POLICY.waiter_memory_ms + 1
    table.load(KEYS[0], LOCK, 1, 0)
    table.drop_old_waiters(late_ms)
    table.end_reloaded(KEYS[0], None, 0, fenced=False)
    table.drop_old_waiters(late_ms)
    assert table.get(KEYS[0]) is None
