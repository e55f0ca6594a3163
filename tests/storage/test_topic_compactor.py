"""Compacted topics in a replica set: the leader decides, every node has the same messages.

Goal: a reader at any node finds the newest message of each key, whichever node was down or elected
meanwhile; the space of older ones is freed; a message without a key is refused.
Method: real nodes in one process (tests/storage/replicas.py). Tests wait for states.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc.aio
import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._core.ordering_key import with_ordering_key
from batonmq._core.records import Message, decode_records, read_header
from batonmq.errors import BadBatch, BatonError, NoQuorum, NotEnoughReplicas, NotLeader
from batonmq_server.storage import checkpointer, topic_compactor, topic_trimmer
from batonmq_server.storage.core.compaction_policy import CompactionPolicy
from batonmq_server.storage.flusher import Flusher
from tests.storage.batches import TOPIC, TOPIC_ID, batch
from tests.storage.replicas import BROKER, Replica, Scene, queue
from tests.storage.test_compaction_machine import CompactionMachine
from tests.storage.test_purge_machine import at_once
from tests.storage.test_topic_trimmer import purged_count
from tests.support.conditions import until

pytestmark = pytest.mark.timeout(180)

TIMEOUT_S = 60
DAY_MS = 86_400_000


@pytest.fixture(autouse=True)
def _rounds_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "INTERVAL_S", 0)
    monkeypatch.setattr(topic_trimmer, "INTERVAL_S", 0.05)
    monkeypatch.setattr(topic_compactor, "INTERVAL_S", 0.05)
    monkeypatch.setattr(topic_compactor, "SMALL_INTERVAL_MS", 0)


async def compact(scene: Scene, tombstone_retention_ms: int = DAY_MS, min_lag_ms: int = 0) -> None:
    """Write the topic as the nameserver does."""
    spread = [nameserver_pb.QueueSpread(broker=BROKER, queue_count=8)]
    policy = nameserver_pb.Compaction(
        tombstone_retention_ms=tombstone_retention_ms, min_lag_ms=min_lag_ms, dirty_percent=1
    )
    topic = StoredTopic(name=TOPIC, topic_id=TOPIC_ID, spread=spread, compaction=policy)
    etcd = next(node.session for node in scene.nodes.values() if not node.ended.is_set())
    await etcd.put(etcd.key("topics", TOPIC), topic.SerializeToString())


def update(key: str, body: bytes, queue_id: int = 0) -> bytes:
    return batch(with_ordering_key(Message(body), key), queue_id=queue_id)


async def messages(node: Replica, queue_id: int = 0) -> dict[int, bytes]:
    """Return the bodies of a queue by offset."""
    found: dict[int, bytes] = {}
    offset = 0
    while True:
        answer = await node.read(queue_id, offset)
        if answer.next_offset == offset:
            return found
        for raw in answer.batches:
            header = read_header(raw)
            for one in decode_records(raw, header, range(header.count)):
                if offset <= one.offset < answer.next_offset:
                    found[one.offset] = one.body
        offset = answer.next_offset


async def wait_for(node: Replica, expected: dict[int, bytes]) -> None:
    async def look() -> bool:
        return await messages(node) == expected

    try:
        await until(look)
    except TimeoutError:
        assert await messages(node) == expected


async def test_every_node_has_the_same_messages_and_a_new_leader_goes_on(scene: Scene) -> None:
    await scene.start("a", "b", "c")
    leader = await scene.leader()
    await scene.wait_in_sync("a", "b", "c")
    for number in range(9):
        await leader.append(update(f"k{number % 3}", b"%d" % number))
    assert len(await messages(leader)) == 9, "the topic is not compacted"
    behind = min(scene.nodes.keys() - {leader.name})
    await scene.nodes[behind].stop()
    await compact(scene)
    await wait_for(leader, {6: b"6", 7: b"7", 8: b"8"})
    await scene.start(behind)
    await scene.wait_in_sync("a", "b", "c")
    await leader.crash()
    after = await scene.leader()
    await wait_for(after, {6: b"6", 7: b"7", 8: b"8"})
    (receipt,) = await after.append(update("k0", b"9"))
    assert receipt.first_offset == 9, "offsets go on"
    await wait_for(after, {7: b"7", 8: b"8", 9: b"9"})
    await after.stop()
    await scene.start(leader.name)
    await wait_for(await scene.leader(), {7: b"7", 8: b"8", 9: b"9"})


async def test_tombstone_is_removed_after_its_time_and_its_key_never_comes_back(
    scene: Scene,
) -> None:
    scene.members = ("a",)
    (node,) = await scene.start("a")
    await scene.leader()
    await compact(scene)
    await node.append(update("gone", b"0"), update("stays", b"1"), update("gone", b""))
    await wait_for(node, {1: b"1", 2: b""})
    await compact(scene, tombstone_retention_ms=1)
    await wait_for(node, {1: b"1"})
    await node.crash()
    (node.folder / "checkpoint").unlink(missing_ok=True)
    (node,) = await scene.start("a")
    await scene.leader()
    assert await messages(node) == {1: b"1"}, "also before the first checkpoint"


@pytest.mark.long
async def test_space_of_a_topic_that_is_updated_for_ever_is_freed_on_every_node(
    scene: Scene,
) -> None:
    """The node that was behind gets the purged segments, and has the same messages."""
    await scene.start("a", "b", "c")
    leader = await scene.leader()
    await scene.wait_in_sync("a", "b", "c")
    await compact(scene)
    await leader.append(update("kept", b"first"))
    behind = min(scene.nodes.keys() - {leader.name})
    await scene.nodes[behind].stop()
    last = 0
    while purged_count(leader) < 4:
        assert last < 500, "no space is freed"
        last += 1
        await leader.append(update("big", b"%d" % last + bytes(20_000)))
    final = {0: b"first", last: b"%d" % last + bytes(20_000)}
    await wait_for(leader, final)
    stats = await leader.stub.QueryOffsets(
        pb.QueryOffsetsRequest(queues=[queue(0)], with_bytes=True), timeout=TIMEOUT_S
    )
    assert stats.outcomes[0].offsets.stored_bytes < 25_000
    await scene.start(behind)
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()
    await leader.crash()
    after = await scene.leader()
    await wait_for(after, final)
    await after.stop()
    await scene.start(leader.name)
    await wait_for(await scene.leader(), final)


@pytest.mark.parametrize("error", [NoQuorum, NotEnoughReplicas, NotLeader, BadBatch])
async def test_compactor_goes_on_after_a_write_was_refused(error: type[BatonError]) -> None:
    """A leader without etcd, or with too few followers, must not end because of a compaction."""
    machine = CompactionMachine()
    machine.start()
    machine.put(1, 20)
    machine._sync()
    flusher = Flusher(machine.node, lambda _: None, lambda _: None, in_thread=at_once)
    compactor = machine._compactor(flusher, CompactionPolicy(DAY_MS, 0, 1), 1 << 20)
    appender = cast(Any, compactor._appender)
    relocate, refused = appender.relocate, 0

    def refuse_once(relocated: Any) -> list[int]:
        nonlocal refused
        refused += 1
        if refused == 1:
            raise error("refused")
        positions: list[int] = relocate(relocated)
        return positions

    appender.relocate = refuse_once
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(loop()) for loop in (flusher.run, compactor.run)]
        await until(lambda: len(machine.store.compacted.parts) == 2)
        for task in running:
            task.cancel()


async def test_trimmer_goes_on_after_a_write_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    async def refuse(_: topic_trimmer.TopicTrimmer) -> bool:
        nonlocal calls
        calls += 1
        raise NoQuorum("refused")

    monkeypatch.setattr(topic_trimmer.TopicTrimmer, "trim", refuse)
    trimmer = topic_trimmer.TopicTrimmer.__new__(topic_trimmer.TopicTrimmer)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(trimmer.run())
        await until(lambda: calls > 1)
        running.cancel()


async def test_message_without_ordering_key_is_refused(scene: Scene) -> None:
    scene.members = ("a",)
    (node,) = await scene.start("a")
    await scene.leader()
    await compact(scene)

    async def refused() -> bool:
        try:
            await node.append(batch(with_ordering_key(Message(b"1"), "k"), b"no key"))
        except BadBatch as error:
            assert "message 1 of 2" in error.message
            assert "ordering key" in error.remedy
            return True
        return False

    await until(refused)
    request = schedule_pb.ScheduleRequest(
        items=[
            schedule_pb.ScheduleItem(
                batch=batch(b"no key"), deliver_unix_ms=Clock().unix_ms() + 60_000
            )
        ]
    )
    outcome = (await node.scheduling.Schedule(request, timeout=TIMEOUT_S)).outcomes[0]
    assert isinstance(error_from_pb(outcome.error), BadBatch)


async def test_counts_and_searches_leave_removed_messages_out(scene: Scene) -> None:
    scene.members = ("a",)
    (node,) = await scene.start("a")
    await scene.leader()
    await compact(scene)
    receipts = await node.append(*(update(f"k{number % 2}", b"%d" % number) for number in range(6)))
    await wait_for(node, {4: b"4", 5: b"5"})
    request = pb.QueryOffsetsRequest(
        queues=[queue(0)],
        counts=[pb.CountedOffset(queue_index=0, offset=offset) for offset in (0, 3, 5, 6)],
    )
    offsets = (await node.stub.QueryOffsets(request, timeout=TIMEOUT_S)).outcomes[0].offsets
    assert (offsets.first_offset, offsets.next_offset) == (0, 6)
    assert {one.offset: one.count for one in offsets.counts} == {0: 2, 3: 2, 5: 1, 6: 0}
    search = query_pb.SearchOffsetRequest(queue=queue(0), unix_ms=receipts[0].store_unix_ms)
    assert (await node.queries.SearchOffset(search, timeout=TIMEOUT_S)).offset == 4
    with pytest.raises(BatonError):
        await get(node, receipts[0].position)
    answer = await node.read(0, 0)
    assert (await get(node, read_header(answer.batches[0]).position)).batch == answer.batches[0]


async def get(node: Replica, position: int) -> query_pb.StoredMessage:
    request = query_pb.GetMessageRequest(message_id=f"{BROKER}-{position:x}-0")
    try:
        return (await node.queries.GetMessage(request, timeout=TIMEOUT_S)).message
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
