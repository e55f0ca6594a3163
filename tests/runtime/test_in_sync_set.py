"""The keeper of an in-sync set, while etcd is slow, refuses for a moment, or knows less than it.

Goal: nobody is in the set by etcd whom the leader does not wait for; what goes wrong for a moment
does not end the keeping; who is not registered is not let in.
Method: the real keeper and its real books; in place of etcd a set that a test answers for.
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
from batonmq_server.runtime.election import Election
from batonmq_server.runtime.replication.in_sync_set import (
    UPDATE_INTERVAL_MS,
    InSyncSet,
    ReplicaPolicy,
    Won,
)
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord, ReplicaSetStore
from tests.support.waiting import until

POLICY = ReplicaPolicy(min_in_sync=1, lag_ms_max=60_000, hold_ms=100)


class SetTwin:
    """Takes as many changes as a test allows; refuses some first."""

    members = frozenset({"a", "b"})

    def __init__(self) -> None:
        self.in_sync = frozenset({"a"})
        self.allowed = asyncio.Semaphore(0)
        self.asked = self.refusals = 0
        self.loses_answer = False
        self._mod_revision = 1

    async def change(
        self, _: Election, before: ReplicaSetRecord, wanted: ReplicaSetRecord
    ) -> ReplicaSetRecord:
        self.asked += 1
        if self.refusals:
            self.refusals -= 1
            raise NotLeader("the lease is not known to live")
        await self.allowed.acquire()
        if before.mod_revision == self._mod_revision:
            self.in_sync, self._mod_revision = wanted.in_sync, self._mod_revision + 1
        if self.loses_answer:
            self.loses_answer = False
            raise NoQuorum("etcd: no answer")
        return replace(wanted, in_sync=self.in_sync, mod_revision=self._mod_revision)


class Scene:
    """A leader with position 5, and one follower."""

    def __init__(self) -> None:
        self.set, self.up, self.clock = SetTwin(), frozenset({"a", "b"}), Clock()
        won = Won(
            cast(Election, None),
            cast(ReplicaSetStore, self.set),
            ReplicaSetRecord(7, "a", frozenset({"a"}), served_epoch=6, mod_revision=1),
        )
        self.keeper = InSyncSet(won, 5, POLICY, self.clock, lambda: self.up)
        self.books = self.keeper.books

    def heard(self) -> None:
        """The follower has everything."""
        self.books.heard("b", self.books.position, self.clock.monotonic_ms())

    async def asked(self, times: int) -> None:
        """Wait until etcd was asked so often."""

        async def look() -> bool:
            return self.set.asked >= times

        await until(look)

    async def let_in(self) -> None:
        """Wait until the follower is."""

        async def look() -> bool:
            return self.books.in_sync == {"a", "b"}

        await until(look)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    yield Scene()


@asynccontextmanager
async def tended(scene: Scene) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        tending = tasks.create_task(scene.keeper.tend())
        yield
        tending.cancel()


async def test_who_is_let_in_while_the_epoch_is_told_is_waited_for_all_along(scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(scene.keeper.serve())
        await scene.asked(1)
        scene.heard()
        async with tended(scene):
            await asyncio.sleep(
                3 * UPDATE_INTERVAL_MS / 1000
            )  # so that it could have decided too early
            scene.set.allowed.release()
            await serving
            await scene.asked(2)
            scene.books.wrote(6)
            assert scene.books.confirmed == 5, "by now the follower may be in the set"
            scene.set.allowed.release()
            await scene.let_in()
            assert scene.books.confirmed == 5
            scene.heard()
            assert scene.books.confirmed == 6


async def test_a_refusal_of_etcd_does_not_end_the_keeping(scene: Scene) -> None:
    scene.set.refusals = 2
    scene.heard()
    async with tended(scene):
        await scene.asked(3)
        scene.set.allowed.release()
        await scene.let_in()


async def test_who_was_let_out_by_a_change_whose_answer_is_lost_is_let_in_again(
    scene: Scene,
) -> None:
    scene.heard()
    async with tended(scene):
        scene.set.allowed.release()
        await scene.let_in()
        scene.up, scene.set.loses_answer = frozenset({"a"}), True
        await scene.asked(2)
        scene.up = frozenset({"a", "b"})
        for _ in range(3):
            scene.set.allowed.release()
        await scene.asked(4)
        await scene.let_in()
        assert scene.set.in_sync == {"a", "b"}, "the leader must not only believe it"


async def test_a_refusal_of_etcd_does_not_end_the_serving(scene: Scene) -> None:
    scene.set.refusals = 2
    scene.set.allowed.release()
    await scene.keeper.serve()
    assert scene.set.asked == 3


async def test_who_is_not_registered_is_not_let_in(scene: Scene) -> None:
    scene.up = frozenset({"a"})
    scene.heard()
    async with tended(scene):
        await asyncio.sleep(3 * UPDATE_INTERVAL_MS / 1000)  # so that it could have been let in
        assert scene.set.asked == 0
        scene.up = frozenset({"a", "b"})
        scene.set.allowed.release()
        await scene.let_in()
