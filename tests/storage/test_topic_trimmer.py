"""Retention per topic in a replica set: the leader decides, every node carries the order out.

Goal: all copies have the same first offsets, whichever node was down or elected meanwhile, a change
takes effect while the nodes run, and a reader that is behind skips what is gone.
Method: real nodes in one process (tests/storage/replicas.py). Tests wait for states.
"""

from __future__ import annotations

from typing import Any

import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq.errors import DiskFull, OffsetOutOfRange
from batonmq_server.storage import checkpointer, topic_trimmer
from batonmq_server.storage.core import checkpoint
from batonmq_server.storage.core.checkpoint import position_of
from batonmq_server.storage.core.commitlog import purged_head
from tests.storage.batches import TOPIC, TOPIC_ID, batch
from tests.storage.replicas import BROKER, SEGMENT_BYTES, Replica, Scene, queue
from tests.storage.test_disk_full import PROPER
from tests.support.conditions import until
from tests.support.tmpfs import fill_up, small_file_system

pytestmark = pytest.mark.timeout(180)

TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def _rounds_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "INTERVAL_S", 0)
    monkeypatch.setattr(topic_trimmer, "INTERVAL_S", 0.05)


async def put(scene: Scene, **retention: Any) -> None:
    """Write the topic as the nameserver does."""
    spread = [nameserver_pb.QueueSpread(broker=BROKER, queue_count=8)]
    topic = StoredTopic(name=TOPIC, topic_id=TOPIC_ID, spread=spread, **retention)
    etcd = next(node.session for node in scene.nodes.values() if not node.ended.is_set())
    await etcd.put(etcd.key("topics", TOPIC), topic.SerializeToString())


async def first_offset(node: Replica) -> int:
    request = pb.QueryOffsetsRequest(queues=[queue(0)])
    answer = await node.stub.QueryOffsets(request, timeout=TIMEOUT_S)
    return answer.outcomes[0].offsets.first_offset


async def wait_for_first_offset(node: Replica, offset: int) -> None:
    async def look() -> bool:
        return await first_offset(node) == offset

    await until(look)


async def test_every_node_trims_and_a_new_leader_goes_on(scene: Scene) -> None:
    await scene.start("a", "b", "c")
    leader = await scene.leader()
    await scene.wait_in_sync("a", "b", "c")
    for number in range(6):
        await leader.append(batch(b"%d" % number, bytes(1_000)))
    assert await first_offset(leader) == 0, "the topic has no retention of its own"
    behind = min(scene.nodes.keys() - {leader.name})
    await scene.nodes[behind].stop()
    await put(scene, retention_bytes=2_500)
    await wait_for_first_offset(leader, 8)
    with pytest.raises(OffsetOutOfRange):
        await leader.read(0, 0)
    assert (await leader.read(0, 8)).next_offset == 12
    await scene.start(behind)
    await scene.wait_in_sync("a", "b", "c")
    await leader.crash()
    after = await scene.leader()
    await wait_for_first_offset(after, 8)
    await after.append(batch(b"6", bytes(1_000)))
    await wait_for_first_offset(after, 10)
    await put(scene, retention_ms=1)
    await wait_for_first_offset(after, 14)
    await put(scene)
    (receipt,) = await after.append(batch(b"7"))
    assert receipt.first_offset == 14, "offsets go on"
    await after.stop()
    await scene.start(leader.name)
    last = await scene.leader()
    assert await first_offset(last) == 14, "no copy takes trimmed messages back"
    assert (await last.read(0, 14)).next_offset == 15


async def test_node_that_is_alone_keeps_its_first_offset_after_a_restart(
    scene: Scene,
) -> None:
    scene.members = ("a",)
    (node,) = await scene.start("a")
    await scene.leader()
    for number in range(4):
        await node.append(batch(b"%d" % number))
    await put(scene, retention_bytes=1)
    await wait_for_first_offset(node, 3)
    await put(scene)
    await node.crash()
    (node,) = await scene.start("a")
    await scene.leader()
    await wait_for_first_offset(node, 3)
    assert (await node.read(0, 3)).next_offset == 4


@pytest.mark.long
async def test_segments_of_trimmed_messages_are_purged_on_every_node(scene: Scene) -> None:
    """The node that was behind gets the purged segments, and goes on with the same offsets."""
    await scene.start("a", "b", "c")
    leader = await scene.leader()
    await scene.wait_in_sync("a", "b", "c")
    await leader.append(batch(b"other", queue_id=1))
    behind = min(scene.nodes.keys() - {leader.name})
    await scene.nodes[behind].stop()
    for _ in range(8):
        await leader.append(batch(bytes(30_000)))
    await put(scene, retention_ms=1)
    await wait_for_first_offset(leader, 8)
    await leader.append(batch(bytes(60_000), queue_id=2))  # ends the segment with the order
    await until(lambda: purged_count(leader) >= 3)
    await put(scene)
    await scene.start(behind)
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()
    await leader.crash()
    after = await scene.leader()
    (receipt,) = await after.append(batch(b"next"))
    assert receipt.first_offset == 8, "no offset is given twice"
    await after.stop()
    await scene.start(leader.name)
    last = await scene.leader()
    assert (await last.read(0, 8)).next_offset == 9


async def test_retention_of_a_topic_frees_a_full_disk(scene: Scene) -> None:
    """Not a byte is free, and a message for later keeps the broker's own retention from helping."""
    scene.settings |= PROPER
    scene.members = ("a",)
    with small_file_system(scene.folder / "a", 8) as disk:
        (node,) = await scene.start("a", segment_bytes=4 * SEGMENT_BYTES)
        await scene.leader()
        later = schedule_pb.ScheduleItem(batch=batch(b"later"), delay_ms=3_600_000)
        request = schedule_pb.ScheduleRequest(items=[later])
        await node.scheduling.Schedule(request, timeout=TIMEOUT_S)
        for _ in range(60):
            (receipt,) = await node.append(batch(bytes(50_000)))
        file = disk / checkpoint.PATH
        await until(lambda: file.exists() and position_of(file.read_bytes()) >= receipt.position)
        fill_up(disk, leave_bytes=0)

        async def is_full() -> bool:
            return (await node.describe()).disk_state == pb.DISK_STATE_FULL

        await until(is_full)
        await put(scene, retention_bytes=100_000)
        await wait_for_first_offset(node, 59)

        async def is_written() -> bool:
            try:
                await node.append(batch(b"next"))
            except DiskFull:
                return False
            return True

        await until(is_written)
        await scene.stop()


def purged_count(node: Replica) -> int:
    purged = purged_head(SEGMENT_BYTES).ljust(SEGMENT_BYTES, b"\0")
    return sum(content == purged for content in node.log().values())
