"""Purges of deleted topics in a replica set: every node carries out the order in the log.

Goal: all copies are the same again, whichever node was down, behind or elected meanwhile, and
messages of other topics stay readable.
Method: real nodes in one process (tests/storage/replicas.py). Tests wait for states.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import ExitStack
from typing import cast

import grpc.aio
import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import BatonError, DiskFull, TopicExists
from batonmq_server.storage import checkpointer, topic_purger
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.core.commitlog import CommitLog, purged_head
from batonmq_server.storage.topic_cache import TopicCache
from batonmq_server.storage.topic_purger import TopicPurger
from tests.storage.batches import NOW, TOPIC_ID, batch
from tests.storage.replicas import BROKER, SEGMENT_BYTES, Replica, Scene
from tests.storage.test_disk_full import PROPER
from tests.storage.test_log_cleaner import at_once, fill, new_scene
from tests.storage.test_purge_machine import DeletedTopics, PlainAppender
from tests.support.conditions import until
from tests.support.tmpfs import fill_up, small_file_system

pytestmark = pytest.mark.timeout(180)

TIMEOUT_S = 60
GONE, GONE_ID = "old", 99
PURGED = purged_head(SEGMENT_BYTES).ljust(SEGMENT_BYTES, b"\0")


@pytest.fixture(autouse=True)
def _checkpoints_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "INTERVAL_S", 0)
    monkeypatch.setattr(topic_purger, "ENTRIES_AT_ONCE", 2)


async def put(scene: Scene) -> None:
    spread = [nameserver_pb.QueueSpread(broker=BROKER, queue_count=8)]
    topic = StoredTopic(name=GONE, topic_id=GONE_ID, spread=spread)
    etcd = next(iter(scene.nodes.values())).session
    await etcd.put(etcd.key("topics", GONE), topic.SerializeToString())


async def delete(scene: Scene) -> None:
    etcd = next(node.session for node in scene.nodes.values() if not node.ended.is_set())
    await etcd.delete(etcd.key("topics", GONE))


async def purge(leader: Replica, topic: str = GONE) -> pb.PurgeTopicResponse:
    try:
        request = pb.PurgeTopicRequest(topic=topic)
        return await leader.stub.PurgeTopic(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def write(leader: Replica, segments: int = 3) -> None:
    """Write messages of both topics, then segments of the topic to delete, then both again."""
    thirds = [bytes(10_000)] * 3
    await leader.append(batch(b"first"), batch(*thirds, topic=GONE))
    for _ in range(2 * segments):
        await leader.append(batch(bytes(30_000), topic=GONE))
    await leader.append(batch(b"last"))


def purged_count(node: Replica) -> int:
    return sum(content == PURGED for content in node.log().values())


async def test_purge_frees_segments_on_every_node(scene: Scene) -> None:
    await scene.start("a", "b", "c")
    leader = await scene.leader()
    await scene.wait_in_sync("a", "b", "c")
    await put(scene)
    await write(leader)
    with pytest.raises(TopicExists):
        await purge(leader)
    await delete(scene)
    answer = await purge(leader)
    assert (answer.purged_segments, answer.purged_bytes) == (2, 2 * SEGMENT_BYTES)
    assert answer.remaining_segments == 2, "the first and last segment have other messages"
    assert 3 * 30_000 <= answer.remaining_bytes < 4 * 30_000
    assert answer.expiry_unix_ms > 0
    assert purged_count(leader) == 2
    assert all(
        (leader.folder / "log" / name).stat().st_blocks * 512 < SEGMENT_BYTES
        for name, content in leader.log().items()
        if content == PURGED
    )
    await scene.wait_equal()
    assert await leader.bodies() == [b"first", b"last"]
    assert await purge(leader) == pb.PurgeTopicResponse(), "nothing is left to purge"
    await leader.stop()
    after = await scene.leader()
    await after.append(batch(b"next"))
    assert await after.bodies() == [b"first", b"last", b"next"]
    await scene.start(leader.name)
    await scene.wait_equal()


async def test_node_that_was_down_or_is_new_gets_the_purged_log(scene: Scene) -> None:
    """The node was down: its log ends within a segment that is purged meanwhile."""
    await scene.start("a", "b", "c")
    leader = await scene.leader()
    await scene.wait_in_sync("a", "b", "c")
    await put(scene)
    await write(leader)
    behind, new = sorted(scene.nodes.keys() - {leader.name})
    await scene.nodes[behind].stop()
    await scene.nodes[new].stop()
    await scene.wait_in_sync(leader.name)
    await write(leader)
    await delete(scene)
    answer = await purge(leader)
    assert answer.purged_segments > 2
    for path in sorted((scene.folder / new).rglob("*"), reverse=True):
        if path.is_file():
            path.unlink()
    await scene.start(behind, new)
    await scene.wait_in_sync(leader.name, behind, new)
    await leader.append(batch(b"next"))
    await scene.wait_equal()
    assert purged_count(scene.nodes[new]) == answer.purged_segments
    await leader.crash()
    successor = await scene.leader()
    assert await successor.bodies() == [b"first", b"last", b"first", b"last", b"next"]


async def test_purge_is_carried_out_after_the_leader_has_crashed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader crashes after the order is safe, and before its checkpoint."""
    await scene.start("a", "b", "c")
    leader = await scene.leader()
    await scene.wait_in_sync("a", "b", "c")
    await put(scene)
    await write(leader)
    await delete(scene)

    async def no_checkpoint(_: object) -> bool:
        return False

    with monkeypatch.context() as patched:
        patched.setattr(checkpointer.Checkpointer, "take", no_checkpoint)
        with pytest.raises(BatonError, match="will be purged with the next checkpoint"):
            await purge(leader)
        assert not any(map(purged_count, scene.nodes.values()))
        await leader.crash()
    successor = await scene.leader()
    await until(lambda: purged_count(successor) == 2)
    await scene.start(leader.name)
    await scene.wait_equal()
    assert await successor.bodies() == [b"first", b"last"]


async def test_purge_frees_the_full_disks_of_all_nodes(scene: Scene) -> None:
    """Not a byte is free on any of them, and a message for later keeps retention from helping."""
    scene.settings |= PROPER
    with ExitStack() as disks:
        for name in scene.members:
            disks.enter_context(small_file_system(scene.folder / name, 8))
        await scene.start("a", "b", "c")
        leader = await scene.leader()
        await scene.wait_in_sync("a", "b", "c")
        await put(scene)
        later = schedule_pb.ScheduleItem(batch=batch(b"later"), delay_ms=3_600_000)
        request = schedule_pb.ScheduleRequest(items=[later])
        await leader.scheduling.Schedule(request, timeout=TIMEOUT_S)
        for _ in range(60):
            await leader.append(batch(bytes(50_000), topic=GONE))
        await leader.append(batch(b"last"))
        await scene.wait_equal()
        for name in scene.members:
            fill_up(scene.folder / name, leave_bytes=0)

        async def is_full() -> bool:
            described = [await node.describe() for node in scene.nodes.values()]
            return all(one.disk_state == pb.DISK_STATE_FULL for one in described)

        await until(is_full)
        await delete(scene)
        answer = await purge(leader)
        assert answer.purged_segments > 50
        await until(
            lambda: all(
                purged_count(node) == answer.purged_segments for node in scene.nodes.values()
            )
        )

        async def is_written() -> bool:
            try:
                await leader.append(batch(b"next"))
            except DiskFull:  # it looks at the disk once more in a moment
                return False
            return True

        await until(is_written)
        await scene.wait_equal()
        assert await leader.bodies() == [b"last", b"next"]
        await scene.stop()


async def test_purge_of_a_former_leader_writes_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leadership ends while the purge waits for etcd: its log is that of a follower then."""
    await scene.start("a", "b", "c")
    leader = await scene.leader()
    await scene.wait_in_sync("a", "b", "c")
    await put(scene)
    await write(leader)
    await delete(scene)
    waits, goes_on = asyncio.Event(), asyncio.Event()
    wait_until_gone = TopicCache.wait_until_gone

    async def late(topics: TopicCache, name: str, topic_ids: Collection[int]) -> None:
        await wait_until_gone(topics, name, topic_ids)
        waits.set()
        await goes_on.wait()

    monkeypatch.setattr(TopicCache, "wait_until_gone", late)
    rolls: list[int] = []
    monkeypatch.setattr(CommitLog, "roll", lambda log: rolls.append(log.next_position))

    async def refused() -> BatonError:
        with pytest.raises(BatonError) as error:
            await purge(leader)
        return error.value

    async with asyncio.TaskGroup() as tasks:
        purging = tasks.create_task(refused())
        await waits.wait()
        epoch = (await scene.set_record()).epoch
        leader.session.lose()
        await scene.wait_epoch_above(epoch)
        leader.session.restore()
        await scene.leader()
        await scene.wait_in_sync("a", "b", "c")
        goes_on.set()
    assert purging.result().reason == "UNREACHABLE", "its outcome is not known to the node"
    assert not rolls


async def test_purge_counts_on_while_retention_removes_messages_of_the_topic() -> None:
    with new_scene() as scene:
        receipts = fill(scene.store, 9)
        purger = TopicPurger(
            scene.disk,
            cast(Appender, PlainAppender(scene.store, scene.flusher)),
            cast(TopicCache, DeletedTopics({})),
            scene.checkpointer,
            lambda _: NOW,
            age_ms_max=0,
            in_thread=at_once,
        )
        queue = scene.store.queues[TOPIC_ID, 0]
        async with asyncio.TaskGroup() as tasks:
            counting = tasks.create_task(purger._bytes_by_segment([((TOPIC_ID, 0), queue)]))
            await asyncio.sleep(0)  # it has counted two messages
            queue.trim_before(receipts[6].position)
        counted = [*receipts[:2], *receipts[6:]]
        assert sum(counting.result().values()) == sum(
            one.next_position - one.position for one in counted
        )
