"""Goal: a copy of the log can be completed, whatever its queues have dropped already.

The copy may be cut before messages that its queues have dropped, or begin with them, and its node
may restart meanwhile.
Method: a leader's log and its copy on disks in memory. The copy gets the batches one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from batonmq_server.storage.core import floors
from batonmq_server.storage.core.log_transfer import check_received, read_whole_batches
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.purge import PurgeOrder, QueueTrim, encode_order
from batonmq_server.storage.node import LogStart, StorageNode, recover_directory, reset_disk
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS, checked
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import NOW, TOPIC, TOPIC_ID, batch, bodies, stored, sync

SEGMENT_BYTES = 1_000
KEY = TOPIC_ID, 0


@contextmanager
def opened(disk: MemoryDisk, *, replicated: bool = True) -> Iterator[StorageNode]:
    with recover_directory(
        disk, segment_bytes=SEGMENT_BYTES, monotonic_ms=lambda: 0, replicated=replicated
    ) as node:
        yield node


@contextmanager
def leader_with_trimmed_queue() -> Iterator[tuple[StorageNode, list[StoreReceipt]]]:
    """Yield a node with a queue of six batches of two messages, of which two are kept."""
    with opened(MemoryDisk(), replicated=False) as leader:
        stored(leader.store, batch(bytes(600), queue_id=1))
        receipts = []
        for number in range(6):
            receipts += stored(leader.store, batch(b"%d" % number, bytes(300)))
        trim(leader, receipts[4])
        yield leader, receipts


def trim(node: StorageNode, first: StoreReceipt) -> None:
    """Trim the queue to a batch."""
    trims = (QueueTrim(*KEY, first.first_offset, first.position),)
    order = encode_order(PurgeOrder((), (), trims=trims, names={TOPIC_ID: TOPIC}))
    (receipt,) = node.store.append([checked(order)], SYSTEM_TOPICS, NOW)
    assert isinstance(receipt, StoreReceipt)
    sync(node.store)
    node.checkpointing.run()


def follow(leader: StorageNode, follower: StorageNode, end: int | None = None) -> None:
    """Copy the log of the leader up to `end`, batch by batch, and let the copy take all of it."""
    source, copy, recovery = leader.store.log, follower.store.log, follower.recovery
    while copy.next_position < (end or source.synced_position):
        position = copy.next_position
        data = read_whole_batches(source, leader.history, position, 1)
        segment = source.segment_of(position)[1:]
        batches, after = check_received(recovery, position, data, segment)
        copy.copy(data, segment, after)
        for header, one in batches:
            recovery.take(header, one)
    sync(follower.store)
    follower.store.confirmed(copy.next_position)


def check_alike(leader: StorageNode, follower: StorageNode) -> None:
    assert follower.store.log.next_position == leader.store.log.next_position
    for queue_id in (0, 1):
        key = TOPIC_ID, queue_id
        assert follower.store.offsets(key) == leader.store.offsets(key)
        assert bodies(follower.store, queue_id) == bodies(leader.store, queue_id)


@pytest.mark.parametrize("restarts", [False, True])
def test_copy_that_was_cut_before_messages_it_has_dropped_is_completed(restarts: bool) -> None:
    with leader_with_trimmed_queue() as (leader, receipts):
        disk = MemoryDisk()
        with opened(disk) as follower:
            follow(leader, follower)
            follower.checkpointing.run()
            assert follower.store.offsets(KEY) == leader.store.offsets(KEY)
            follower.cut(receipts[1].position, damaged=True)
        if restarts:
            disk = disk.killed()
            with opened(disk) as follower:
                follow(leader, follower, receipts[2].next_position)
                follower.checkpointing.run()
            disk = disk.killed()
        with opened(disk) as follower:
            assert follower.report.rebuilt == ("" if restarts else "there is no checkpoint")
            follow(leader, follower)
            check_alike(leader, follower)
            follower.checkpointing.run()
        with opened(disk.killed()) as follower:
            check_alike(leader, follower)


@pytest.mark.parametrize("restarts", [False, True])
def test_copy_that_begins_with_dropped_messages_is_completed(restarts: bool) -> None:
    with leader_with_trimmed_queue() as (leader, receipts):
        first = leader.store.log.sealed()[0][1]
        leader.store.queues[TOPIC_ID, 1].trim_before(first)
        leader.store.log.drop_before(first)
        segment = leader.store.log.segment_of(first)[1:]
        disk = MemoryDisk()
        reset_disk(disk, LogStart(floors.encode(leader.store.floors()), segment, leader.history))
        if restarts:
            with opened(disk) as follower:
                follow(leader, follower, receipts[2].next_position)
                follower.checkpointing.run()
            disk = disk.killed()
        with opened(disk) as follower:
            follow(leader, follower)
            check_alike(leader, follower)


def test_copy_that_has_forgotten_a_queue_of_a_deleted_topic_is_completed() -> None:
    """Retention has removed all messages of the queue that the copy had; the leader has more."""
    disk = MemoryDisk()
    with opened(MemoryDisk(), replicated=False) as leader:
        stored(leader.store, *(batch(bytes(600), queue_id=number) for number in (0, 1, 1)))
        with opened(disk) as follower:
            follow(leader, follower)
            follower.checkpointing.run()
        stored(leader.store, batch(bytes(600), queue_id=0))
        first = leader.store.log.sealed()[0][1]
        with opened(disk.killed()) as follower:
            for node in (leader, follower):
                node.store.queues[KEY].trim_before(first)
                node.store.log.drop_before(first)
            follower.store.forget_queue(KEY)
            follow(leader, follower)
            check_alike(leader, follower)
