"""Goal: owners are notified at once that a queue is wanted, and waiting clients that it is free.

Method: one lock manager with real etcd and offsets. Slots are a minute long and no keep-alives are
sent, so no notice comes from polling.
"""

from __future__ import annotations

import asyncio

import pytest

from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import Draining, Held, NotAssigned, SubscriptionDraining
from batonmq_server.lockmgr.watch_streams import WatchStreams
from tests.lockmgr.scene import Member, Node, Scene, entries
from tests.support.conditions import until

SLOW = {"slot_ms": 60_000}


async def owned_by_a(s: Scene, queue_count: int = 1) -> tuple[Node, Member, Member]:
    """Return a leader, the owner of some queues, and another client."""
    node, a, b = await s.leader(**SLOW), Member("a"), Member("b")
    await a.acquire_each(node, await s.set_group(a), range(queue_count))
    return node, a, b


async def test_owner_is_notified_at_once_of_a_waiting_client(scene: Scene) -> None:
    node, a, b = await owned_by_a(scene)
    async with a.watching(node) as watched:
        generation = await scene.set_group(a, b)
        with pytest.raises(Held):
            await b.acquire(node, generation)
        assert await watched.wanted() == (0, 1, "b", "WAITER")
        (report,) = await a.keep_alive(node, 1)
        assert (report.wanted_by, report.wanted_reason) == ("b", pb.WANTED_REASON_WAITER)
        with pytest.raises(Draining):
            await b.acquire(node, generation)
        assert watched.nothing(), "one notice for each client that begins to wait"


async def test_stream_begins_with_queues_that_are_wanted_already(scene: Scene) -> None:
    node, a, b = await owned_by_a(scene, 5)
    generation = await scene.set_group(a, b)
    await b.acquire_each(node, generation, (1, 3))
    async with a.watching(node) as watched:
        assert await watched.wanted() == (1, 1, "b", "WAITER")
        assert await watched.wanted() == (3, 1, "b", "WAITER")
        await b.acquire_each(node, generation, (4,))
        assert await watched.wanted() == (4, 1, "b", "WAITER")


async def test_no_notice_is_lost_while_the_stream_opens(scene: Scene) -> None:
    """Waiters that begin to wait at any moment around the start of the stream are reported."""
    node, a, b = await owned_by_a(scene, 40)
    generation = await scene.set_group(a, b)
    for round_ in range(20):
        queue_id = round_ * 2
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(b.acquire_each(node, generation, (queue_id, queue_id + 1)))
            async with a.watching(node) as watched:
                notified: set[int] = set()
                while not {queue_id, queue_id + 1} <= notified:
                    notified.add((await watched.wanted())[0])


async def test_evicted_owner_is_notified_at_once(scene: Scene) -> None:
    node, a, b = await owned_by_a(scene, 2)
    async with a.watching(node) as watched:
        await scene.set_group(b)
        notified = {await watched.wanted() for _ in range(2)}
        assert notified == {(0, 1, "", "NOT_MEMBER"), (1, 1, "", "NOT_MEMBER")}
        (report, _) = await a.keep_alive(node, 1, 1)
        assert report.wanted_reason == pb.WANTED_REASON_NOT_MEMBER


async def test_owner_is_not_notified_of_other_changes_of_the_group(scene: Scene) -> None:
    node, a, b = await owned_by_a(scene)
    async with a.watching(node) as watched:
        for others in ((), (b,), ()):
            await scene.set_group(a, *others)
        generation = await scene.set_group(a, b)
        await b.acquire_each(node, generation)
        assert await watched.wanted() == (0, 1, "b", "WAITER")


async def test_refused_client_is_notified_when_the_queue_is_free(scene: Scene) -> None:
    """The client was refused and sends no request until it is notified."""
    node, a, b = await owned_by_a(scene)
    async with b.watching(node) as watched:
        generation = await scene.set_group(a, b)
        with pytest.raises(Held):
            await b.acquire(node, generation)
        await scene.close(1)
        await a.release(node, 1)
        assert await watched.freed() == 0
        assert (await b.acquire(node, generation)).token == 2


async def test_stream_begins_with_queues_that_are_free_already(scene: Scene) -> None:
    node, a, b = await owned_by_a(scene)
    generation = await scene.set_group(a, b)
    with pytest.raises(Held):
        await b.acquire(node, generation)
    await scene.close(1)
    await a.release(node, 1)
    async with b.watching(node) as watched:
        assert await watched.freed() == 0


async def test_queue_granted_to_a_held_request_is_not_announced_as_free(scene: Scene) -> None:
    node, a, b = await owned_by_a(scene)
    c = Member("c")
    async with c.watching(node) as watched, b.watching(node) as owner_stream:
        with pytest.raises(Held):
            await c.acquire(node, await scene.set_group(a, b, c))
        generation = await scene.set_group(a, c, b)
        async with b.waiting(node, generation):
            await scene.close(1)
            await a.release(node, 1)
        assert await owner_stream.wanted() == (0, 2, "c", "WAITER"), "c waits for the new owner now"
        assert watched.nothing()
        with pytest.raises(NotAssigned):
            await c.acquire(node, generation)


async def test_newer_stream_of_a_client_ends_the_older(scene: Scene) -> None:
    node, a, b = await owned_by_a(scene)
    async with a.watching(node) as older:
        generation = await scene.set_group(a, b)
        await b.acquire_each(node, generation)
        await older.wanted()
        async with a.watching(node) as newer:
            assert await newer.wanted() == (0, 1, "b", "WAITER")
            assert await older.ended == "OK"


async def test_streams_beyond_the_limit_are_rejected(scene: Scene) -> None:
    node = await scene.leader(watchers_max=1)
    a, b = Member("a"), Member("b")
    await a.acquire_each(node, await scene.set_group(b, a))
    await scene.set_group(b)
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


async def test_streams_end_with_the_term(scene: Scene) -> None:
    node = await scene.leader()
    a = Member("a")
    await a.acquire_each(node, await scene.set_group(a))
    await scene.set_group()
    async with a.watching(node) as watched:
        await watched.wanted()
        await node.cut_until_leases_expire()
        assert await watched.ended == "NOT_LEADER"


async def test_standby_rejects_watch(scene: Scene) -> None:
    await scene.leader()
    standby = await scene.lockmgr()
    async with Member("a").watching(standby) as watched:
        assert await watched.ended == "NOT_LEADER"


async def test_owners_are_notified_when_draining_begins_and_waiters_when_it_ends(
    scene: Scene,
) -> None:
    node, a, b = await owned_by_a(scene, 2)
    async with a.watching(node) as owner, b.watching(node) as waiter:
        generation = await scene.set_group(a, b, draining=True)
        notified = {await owner.wanted() for _ in range(2)}
        assert notified == {(0, 1, "", "SUBSCRIPTION"), (1, 1, "", "SUBSCRIPTION")}
        with pytest.raises(SubscriptionDraining):
            await b.acquire(node, generation)
        while (again := await owner.wanted()) != (0, 1, "b", "SUBSCRIPTION"):
            assert again in notified, "a notice may be repeated"
        await scene.close(1)
        await a.release(node, 1)
        (entry, _) = await entries(node)
        assert entry.state == pb.LOCK_STATE_FREE
        assert waiter.nothing(), "the queue is free, but can't be granted yet"
        generation = await scene.set_group(a, b, subscription_generation=2)
        assert await waiter.freed() == 0
        assert (await b.acquire(node, generation)).subscription_generation == 2


def test_stream_of_a_slow_client_has_each_key_once() -> None:
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
