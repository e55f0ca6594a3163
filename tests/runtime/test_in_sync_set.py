"""The in-sync set of a leader while etcd is slow, rejects changes, or loses answers.

Goal: the leader waits for each follower that is in the set by etcd; errors that pass do not end the
updates; a follower that is not registered does not join.
Method: the real set and its real tracker; in place of etcd a store that the test controls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import pytest

from batonmq._common.clock import Clock
from batonmq.errors import NoQuorum, NotLeader
from batonmq_server.runtime.replication.in_sync_set import (
    UPDATE_INTERVAL_MS,
    InSyncSet,
    ReplicaPolicy,
)
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord, ReplicaSetStore
from tests.support.conditions import until

POLICY = ReplicaPolicy(min_in_sync=1, lag_ms_max=60_000, hold_ms=100)


class StoreTwin:
    """Takes as many changes as a test allows; rejects some first."""

    node_ids = frozenset({"a", "b"})

    def __init__(self) -> None:
        self.in_sync = frozenset({"a"})
        self.allowed = asyncio.Semaphore(0)
        self.change_count = self.rejections = 0
        self.loses_answer = False
        self._mod_revision = 1

    async def change(self, before: ReplicaSetRecord, record: ReplicaSetRecord) -> ReplicaSetRecord:
        self.change_count += 1
        if self.rejections:
            self.rejections -= 1
            raise NotLeader("the lease is not known to live")
        await self.allowed.acquire()
        if before.mod_revision == self._mod_revision:
            self.in_sync, self._mod_revision = record.in_sync, self._mod_revision + 1
        if self.loses_answer:
            self.loses_answer = False
            raise NoQuorum("etcd: no answer")
        return replace(record, in_sync=self.in_sync, mod_revision=self._mod_revision)


class Scene:
    """A leader with position 5, and one follower."""

    def __init__(self) -> None:
        self.store, self.registered, self.clock = StoreTwin(), frozenset({"a", "b"}), Clock()
        store = cast(ReplicaSetStore, self.store)
        record = ReplicaSetRecord(7, "a", frozenset({"a"}), served_epoch=6, mod_revision=1)
        self.in_sync_set = InSyncSet(store, record, 5, POLICY, self.clock, lambda: self.registered)
        self.tracker = self.in_sync_set.tracker

    def acknowledge(self) -> None:
        """Report that the follower has every position."""
        self.tracker.acknowledge("b", self.tracker.position, self.clock.monotonic_ms())

    async def changed(self, times: int) -> None:
        """Wait until the leader has sent etcd this many changes."""

        async def look() -> bool:
            return self.store.change_count >= times

        await until(look)

    async def joined(self) -> None:
        """Wait until the follower is in the set."""

        async def look() -> bool:
            return self.tracker.in_sync == {"a", "b"}

        await until(look)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    yield Scene()


@asynccontextmanager
async def updated(scene: Scene) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        updating = tasks.create_task(scene.in_sync_set.run())
        yield
        updating.cancel()


async def test_follower_that_joins_during_the_record_of_the_epoch_is_always_waited_for(
    scene: Scene,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(scene.in_sync_set.record_serving())
        await scene.changed(1)
        scene.acknowledge()
        async with updated(scene):
            await asyncio.sleep(3 * UPDATE_INTERVAL_MS / 1000)  # an early decision would be seen
            scene.store.allowed.release()
            await serving
            await scene.changed(2)
            scene.tracker.advance_leader(6)
            assert scene.tracker.confirmed == 5, "by now the follower may be in the set"
            scene.store.allowed.release()
            await scene.joined()
            assert scene.tracker.confirmed == 5
            scene.acknowledge()
            assert scene.tracker.confirmed == 6


async def test_rejected_change_does_not_end_the_updates(scene: Scene) -> None:
    scene.store.rejections = 2
    scene.acknowledge()
    async with updated(scene):
        await scene.changed(3)
        scene.store.allowed.release()
        await scene.joined()


async def test_follower_removed_by_a_change_with_a_lost_answer_joins_again(
    scene: Scene,
) -> None:
    scene.acknowledge()
    async with updated(scene):
        scene.store.allowed.release()
        await scene.joined()
        scene.registered, scene.store.loses_answer = frozenset({"a"}), True
        await scene.changed(2)
        scene.registered = frozenset({"a", "b"})
        for _ in range(3):
            scene.store.allowed.release()
        await scene.changed(4)
        await scene.joined()
        assert scene.store.in_sync == {"a", "b"}, "etcd must have it, not only the leader"


async def test_rejected_record_of_the_epoch_is_tried_again(scene: Scene) -> None:
    scene.store.rejections = 2
    scene.store.allowed.release()
    await scene.in_sync_set.record_serving()
    assert scene.store.change_count == 3


async def test_follower_that_is_not_registered_does_not_join(scene: Scene) -> None:
    scene.registered = frozenset({"a"})
    scene.acknowledge()
    async with updated(scene):
        await asyncio.sleep(3 * UPDATE_INTERVAL_MS / 1000)  # time enough to join
        assert scene.store.change_count == 0
        scene.registered = frozenset({"a", "b"})
        scene.store.allowed.release()
        await scene.joined()
