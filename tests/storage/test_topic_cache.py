"""Goal: a topic is known as soon as it exists, and a lookup of a missing topic is cheap.

Method: a real etcd and a mirror that follows it, or does not follow yet.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from batonmq._common.clock import Clock
from batonmq.errors import NoQuorum, TopicExists, TopicNotFound
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue
from batonmq_server.storage.core.checks import LocalTopic
from batonmq_server.storage.topic_cache import MISSING_MS, TopicCache
from tests.support.clock import MovableClock


class CountingSession(EtcdSession):
    """A session that records the keys that are read."""

    lookup_count = 0

    async def get(self, key: str) -> KeyValue | None:
        self.lookup_count += 1
        return await super().get(key)


class Scene:
    """A topic cache over a mirror that follows etcd only inside `following`."""

    def __init__(self, session: CountingSession) -> None:
        self.session, self.clock = session, MovableClock()
        self.mirror = EtcdMirror(session, "topics/")
        self.topics = TopicCache(self.mirror, session, "broker-a", self.clock)

    async def put(self, name: str, topic_id: int, *, epoch: int = 0, **queue_counts: int) -> int:
        spread = [
            pb.QueueSpread(
                broker=broker.replace("_", "-"), queue_count=count, opened_epoch=epoch // 2
            )
            for broker, count in queue_counts.items()
        ]
        topic = StoredTopic(name=name, topic_id=topic_id, spread=spread, epoch=epoch)
        return await self.session.put(self.session.key("topics", name), topic.SerializeToString())

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.mirror.run())
            await self.mirror.ready()
            yield
            running.cancel()


@asynccontextmanager
async def new_scene(etcd_endpoint: str) -> AsyncIterator[Scene]:
    session = CountingSession(etcd_endpoint, secrets.token_hex(8), Clock())
    async with session:
        yield Scene(session)


async def test_queues_are_those_of_this_broker(etcd_endpoint: str) -> None:
    async with new_scene(etcd_endpoint) as scene:
        await scene.put("a", 7, broker_a=3, broker_b=5)
        await scene.put("b", 8, broker_b=5)
        async with scene.following():
            assert await scene.topics.find("a") == LocalTopic(7, 3)
            assert await scene.topics.find("b") == LocalTopic(8, 0)
        assert scene.session.lookup_count == 0


async def test_topic_that_the_mirror_does_not_have_yet_is_looked_up_once(
    etcd_endpoint: str,
) -> None:
    async with new_scene(etcd_endpoint) as scene:
        await scene.put("a", 7, broker_a=3)
        for _ in range(3):
            assert await scene.topics.find("a") == LocalTopic(7, 3)
        assert scene.session.lookup_count == 1


async def test_missing_topic_is_not_looked_up_again_within_a_second(
    etcd_endpoint: str,
) -> None:
    async with new_scene(etcd_endpoint) as scene:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(20):
                tasks.create_task(missing(scene))
        assert scene.session.lookup_count == 1
        scene.clock.ahead_ms = MISSING_MS + 1
        await missing(scene)
        assert scene.session.lookup_count == 2


async def missing(scene: Scene) -> None:
    with pytest.raises(TopicNotFound) as refused:
        await scene.topics.find("a")
    assert refused.value.facts == {"topic": "a"}


async def test_topic_created_within_that_second_is_found_at_once(etcd_endpoint: str) -> None:
    async with new_scene(etcd_endpoint) as scene, scene.following():
        await missing(scene)
        revision = await scene.put("a", 7, broker_a=3)
        await scene.mirror.reached(revision)
        assert await scene.topics.find("a") == LocalTopic(7, 3)


async def test_topic_is_looked_up_if_the_caller_has_heard_of_a_later_epoch(
    etcd_endpoint: str,
) -> None:
    async with new_scene(etcd_endpoint) as scene:
        await scene.put("a", 7, broker_a=3)
        await scene.topics.find("a")
        await scene.put("a", 7, broker_a=4, epoch=4)
        assert await scene.topics.find("a") == LocalTopic(7, 3)
        for epoch in (4, 3, 4):
            known = await scene.topics.find_all(["a"], {"a": epoch})
            assert known["a"] == LocalTopic(7, 4, epoch=4, opened_epoch=2)
        assert scene.session.lookup_count == 2


async def test_epoch_that_etcd_does_not_have_is_not_looked_up_again_within_a_second(
    etcd_endpoint: str,
) -> None:
    async with new_scene(etcd_endpoint) as scene:
        await scene.put("a", 7, broker_a=3, epoch=2)
        await scene.topics.find("a")
        for _ in range(3):
            known = await scene.topics.find("a", 9)
            assert known == LocalTopic(7, 3, epoch=2, opened_epoch=1)
        assert scene.session.lookup_count == 2
        scene.clock.ahead_ms = MISSING_MS + 1
        await scene.topics.find("a", 9)
        assert scene.session.lookup_count == 3


async def test_wrong_epoch_of_one_sender_does_not_hide_the_epoch_of_another(
    etcd_endpoint: str,
) -> None:
    async with new_scene(etcd_endpoint) as scene:
        await scene.put("a", 7, broker_a=3)
        await scene.topics.find("a", 4_000_000_000)
        await scene.topics.find("a", 4_000_000_000)
        await scene.put("a", 7, broker_a=4, epoch=2)
        assert (await scene.topics.find("a", 2)).queue_count == 4


async def test_event_from_before_a_lookup_does_not_bring_the_older_topic_back(
    etcd_endpoint: str,
) -> None:
    async with new_scene(etcd_endpoint) as scene:
        old = await scene.put("a", 7, broker_a=3)
        await scene.put("a", 7, broker_a=4, epoch=2)
        newest = await scene.topics.find("a")
        stored = KeyValue("a", StoredTopic(name="a", topic_id=7).SerializeToString(), old, old)
        scene.mirror.values["a"], scene.mirror.revision = stored, old
        for changed in scene.mirror.on_change:
            changed(frozenset({"a"}))
        assert scene.topics.known("a") == newest


async def test_deleted_or_recreated_topic_is_not_the_old_topic(etcd_endpoint: str) -> None:
    async with new_scene(etcd_endpoint) as scene:
        await scene.put("a", 7, broker_a=3)
        assert await scene.topics.find("a") == LocalTopic(7, 3)
        async with scene.following():
            await scene.mirror.reached(await scene.put("a", 8, broker_a=4))
            assert scene.topics.known("a") == LocalTopic(8, 4)
            await scene.session.delete(scene.session.key("topics", "a"))
            await scene.mirror.reached(await scene.put("marker", 9, broker_a=1))
            assert scene.topics.known("a") is None
            await missing(scene)


async def test_topic_that_was_deleted_since_its_lookup_takes_no_batch(etcd_endpoint: str) -> None:
    async with new_scene(etcd_endpoint) as scene, scene.following():
        await scene.mirror.reached(await scene.put("a", 7, broker_a=3))
        topics = await scene.topics.find_all(["a", "b"])
        assert scene.topics.with_changes(topics) == topics
        await scene.session.delete(scene.session.key("topics", "a"))
        await scene.mirror.reached(await scene.put("marker", 9, broker_a=1))
        assert isinstance(scene.topics.with_changes(topics)["a"], TopicNotFound)
        assert scene.topics.with_changes(topics)["b"] is topics["b"]


async def test_wait_for_a_deletion_ends_with_it(etcd_endpoint: str) -> None:
    async with new_scene(etcd_endpoint) as scene, scene.following():
        await scene.mirror.reached(await scene.put("a", 7, broker_a=3))
        with pytest.raises(TopicExists):
            await scene.topics.wait_until_gone("a", {7})
        await scene.session.delete(scene.session.key("topics", "a"))
        await scene.topics.wait_until_gone("a", {7})
        await scene.put("a", 8, broker_a=3)
        await scene.topics.wait_until_gone("a", {7})


async def test_undecodable_topic_is_neither_found_nor_deleted(etcd_endpoint: str) -> None:
    """If it counted as deleted, its queues would be removed and start at 0 after the repair."""
    async with new_scene(etcd_endpoint) as scene:
        await scene.put("a", 7, broker_a=3)
        key = scene.session.key("topics", "a")
        async with scene.following():
            await scene.mirror.reached(await scene.session.put(key, b"\xff\xff\xff"))
            await missing(scene)
            assert not scene.topics.is_gone("a", 7)
            assert scene.topics.revision("a") == 0
            await scene.mirror.reached(await scene.put("a", 7, broker_a=4))
            assert await scene.topics.find("a") == LocalTopic(7, 4)


async def test_lookup_without_etcd_is_no_quorum() -> None:
    session = CountingSession("127.0.0.1:1", "none", Clock(), timeout_ms=500)
    async with session:
        with pytest.raises(NoQuorum):
            await Scene(session).topics.find("a")


@pytest.mark.parametrize(
    ("permission", "readable", "writable"),
    [
        (pb.TOPIC_PERMISSION_UNSPECIFIED, True, True),
        (pb.TOPIC_PERMISSION_READ_WRITE, True, True),
        (pb.TOPIC_PERMISSION_READ, True, False),
        (pb.TOPIC_PERMISSION_WRITE, False, True),
    ],
)
async def test_permission_of_a_topic_is_known_for_each_queue(
    etcd_endpoint: str,
    permission: pb.TopicPermission.ValueType,
    readable: bool,
    writable: bool,
) -> None:
    async with new_scene(etcd_endpoint) as scene:
        spread = [
            pb.QueueSpread(broker="broker-a", queue_count=5, write_queue_count=3),
            pb.QueueSpread(broker="broker-b", queue_count=9, write_queue_count=1),
        ]
        topic = StoredTopic(name="a", topic_id=7, spread=spread, permission=permission)
        key = scene.session.key("topics", "a")
        revision = await scene.session.put(key, topic.SerializeToString())
        local = await scene.topics.find("a")
        assert (local.queue_count, local.readable) == (5, readable)
        assert [local.takes(queue_id) for queue_id in range(6)] == [writable] * 3 + [False] * 3
        assert scene.topics.revision("a") == revision
        assert scene.topics.revision("b") == 0


async def test_topic_is_deleted_only_if_the_mirror_is_newer_than_the_topic(
    etcd_endpoint: str,
) -> None:
    async with new_scene(etcd_endpoint) as scene:
        assert not scene.topics.is_gone("a", 7), "the mirror is empty"
        await scene.put("a", 7, broker_a=3)
        async with scene.following():
            assert not scene.topics.is_gone("a", 7)
            assert scene.topics.is_gone("b", 6)
            await scene.mirror.reached(await scene.put("a", 8, broker_a=3))
            assert scene.topics.is_gone("a", 7)
            assert not scene.topics.is_gone("a", 9), "the topic is newer than the mirror"
