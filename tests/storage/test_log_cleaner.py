"""Goal: after each removal queues, indexes and log agree, also after a crash.

Method: a node on a disk in memory, with few batches per segment. The cleaner runs round by round,
and the node restarts from the disk at that moment. The test sets the clock.
"""

from __future__ import annotations

import asyncio
import errno
import math
import time  # noqa: TID251  the zone of the process
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from random import Random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from batonmq._common.clock import Clock
from batonmq.errors import DataLoss
from batonmq_server.storage.checkpointer import Checkpointer
from batonmq_server.storage.core import floors
from batonmq_server.storage.core.commitlog import FILLER, purged_head, segment_path
from batonmq_server.storage.core.consumequeue import ENTRY, folder_of
from batonmq_server.storage.core.producers import QueueKey, StoreReceipt
from batonmq_server.storage.core.purge import PurgeOrder, encode_order
from batonmq_server.storage.core.retention import (
    DiskState,
    Retention,
    RetentionPolicy,
    SealedSegment,
)
from batonmq_server.storage.core.schedule import (
    FIRST,
    ScheduledBatch,
    delivery,
    encode_scheduled,
    read_scheduled,
)
from batonmq_server.storage.core.store import MessageStore, VisibleRange
from batonmq_server.storage.flusher import Flusher
from batonmq_server.storage.log_cleaner import RESERVE, RESERVE_BYTES, CleaningBounds, LogCleaner
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.node import StorageNode, recover_directory
from batonmq_server.storage.queue_repairer import QueueRepairer
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS, checked
from batonmq_server.testing.memory_disks import MemoryDisk, MemoryFile
from tests.storage.batches import NOW, TOPIC, TOPIC_ID, TOPICS, append, batch, bodies, stored
from tests.support.conditions import until

SEGMENT_BYTES = 1_000
HOUR_MS = 3_600_000


class WallClock(Clock):
    """A wall clock that the test sets."""

    now_unix_ms = NOW

    def unix_ms(self) -> int:
        return self.now_unix_ms


async def at_once(call: Callable[[Any], None], argument: Any) -> None:
    call(argument)


class Scene:
    """A node and its cleaner.

    Attributes:
        needed_from: Position from which the log is needed.
        gone: Ids of deleted topics.
        leader_first_position: First position of the leader's log, on a follower.
        held_from: Position from which a topic with a longer retention needs the log.
        gone_position: End of the segments that an earlier leader removed from the store.
    """

    def __init__(self, node: StorageNode, disk: MemoryDisk, **policy: Any) -> None:
        self.node, self.disk, self.clock = node, disk, WallClock()
        self.needed_from: int | None = None
        self.leader_first_position: int | None = None
        self.held_from = math.inf
        self.gone_position = 0
        self.gone: set[int] = set()
        self.repair = QueueRepairer(node, at_once, lambda *_: None, Random(1)).repair
        self.registry = CollectorRegistry()
        metrics = self.metrics = StorageMetrics(self.registry)
        self.flusher = Flusher(node, lambda _: None, lambda _: None)
        self.checkpointer = Checkpointer(node, self.flusher, at_once)
        settings: dict[str, Any] = {
            "age_ms_max": 48 * HOUR_MS, "log_bytes_max": 0, "hours": frozenset(range(24)),
        } | policy  # fmt: skip
        self.retention = Retention(RetentionPolicy(**settings), SEGMENT_BYTES)
        self.cleaner = LogCleaner(
            node.store,
            disk,
            self.retention,
            CleaningBounds(
                needed_from=(lambda: self.needed_from,),
                checkpointed=self.checkpointer.position,
                checkpoint=self.checkpointer.take,
                wait_until_safe=self.flusher.wait_until_safe,
                is_gone=lambda _, topic_id: topic_id in self.gone,
                remove_later=node.checkpointing.remove_later,
                leader_first_position=lambda: self.leader_first_position,
                held_from=lambda: self.held_from,
                gone_before=lambda: self.gone_position,
                repair=self._repair,
            ),
            metrics,
            clock=self.clock,
            interval_ms=1_000,
            in_thread=at_once,
        )

    @property
    def store(self) -> MessageStore:
        return self.node.store

    async def _repair(self, key: QueueKey, offset: int, error: DataLoss) -> None:
        await self.repair(key, offset, error)

    async def clean(self) -> int:
        """Run rounds until nothing is removed; return how many removed segments."""
        rounds = 0
        while await self.cleaner.clean():
            rounds += 1
        return rounds

    def later(self, hours: float) -> None:
        self.clock.now_unix_ms = NOW + round(hours * HOUR_MS)

    def segments(self) -> list[str]:
        return self.disk.names("log")


@contextmanager
def new_scene(disk: MemoryDisk | None = None, **policy: Any) -> Iterator[Scene]:
    disk = disk or MemoryDisk()
    with recover_directory(disk, segment_bytes=SEGMENT_BYTES, monotonic_ms=lambda: 0) as node:
        yield Scene(node, disk, **policy)


def fill(
    store: MessageStore, count: int, *, queue_id: int = 0, now: int = NOW
) -> list[StoreReceipt]:
    """Append and sync `count` messages, three per segment; their bodies are their offsets."""
    receipts = []
    for _ in range(count):
        offset = store.offsets((TOPIC_ID, queue_id)).next_offset
        (receipt,) = append(store, batch(f"{offset:180}".encode(), queue_id=queue_id), now=now)
        assert isinstance(receipt, StoreReceipt)
        assert receipt.first_offset == offset
        sync(store)
        receipts.append(receipt)
    return receipts


def sync(store: MessageStore) -> None:
    unsynced = store.log.unsynced()
    for file in unsynced.files:
        file.sync()
    store.synced(unsynced.position)


def visible_range(store: MessageStore, queue_id: int = 0) -> VisibleRange:
    return store.offsets((TOPIC_ID, queue_id))


def readable(store: MessageStore, queue_id: int = 0) -> list[int]:
    """Return the offsets that a read from the first one returns, by the bodies."""
    return [int(body) for body in bodies(store, queue_id)]


async def test_old_segments_are_removed_whole_and_the_current_one_stays() -> None:
    with new_scene() as scene:
        fill(scene.store, 10)
        assert scene.segments() == [f"{n:020d}" for n in (0, 1_000, 2_000, 3_000)]
        assert await scene.clean() == 0
        scene.later(48)
        assert await scene.clean() == 1
        assert scene.segments() == [f"{3_000:020d}"]
        assert visible_range(scene.store) == VisibleRange(9, 10)
        assert readable(scene.store) == [9]
        assert scene.store.log.first_position == 3_000


async def test_age_counts_from_the_store_times_of_the_messages() -> None:
    with new_scene() as scene:
        fill(scene.store, 3)
        fill(scene.store, 3, now=NOW + HOUR_MS)
        fill(scene.store, 3, now=NOW + 2 * HOUR_MS)
        scene.later(48.9)
        assert await scene.clean() == 0, "its successor began an hour later, so it may be younger"
        scene.later(49)
        assert await scene.clean() == 1
        assert visible_range(scene.store) == VisibleRange(3, 9)


@pytest.mark.parametrize(("zone", "hours_until_four"), [("UTC0", 5.8), ("XXX-9", 20.8)])
async def test_expired_segments_are_removed_at_the_local_hour(
    zone: str, hours_until_four: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`NOW` is 22:13 in UTC; nine hours further east it is 07:13 of the next day."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        with new_scene(hours=frozenset({4})) as scene:
            fill(scene.store, 12)
            for hours in (48 + hours_until_four - 0.1, 48 + hours_until_four + 1.1):
                scene.later(hours)
                assert await scene.clean() == 0, hours
            scene.later(48 + hours_until_four)
            assert await scene.clean() == 1
    finally:
        monkeypatch.undo()
        time.tzset()


async def test_log_is_kept_below_its_maximum_size() -> None:
    with new_scene(log_bytes_max=3_000) as scene:
        fill(scene.store, 20)
        await scene.clean()
        assert len(scene.segments()) == 3
        assert readable(scene.store) == list(range(12, 20))


async def test_segment_that_a_checkpoint_is_purging_makes_no_other_one_younger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with new_scene() as scene:
        for number in range(4):
            fill(scene.store, 3, now=NOW + number)
        order = PurgeOrder((), ((SEGMENT_BYTES, 2 * SEGMENT_BYTES),))
        scene.store.append([checked(encode_order(order))], SYSTEM_TOPICS, NOW + HOUR_MS)
        await scene.flusher.sync()
        steps = scene.node.checkpointing
        capture = steps.begin()
        steps.write(capture)
        assert scene.cleaner.newest_unix_ms(SealedSegment(0, SEGMENT_BYTES)) == NOW + 2
        assert not caplog.records
        assert not steps.is_purged(SEGMENT_BYTES), "after a crash the log may need it again"
        list(steps.done(capture))
        assert steps.is_purged(SEGMENT_BYTES)


class FullDisk(MemoryDisk):
    """A disk on which no file can be replaced while it is full."""

    is_full = False

    def replace_sparse(self, path: str, head: bytes, size: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "no space")
        super().replace_sparse(path, head, size)


async def test_purge_that_finds_no_space_is_done_by_the_next_checkpoint() -> None:
    with new_scene(FullDisk()) as scene:
        assert isinstance(scene.disk, FullDisk)
        fill(scene.store, 9)
        order = PurgeOrder((), ((SEGMENT_BYTES, 2 * SEGMENT_BYTES),))
        scene.store.append([checked(encode_order(order))], SYSTEM_TOPICS, NOW)
        await scene.flusher.sync()
        path = segment_path(SEGMENT_BYTES)
        before = scene.disk.load(path)

        scene.disk.is_full = True
        assert not await scene.checkpointer.take()
        assert scene.disk.load(path) == before
        assert scene.store.log.is_purged(SEGMENT_BYTES)
        scene.disk.is_full = False
        assert await scene.checkpointer.take()
        assert scene.disk.load(path)[: FILLER.size] == purged_head(SEGMENT_BYTES)


async def test_what_is_needed_is_looked_up_only_if_messages_have_expired() -> None:
    """With 1,000 compacted queues the look-up takes 26 ms, and the cleaner runs every second."""
    with new_scene() as scene:
        receipts = fill(scene.store, 12)
        assert await scene.checkpointer.take()
        calls: list[int] = []

        def needed_from() -> int:
            calls.append(receipts[4].position)
            return calls[-1]

        scene.cleaner._bounds = replace(scene.cleaner._bounds, needed_from=(needed_from,))
        assert await scene.clean() == 0
        assert not calls
        scene.later(49)
        assert await scene.clean() == 1
        assert calls
        assert scene.store.log.first_position <= receipts[4].position


async def test_needed_segment_stays_with_all_later_ones() -> None:
    with new_scene() as scene:
        receipts = fill(scene.store, 12)
        scene.needed_from = receipts[4].position
        scene.later(100)
        await scene.clean()
        assert scene.segments()[0] == f"{1_000:020d}"
        scene.needed_from = None
        await scene.clean()
        assert len(scene.segments()) == 1


async def test_segment_that_is_not_safe_stays() -> None:
    with new_scene() as scene:
        for _ in range(10):
            append(scene.store, batch(bytes(180)))
        scene.later(100)
        assert scene.store.log.sealed() == []
        assert await scene.clean() == 0


async def test_offsets_continue_after_a_crash_at_any_step() -> None:
    """Queue 1 loses all its messages, queue 0 some; the disk is checked after every change."""
    snapshots: list[tuple[str, MemoryDisk]] = []

    class Watched(MemoryDisk):
        def _note(self, step: str) -> None:
            snapshots.append((step, self.killed()))

        def replace(self, path: str, content: bytes) -> None:
            super().replace(path, content)
            self._note(f"replace {path}")

        def remove(self, path: str) -> None:
            super().remove(path)
            self._note(f"remove {path}")

    with new_scene(Watched()) as scene:
        fill(scene.store, 2, queue_id=1)
        fill(scene.store, 8)
        fill(scene.store, 2, now=NOW + 40 * HOUR_MS)
        scene.later(60)
        snapshots.clear()
        assert await scene.clean() == 1
        assert await scene.checkpointer.take()
        assert (visible_range(scene.store), visible_range(scene.store, 1)) == (
            VisibleRange(7, 10),
            VisibleRange(2, 2),
        )
    steps = [step for step, _ in snapshots]
    assert any(step.startswith("remove log/") for step in steps)
    assert f"replace {floors.PATH}" in steps
    for step, disk in snapshots:
        for without_checkpoint in (False, True):
            after = disk.killed()
            if without_checkpoint:
                after.remove("checkpoint")
            with new_scene(after) as again:
                first = visible_range(again.store).first_offset
                assert readable(again.store) == list(range(first, 10)), step
                assert first <= 7
                fill(again.store, 1)
                (receipt,) = fill(again.store, 1, queue_id=1)
                assert receipt.first_offset == 2, (step, without_checkpoint)


async def test_emptied_queue_continues_its_offsets() -> None:
    with new_scene() as scene:
        fill(scene.store, 2, queue_id=1)
        fill(scene.store, 10)
        scene.later(100)
        await scene.clean()
        assert visible_range(scene.store, 1) == VisibleRange(2, 2)
        fill(scene.store, 6, queue_id=1, now=scene.clock.now_unix_ms)
        fill(scene.store, 6, now=scene.clock.now_unix_ms)
        scene.later(200)
        await scene.clean()
        (floor,) = floors.decode(scene.disk.load(floors.PATH))
        assert floor == (TOPIC, TOPIC_ID, 1, 8)
        for path in ("", "checkpoint"):
            after = scene.disk.killed()
            after.remove(path)
            with new_scene(after) as again:
                assert visible_range(again.store, 1) == VisibleRange(8, 8)


async def test_empty_queue_of_a_deleted_topic_is_removed() -> None:
    with new_scene() as scene:
        fill(scene.store, 3, queue_id=1)
        fill(scene.store, 8)
        scene.gone = {TOPIC_ID}
        scene.later(100)
        await scene.clean()
        assert list(scene.store.queues) == [(TOPIC_ID, 0)], "queue 0 still has messages"
        assert await scene.checkpointer.take()
        assert floors.decode(scene.disk.load(floors.PATH)) == []
        assert scene.disk.names(f"consumequeue/{TOPIC}-{TOPIC_ID}") == ["0"]


async def test_index_files_are_removed_once_no_checkpoint_needs_them() -> None:
    with new_scene() as scene:
        fill(scene.store, 30)
        await scene.checkpointer.take()
        before = scene.disk.names("keyindex")
        scene.later(100)
        await scene.clean()
        assert await scene.checkpointer.take()
        assert len(scene.disk.names("keyindex")) < len(before)


async def test_forced_cleaning_removes_the_oldest_until_the_disk_is_below_the_watermark() -> None:
    with new_scene(MemoryDisk(room=2_000_000)) as scene:
        fill(scene.store, 31)
        sizes = sum(scene.disk.space())
        scene.disk.room = round(scene.disk.space()[0] * 0.1)
        assert scene.retention.state is DiskState.OK
        before = len(scene.segments())
        assert await scene.clean() >= 1
        used, free = scene.disk.space()
        assert scene.retention.state < DiskState.CLEAN_FORCIBLY
        assert 0.85 > used / (used + free) > 0.80
        assert 1 < len(scene.segments()) < before
        assert sizes > 0
        assert readable(scene.store)[-1] == 30


class Full(MemoryDisk):
    """A disk that can't replace the files `refused` until a file is removed, and `never` at all."""

    refused: tuple[str, ...] = ()
    never: tuple[str, ...] = ()

    def replace(self, path: str, content: bytes) -> None:
        if path in self.refused or path in self.never:
            raise OSError(errno.ENOSPC, "no space")
        super().replace(path, content)

    def remove(self, path: str) -> None:
        if path in self.files:
            self.refused = ()
        super().remove(path)


async def test_damaged_batch_at_the_head_of_a_segment_does_not_stop_retention() -> None:
    with new_scene() as scene:
        fill(scene.store, 12)
        second = scene.segments()[1]
        scene.disk.files[f"log/{second}"].content[20] ^= 1
        fill(scene.store, 3, now=NOW + 2 * HOUR_MS)
        scene.later(49)
        assert await scene.clean() == 0, "the newest message bounds the age of what lies before"
        scene.later(51)
        assert await scene.clean() == 1
        assert len(scene.segments()) <= 2


async def test_unreadable_index_is_rebuilt_before_its_messages_are_removed() -> None:
    with new_scene() as scene:
        fill(scene.store, 7)
        fill(scene.store, 7, queue_id=1)
        assert await scene.checkpointer.take()
        for path in lost_index(scene, queue_id=0):
            scene.disk.files[path].content.clear()
        scene.later(49)
        assert await scene.clean() > 0
        assert visible_range(scene.store).first_offset > 0
        assert readable(scene.store) == list(range(*astuple(visible_range(scene.store))))


@pytest.mark.parametrize("offset", range(12))
@pytest.mark.parametrize("bit", [3, 40])
async def test_flipped_bit_of_the_index_removes_no_message_too_early(offset: int, bit: int) -> None:
    with new_scene() as scene:
        fill(scene.store, 6)
        fill(scene.store, 6, now=NOW + 40 * HOUR_MS)
        assert await scene.checkpointer.take()
        (path,) = lost_index(scene, queue_id=0)
        at = ENTRY.itemsize * offset + 7 - bit // 8  # in the position of the batch
        scene.disk.files[path].content[at] ^= 1 << bit % 8
        scene.later(49)
        assert await scene.clean() == 1
        assert visible_range(scene.store) == VisibleRange(3, 12)


async def test_index_that_can_not_be_rebuilt_keeps_the_log_and_the_cleaner_goes_on() -> None:
    async def refuse(key: QueueKey, offset: int, error: DataLoss) -> None:
        raise error

    with new_scene() as scene:
        fill(scene.store, 7)
        fill(scene.store, 7, queue_id=1)
        assert await scene.checkpointer.take()
        segments, repair, scene.repair = scene.segments(), scene.repair, refuse
        for path in lost_index(scene, queue_id=1):
            scene.disk.files[path].content.clear()
        scene.later(49)
        assert await scene.clean() == 0
        assert scene.segments() == segments
        scene.repair = repair
        assert await scene.clean() > 0
        assert len(scene.segments()) < len(segments)
        assert readable(scene.store, 1) == list(range(*astuple(visible_range(scene.store, 1))))


def lost_index(scene: Scene, *, queue_id: int) -> list[str]:
    """Close the files of a queue's index; return their paths."""
    scene.store.cache.close()
    folder = folder_of(TOPIC, TOPIC_ID, queue_id)
    return [path for path in scene.disk.files if path.startswith(f"{folder}/")]


async def test_reserve_that_a_crash_left_empty_is_created_again() -> None:
    with new_scene() as scene:
        scene.disk.files[RESERVE] = MemoryFile()
        await scene.cleaner.observe()
        assert scene.disk.load(RESERVE) == bytes(RESERVE_BYTES)


@pytest.mark.parametrize("refused", ["checkpoint", floors.PATH])
async def test_disk_without_a_free_byte_is_still_cleaned(refused: str) -> None:
    disk = Full()
    with new_scene(disk) as scene:
        await scene.cleaner.observe()
        assert disk.load(RESERVE)
        fill(scene.store, 2, queue_id=1)
        fill(scene.store, 10)
        disk.refused, disk.room = (refused,), 0
        assert await scene.clean() >= 1
        assert visible_range(scene.store).first_offset > 0
        assert [floor.queue_id for floor in floors.decode(disk.load(floors.PATH))] == [1]
        assert not disk.load(RESERVE)
        disk.room = 100 << 20
        for _ in range(2):
            await scene.cleaner.observe()
        assert disk.load(RESERVE), "the reserve is allocated again"


async def test_scheduled_batch_survives_a_power_cut_between_its_delivery_and_the_sync() -> None:
    """The delivery makes the segment of the batch unneeded: it must be safe first."""
    inner = batch(b"for later", queue_id=1)
    later = encode_scheduled(ScheduledBatch(NOW + 1, TOPIC_ID, FIRST, inner))
    with new_scene() as scene:
        scene.cleaner._bounds = replace(
            scene.cleaner._bounds, needed_from=(scene.store.schedule.waiting.oldest_position,)
        )
        scene.store.append([checked(later)], SYSTEM_TOPICS, NOW)
        fill(scene.store, 12)
        assert await scene.checkpointer.take()
        scene.later(49)
        assert await scene.clean() == 0, "the batch waits"
        (entry,) = scene.store.schedule.waiting.due(NOW + 1, 9)
        scene.store.append([checked(delivery(entry.key, inner, 1))], TOPICS, NOW)
        assert not scene.store.schedule.waiting
        async with asyncio.TaskGroup() as tasks:
            cleaning = tasks.create_task(scene.clean())
            await until(lambda: scene.flusher._waiting or cleaning.done())
            with recover_directory(
                scene.disk.power_cut(lambda _: 0), segment_bytes=SEGMENT_BYTES, monotonic_ms=int
            ) as again:
                (waits,) = again.store.schedule.waiting.due(NOW + 1, 9)
                (scheduled,) = read_scheduled(again.store.log, [waits.position])
                assert isinstance(scheduled, ScheduledBatch)
                assert scheduled.batch == inner
            await scene.flusher.sync()
            assert await cleaning == 1
        with recover_directory(
            scene.disk.power_cut(lambda _: 0), segment_bytes=SEGMENT_BYTES, monotonic_ms=int
        ) as again:
            assert bodies(again.store, 1) == [b"for later"]
            assert not again.store.schedule.waiting


async def test_segment_after_the_checkpoint_stays() -> None:
    disk = Full()
    with new_scene(disk) as scene:
        fill(scene.store, 4)
        assert await scene.checkpointer.take()
        fill(scene.store, 8)
        disk.never = ("checkpoint",)
        scene.later(100)
        assert await scene.clean() == 1
        assert scene.store.log.first_position == 1_000
    with new_scene(disk.killed()) as again:
        assert again.node.report.rebuilt == ""
        assert readable(again.store) == list(range(3, 12))


async def test_readers_are_served_between_the_steps() -> None:
    """While a segment is being removed, reads return the messages that are kept."""
    with new_scene() as scene:
        fill(scene.store, 10)
        reads = []
        remove = scene.disk.remove

        def watched(path: str) -> None:
            if path.startswith("log/"):
                reads.append((readable(scene.store), visible_range(scene.store)))
            remove(path)

        scene.disk.remove = watched  # type: ignore[method-assign]
        scene.later(100)
        async with asyncio.timeout(10):
            await scene.clean()
        assert len(reads) == 3
        assert set(map(str, reads)) == {str(([9], VisibleRange(9, 10)))}


async def test_gauges_show_the_disk() -> None:
    with new_scene(MemoryDisk(room=100_000)) as scene:
        stored(scene.store, batch(b"a"))
        await scene.cleaner.observe()
        used, free = scene.disk.space()
        value = scene.registry.get_sample_value
        ratio = pytest.approx(used / (used + free))
        assert value("baton_storage_disk_used_ratio") == ratio
        assert value("baton_storage_disk_free_bytes") == free
        assert value("baton_storage_disk_seconds_until_full") == float("inf")
        assert value("baton_storage_disk_state") == scene.retention.state


async def test_follower_removes_what_its_leader_has_removed_and_nothing_else() -> None:
    with new_scene() as scene:
        fill(scene.store, 12)
        scene.later(hours=100)
        scene.leader_first_position = 0
        assert await scene.clean() == 0, "a follower removes nothing by age"
        scene.leader_first_position = 2 * SEGMENT_BYTES + 1
        await scene.clean()
        assert scene.store.log.first_position == 2 * SEGMENT_BYTES
        scene.leader_first_position = None
        await scene.clean()
        assert scene.store.log.first_position == 3 * SEGMENT_BYTES, (
            "without a leader the node's own retention applies"
        )


async def test_topic_with_a_longer_retention_holds_the_log_until_it_is_over() -> None:
    with new_scene() as scene:
        receipts = fill(scene.store, 10)
        scene.later(48)
        scene.held_from = receipts[3].position
        await scene.clean()
        assert scene.store.offsets((TOPIC_ID, 0)).first_offset == 3
        scene.held_from = math.inf
        await scene.clean()
        assert scene.store.offsets((TOPIC_ID, 0)).first_offset == 9
