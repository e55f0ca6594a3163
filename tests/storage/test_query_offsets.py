"""Goal: QueryOffsets and Describe return what consumers can see, queue by queue.

Method: the whole node over gRPC with a real etcd.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.aio import STEP_ITEMS
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq.errors import BatonError, InvalidArgument, LimitExceeded
from batonmq_server.storage.core.checks import check
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.flusher import Flusher
from batonmq_server.storage.server import StorageServicer
from tests.storage.batches import NOW, TOPIC, TOPIC_ID, TOPICS, batch, sync
from tests.storage.running_node import BROKER, TIMEOUT_S, RunningNode, running_node
from tests.support.conditions import until


def queue(topic: str = TOPIC, broker: str = BROKER, queue_id: int = 0) -> queue_pb2.QueueRef:
    return queue_pb2.QueueRef(topic=topic, broker=broker, queue_id=queue_id)


async def query(
    node: RunningNode, *queues: queue_pb2.QueueRef
) -> list[tuple[int, int] | BatonError]:
    request = pb.QueryOffsetsRequest(queues=queues)
    try:
        answer = await node.stub.QueryOffsets(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return [
        error_from_pb(one.error)
        if one.HasField("error")
        else (one.offsets.first_offset, one.offsets.next_offset)
        for one in answer.outcomes
    ]


async def test_offsets_of_queues_with_and_without_messages(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a", b"b", queue_id=3))
        assert await query(node, queue(queue_id=3), queue(queue_id=4)) == [(0, 2), (0, 0)]


async def test_other_calls_go_on_while_many_queues_are_asked_for(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, seen = [0], list[int]()
    original = StorageServicer._offsets

    async def counted(self: StorageServicer, *asked: Any) -> pb.QueryOffsetsOutcome:
        seen.append(turns[0])
        return await original(self, *asked)

    async def count_turns() -> None:
        while True:
            await asyncio.sleep(0)
            turns[0] += 1

    async with running_node(etcd_endpoint, tmp_path) as node, asyncio.TaskGroup() as tasks:
        await node.append(batch(b"a"))
        monkeypatch.setattr(StorageServicer, "_offsets", counted)
        counting = tasks.create_task(count_turns())
        assert await query(node, *[queue()] * 5 * STEP_ITEMS) == [(0, 1)] * 5 * STEP_ITEMS
        counting.cancel()
    assert max(Counter(seen).values()) <= STEP_ITEMS


async def test_queues_that_take_no_messages_wait_for_one_sync_together(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, original = 0, Flusher.wait_until_safe

    async def counted(self: Flusher, position: int) -> None:
        nonlocal waits
        waits += 1
        await original(self, position)

    async with running_node(
        etcd_endpoint, tmp_path, flush="async", flush_interval_ms=60_000
    ) as node:
        await node.append(batch(b"a"), batch(b"b", queue_id=7))
        spread = nameserver_pb.QueueSpread(broker=BROKER, queue_count=8, closed=True)
        await node.write_topic(StoredTopic(name=TOPIC, topic_id=TOPIC_ID, spread=[spread]))
        await until(lambda: _refused(node))
        monkeypatch.setattr(Flusher, "wait_until_safe", counted)
        found = await query(node, *(queue(queue_id=number) for number in range(8)))
        assert waits == 1
    assert found[1:] == [*[(0, 0)] * 6, (0, 1)], "what was not synced yet is in the answer"


async def _refused(node: RunningNode) -> bool:
    (outcome,) = await node.outcomes(batch(b"c"))
    return outcome.HasField("error")


async def test_other_calls_go_on_while_many_messages_are_counted(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, asked = [0], list[tuple[int, int]]()
    original = MessageStore.count_from

    def counted(self: MessageStore, key: QueueKey, offset: int) -> int:
        asked.append((turns[0], offset))
        if len(asked) % 10 == 0:  # the queue grows meanwhile
            self.append([check(batch(b"b", queue_id=1))], TOPICS, NOW)
            sync(self)
        return original(self, key, offset)

    async def count_turns() -> None:
        while True:
            await asyncio.sleep(0)
            turns[0] += 1

    async with running_node(etcd_endpoint, tmp_path) as node, asyncio.TaskGroup() as tasks:
        await node.append(*(batch(b"a", queue_id=1) for _ in range(100)))
        monkeypatch.setattr(MessageStore, "count_from", counted)
        offsets = [*range(99, 0, -2), *range(0, 100, 2), 5]
        request = pb.QueryOffsetsRequest(queues=[queue(queue_id=1)])
        request.counts.extend(pb.CountedOffset(offset=offset) for offset in offsets)
        counting = tasks.create_task(count_turns())
        (outcome,) = (await node.stub.QueryOffsets(request, timeout=TIMEOUT_S)).outcomes
        counting.cancel()
    found = [(one.offset, one.count) for one in outcome.offsets.counts]
    assert outcome.offsets.next_offset == 100
    assert found == [(offset, 100 - offset) for offset in offsets]
    assert max(Counter(turn for turn, _ in asked).values()) <= STEP_ITEMS
    assert [offset for _, offset in asked] == list(range(100)), "in order, each once"


async def test_only_safe_messages_count(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(
        etcd_endpoint, tmp_path, flush="async", flush_interval_ms=60_000
    ) as node:
        await node.append(batch(b"a"))
        assert await query(node, queue()) == [(0, 0)]
        state = await node.describe()
        assert (state.synced_position, state.appended_count) == (0, 1)
        assert state.next_position == len(batch(b"a"))
        await node.append(batch(b"b"), durability=pb.DURABILITY_FSYNCED)
        assert await query(node, queue()) == [(0, 2)]


async def test_each_bad_queue_has_its_own_error(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        rejections = await query(
            node,
            queue(topic="missing"),
            queue(queue_id=8),
            queue(broker="broker-b"),
            queue(topic="a/b"),
            queue(topic="a\x00"),
            queue(broker=""),
            queue(queue_id=65_536),
            queue(),
        )
        assert [getattr(one, "reason", one) for one in rejections] == [
            "TOPIC_NOT_FOUND", "QUEUE_NOT_FOUND", "WRONG_BROKER", "INVALID_NAME", "INVALID_NAME",
            "INVALID_NAME", "LIMIT_EXCEEDED", (0, 0),
        ]  # fmt: skip


async def test_empty_and_oversized_requests_are_rejected(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        with pytest.raises(InvalidArgument) as refused:
            await query(node)
        assert refused.value.facts == {"field": "queues"}
        with pytest.raises(LimitExceeded) as too_many:
            await query(node, *[queue()] * 10_001)
        assert too_many.value.facts == {"field": "queues", "limit": "10000", "actual": "10001"}


async def test_fresh_node_describes_itself(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path, node_id="broker-x") as node:
        await until(lambda: _disk_seen(node))
        state = await node.describe()
        assert 0 < state.disk_used_percent <= 100
        state.ClearField("disk_used_percent")
        assert state.disk_state in pb.DiskState.values()
        state.ClearField("disk_state")
        assert state == pb.DescribeResponse(broker="broker-x")


async def _disk_seen(node: RunningNode) -> bool:
    return (await node.describe()).disk_used_percent > 0


def overwrite_index(folder: Path) -> None:
    """Overwrite the index of queue 0 with zeros."""
    (file,) = folder.glob(f"**/consumequeue/{TOPIC}-*/0/*")
    file.write_bytes(bytes(file.stat().st_size))


async def stored_bytes(node: RunningNode, queue_id: int) -> int | None:
    request = pb.QueryOffsetsRequest(queues=[queue(queue_id=queue_id)], with_bytes=True)
    answer = await node.stub.QueryOffsets(request, timeout=TIMEOUT_S)
    offsets = answer.outcomes[0].offsets
    return offsets.stored_bytes if offsets.HasField("stored_bytes") else None


async def test_bytes_of_a_queue_are_those_of_its_batches(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        batches = [batch(b"a" * 100, b"b", queue_id=3), batch(b"c", queue_id=3)]
        await node.append(*batches, batch(b"d" * 999, queue_id=4))
        assert await stored_bytes(node, 3) == sum(map(len, batches))
        assert await stored_bytes(node, 5) == 0
        request = pb.QueryOffsetsRequest(queues=[queue(queue_id=3)])
        answer = await node.stub.QueryOffsets(request, timeout=TIMEOUT_S)
        assert not answer.outcomes[0].offsets.HasField("stored_bytes")


async def test_bytes_of_a_queue_with_a_damaged_index_are_unset(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        for _ in range(2):  # more entries than a queue keeps in memory
            await node.append(batch(*[b"a"] * 4_000))
        overwrite_index(tmp_path)
        assert await stored_bytes(node, 0) is None
        assert await query(node, queue()) == [(0, 8_000)]
