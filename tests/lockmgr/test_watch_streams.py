"""Goal: who owns a queue learns at once that it is wanted, and who waits for one that it is free.

Method: one lock manager with real etcd and offsets; slots are a minute long and keep-alives are not
sent, so nothing that arrives comes of polling.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import Draining, Held, NotAssigned, SubscriptionDraining
from batonmq_server.lockmgr.watch_streams import WatchStreams
from tests.lockmgr.scene import Member, Node, Scene, entries, scene, waits
from tests.support.waiting import until

HOLD_MS = 15_000
SLOW = {"slot_ms": 60_000}


async def owned_by_a(s: Scene, queue_count: int = 1) -> tuple[Node, Member, Member]:
    """A leader, the owner of some queues, and somebody else."""
    node, a, b = await s.leader(**SLOW), Member("a"), Member("b")
    await a.ask(node, await s.set_group(a), range(queue_count))
    return node, a, b


async def test_owner_is_told_at_once_that_somebody_waits(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with scene(etcd_endpoint, tmp_path) as s:
        node, a, b = await owned_by_a(s)
        async with a.watching(node) as watched:
            generation = await s.set_group(a, b)
            with pytest.raises(Held):
                await b.acquire(node, generation)
            assert await watched.wanted() == (0, 1, "b", "WAITER")
            (report,) = await a.keep_alive(node, 1)
            assert (report.wanted_by, report.wanted_reason) == ("b", pb.WANTED_REASON_WAITER)
            with pytest.raises(Draining):
                await b.acquire(node, generation)
            assert watched.nothing(), "once for each that begins to wait"


async def test_what_is_wanted_already_comes_first(etcd_endpoint: str, tmp_path: Path) -> None:
    async with scene(etcd_endpoint, tmp_path) as s:
        node, a, b = await owned_by_a(s, 5)
        generation = await s.set_group(a, b)
        await b.ask(node, generation, (1, 3))
        async with a.watching(node) as watched:
            assert await watched.wanted() == (1, 1, "b", "WAITER")
            assert await watched.wanted() == (3, 1, "b", "WAITER")
            await b.ask(node, generation, (4,))
            assert await watched.wanted() == (4, 1, "b", "WAITER")


async def test_no_wanted_is_lost_between_the_call_and_its_stream(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    """Waiters that come at any moment around the start of the stream are told of."""
    async with scene(etcd_endpoint, tmp_path) as s:
        node, a, b = await owned_by_a(s, 40)
        generation = await s.set_group(a, b)
        for round_ in range(20):
            queue_id = round_ * 2
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(b.ask(node, generation, (queue_id, queue_id + 1)))
                async with a.watching(node) as watched:
                    told: set[int] = set()
                    while not {queue_id, queue_id + 1} <= told:
                        told.add((await watched.wanted())[0])


async def test_evicted_owner_is_told_at_once(etcd_endpoint: str, tmp_path: Path) -> None:
    async with scene(etcd_endpoint, tmp_path) as s:
        node, a, b = await owned_by_a(s, 2)
        async with a.watching(node) as watched:
            await s.set_group(b)
            told = {await watched.wanted() for _ in range(2)}
            assert told == {(0, 1, "", "NOT_MEMBER"), (1, 1, "", "NOT_MEMBER")}
            (report, _) = await a.keep_alive(node, 1, 1)
            assert report.wanted_reason == pb.WANTED_REASON_NOT_MEMBER


async def test_change_of_the_group_that_does_not_concern_the_owner_is_not_told(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with scene(etcd_endpoint, tmp_path) as s:
        node, a, b = await owned_by_a(s)
        async with a.watching(node) as watched:
            for others in ((), (b,), ()):
                await s.set_group(a, *others)
            generation = await s.set_group(a, b)
            await b.ask(node, generation)
            assert await watched.wanted() == (0, 1, "b", "WAITER")


async def test_refused_client_is_told_when_the_queue_is_free(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    """It asked, was refused, and does not ask again until it is told."""
    async with scene(etcd_endpoint, tmp_path) as s:
        node, a, b = await owned_by_a(s)
        async with b.watching(node) as watched:
            generation = await s.set_group(a, b)
            with pytest.raises(Held):
                await b.acquire(node, generation)
            await s.close(1)
            await a.release(node, 1)
            assert await watched.freed() == 0
            assert (await b.acquire(node, generation)).token == 2


async def test_queue_that_became_free_before_the_stream_is_told_of(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with scene(etcd_endpoint, tmp_path) as s:
        node, a, b = await owned_by_a(s)
        generation = await s.set_group(a, b)
        with pytest.raises(Held):
            await b.acquire(node, generation)
        await s.close(1)
        await a.release(node, 1)
        async with b.watching(node) as watched:
            assert await watched.freed() == 0


async def test_queue_that_goes_to_a_held_request_is_free_for_nobody_else(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with scene(etcd_endpoint, tmp_path) as s:
        node, a, b = await owned_by_a(s)
        c = Member("c")
        generation = await s.set_group(a, b, c)
        async with c.watching(node) as watched, b.watching(node) as told:
            with pytest.raises(Held):
                await c.acquire(node, generation)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(b.acquire(node, generation, hold_ms=HOLD_MS))
                await until(lambda: waits(node, "b"))
                await s.close(1)
                await a.release(node, 1)
            assert await told.wanted() == (0, 2, "c", "WAITER"), "c waits for the new owner now"
            assert watched.nothing()
            with pytest.raises(NotAssigned):
                await c.acquire(node, generation)


async def test_client_has_one_stream_and_a_newer_one_ends_the_older(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with scene(etcd_endpoint, tmp_path) as s:
        node, a, b = await owned_by_a(s)
        async with a.watching(node) as older:
            generation = await s.set_group(a, b)
            await b.ask(node, generation)
            await older.wanted()
            async with a.watching(node) as newer:
                assert await newer.wanted() == (0, 1, "b", "WAITER")
                assert await older.ended == "OK"


async def test_streams_beyond_the_limit_are_refused(etcd_endpoint: str, tmp_path: Path) -> None:
    async with scene(etcd_endpoint, tmp_path) as s:
        node = await s.leader(watchers_max=1)
        a, b = Member("a"), Member("b")
        await a.ask(node, await s.set_group(a, b))
        await s.set_group(b)
        async with a.watching(node) as watched:
            await watched.wanted()
            async with b.watching(node) as refused:
                assert await refused.ended == "OVERLOADED"
            async with a.watching(node) as again:
                await again.wanted()

        def gone() -> bool:
            return node.runtime.registry.get_sample_value("baton_lockmgr_watchers") == 0

        await until(gone)
        async with b.watching(node) as admitted:
            await until(lambda: not gone())
            assert not admitted.ended.done()


async def test_streams_end_with_the_term(etcd_endpoint: str, tmp_path: Path) -> None:
    async with scene(etcd_endpoint, tmp_path) as s:
        node = await s.leader()
        a = Member("a")
        await a.ask(node, await s.set_group(a))
        await s.set_group()
        async with a.watching(node) as watched:
            await watched.wanted()
            await node.lapse()
            assert await watched.ended == "NOT_LEADER"


async def test_standby_refuses_to_be_watched(etcd_endpoint: str, tmp_path: Path) -> None:
    async with scene(etcd_endpoint, tmp_path) as s:
        await s.leader()
        standby = await s.lockmgr()
        async with Member("a").watching(standby) as watched:
            assert await watched.ended == "NOT_LEADER"


async def test_draining_group_is_told_to_its_owners_and_the_end_of_it_to_those_who_wait(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with scene(etcd_endpoint, tmp_path) as s:
        node, a, b = await owned_by_a(s, 2)
        async with a.watching(node) as owner, b.watching(node) as waiter:
            generation = await s.set_group(a, b, draining=True)
            told = {await owner.wanted() for _ in range(2)}
            assert told == {(0, 1, "", "SUBSCRIPTION"), (1, 1, "", "SUBSCRIPTION")}
            with pytest.raises(SubscriptionDraining):
                await b.acquire(node, generation)
            while (again := await owner.wanted()) != (0, 1, "b", "SUBSCRIPTION"):
                assert again in told, "the same may be said twice"
            await s.close(1)
            await a.release(node, 1)
            (entry, _) = await entries(node)
            assert entry.state == pb.LOCK_STATE_FREE
            assert waiter.nothing(), "it is free, but for nobody yet"
            generation = await s.set_group(a, b, subscription_generation=2)
            assert await waiter.freed() == 0
            assert (await b.acquire(node, generation)).subscription_generation == 2


def test_what_waits_for_a_slow_listener_is_a_key_once() -> None:
    watchers, client = WatchStreams(1), Incarnation("a", 1)
    keys = [GroupQueue("g", "t", "b", number) for number in range(3)]
    with watchers.open(client, keys[:1]) as watcher:
        for _ in range(1_000):
            for key in keys:
                watchers.notify(client, key)
        assert watcher.take_keys() == keys
        assert watcher.take_keys() == []
    watchers.notify(client, keys[0])
    assert watcher.take_keys() == []
