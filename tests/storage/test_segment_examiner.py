"""Goal: a segment is purged only if no batch of it is needed, for its messages or anything else.

Method: a store in memory with short segments; trims are carried out by checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest

from batonmq._core.records import read_header
from batonmq_server.storage.core.checks import check
from batonmq_server.storage.core.commitlog import PositionRange
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.purge import PurgeOrder, QueueTrim, encode_order
from batonmq_server.storage.core.schedule import delivery, encode_withdrawn
from batonmq_server.storage.node import StorageNode, recover_directory
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS, checked
from batonmq_server.storage.segment_examiner import SegmentExaminer
from batonmq_server.storage.topic_cache import TopicCache
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import NOW, TOPIC, TOPIC_ID, TOPICS, batch

SEGMENT_BYTES = 1_000
FIRST: PositionRange = (0, SEGMENT_BYTES)


@dataclass
class Scene:
    """A node with one batch in its first segment, and what else a test appends to it."""

    node: StorageNode
    disk: MemoryDisk
    gone: set[str]

    def append(self, raw: bytes) -> int:
        """Append and sync a batch; return the offset of its first message."""
        system = read_header(raw).topic != TOPIC
        one = checked(raw) if system else check(raw)
        (receipt,) = self.node.store.append([one], SYSTEM_TOPICS if system else TOPICS, NOW)
        self.sync()
        assert isinstance(receipt, StoreReceipt)
        return receipt.first_offset

    def sync(self) -> None:
        unsynced = self.node.store.log.unsynced()
        self.node.sync(unsynced)
        self.node.store.synced(unsynced.position)

    def end_segment(self, count: int = 2) -> None:
        for _ in range(count):
            self.append(batch(bytes(700), queue_id=1))

    def trim(self, first_offset: int, queue_id: int = 0) -> None:
        trims = (QueueTrim(TOPIC_ID, queue_id, first_offset, 0),)
        self.append(encode_order(PurgeOrder((), (), -1, trims, {TOPIC_ID: TOPIC})))

    async def find(self) -> Any:
        examiner = SegmentExaminer(
            self.disk,
            self.node.store,
            cast(TopicCache, self),
            lambda: self.node.checkpointing.position,
            _at_once,
        )
        return await examiner.find()

    def is_gone(self, name: str, topic_id: int) -> bool:
        return name in self.gone


async def _at_once(call: Callable[[Any], None], argument: Any) -> None:
    call(argument)


@pytest.fixture
def scene() -> Iterator[Scene]:
    disk = MemoryDisk()
    with recover_directory(disk, segment_bytes=SEGMENT_BYTES, monotonic_ms=lambda: 0) as node:
        scene = Scene(node, disk, set())
        scene.append(batch(b"one", b"two"))
        yield scene


async def test_segment_is_found_once_all_its_messages_are_trimmed(scene: Scene) -> None:
    scene.append(batch(b"three"))
    scene.end_segment()
    scene.trim(2)
    scene.node.checkpointing.run()
    assert await scene.find() is None, "one message is kept"
    scene.trim(3)
    assert await scene.find() is None, "the order is not carried out"
    scene.node.checkpointing.run()
    found = await scene.find()
    assert (found.segment, found.keys) == (FIRST, {(TOPIC_ID, 0)})


async def test_order_that_is_lost_with_its_segment_names_its_queues(scene: Scene) -> None:
    scene.trim(2)
    scene.end_segment()
    scene.node.checkpointing.run()
    found = await scene.find()
    assert (found.segment, found.keys) == (FIRST, {(TOPIC_ID, 0)})


@pytest.mark.parametrize(
    "needed",
    [
        encode_withdrawn([(NOW, 7)]),
        delivery((NOW, 7), batch(b"delivered"), 0),
        encode_order(PurgeOrder((5,), ())),
    ],
    ids=["withdrawal", "delivery", "order about a deleted topic"],
)
async def test_batch_that_says_what_has_ended_is_kept(scene: Scene, needed: bytes) -> None:
    store = scene.node.store
    one = checked(needed)
    system = one.header.topic != TOPIC
    store.append([one], SYSTEM_TOPICS if system else TOPICS, NOW)
    scene.sync()
    scene.end_segment()
    scene.trim(store.offsets((TOPIC_ID, 0)).next_offset)
    scene.node.checkpointing.run()
    assert store.offsets((TOPIC_ID, 0)).first_offset >= 2
    assert await scene.find() is None


async def test_messages_of_deleted_topics_keep_no_segment(scene: Scene) -> None:
    scene.end_segment()
    scene.node.checkpointing.run()
    assert await scene.find() is None
    scene.gone.add(TOPIC)
    found = await scene.find()
    assert (found.segment, found.keys) == (FIRST, frozenset())


async def test_damaged_segment_is_not_purged(scene: Scene) -> None:
    scene.end_segment()
    scene.trim(2)
    scene.node.checkpointing.run()
    content = scene.disk.files[f"log/{0:020d}"].content
    content[100] ^= 1
    assert await scene.find() is None
