"""Goal: after each removal queues, indexes and log agree, also after a crash.

Method: a node on a disk in memory, with few batches per segment. The cleaner runs round by round,
and the node restarts from the disk at that moment. The test sets the clock.
"""

from __future__ import annotations

import asyncio
import errno
import time  # noqa: TID251  the zone of the process
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from batonmq._common.clock import Clock
from batonmq_server.storage.checkpointer import Checkpointer
from batonmq_server.storage.core import floors
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.retention import DiskState, Retention, RetentionPolicy
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
    """

    def __init__(self, node: StorageNode, disk: MemoryDisk, **policy: Any) -> None:
        self.node, self.disk, self.clock = node, disk, WallClock()
        self.needed_from: int | None = None
        self.leader_first_position: int | None = None
        self.gone: set[int] = set()
        self.registry = CollectorRegistry()
        metrics = StorageMetrics(self.registry)
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
            ),
            metrics,
            clock=self.clock,
            interval_ms=1_000,
            in_thread=at_once,
        )

    @property
    def store(self) -> MessageStore:
        return self.node.store

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
def scene(disk: MemoryDisk | None = None, **policy: Any) -> Iterator[Scene]:
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


def held(store: MessageStore, queue_id: int = 0) -> VisibleRange:
    return store.offsets((TOPIC_ID, queue_id))


def readable(store: MessageStore, queue_id: int = 0) -> list[int]:
    """Return the offsets that a read from the first one returns, by the bodies."""
    return [int(body) for body in bodies(store, queue_id)]


async def test_old_segments_are_removed_whole_and_the_current_one_stays() -> None:
    with scene() as here:
        fill(here.store, 10)
        assert here.segments() == [f"{n:020d}" for n in (0, 1_000, 2_000, 3_000)]
        assert await here.clean() == 0
        here.later(48)
        assert await here.clean() == 1
        assert here.segments() == [f"{3_000:020d}"]
        assert held(here.store) == VisibleRange(9, 10)
        assert readable(here.store) == [9]
        assert here.store.log.first_position == 3_000


async def test_age_counts_from_the_store_times_of_the_messages() -> None:
    with scene() as here:
        fill(here.store, 3)
        fill(here.store, 3, now=NOW + HOUR_MS)
        fill(here.store, 3, now=NOW + 2 * HOUR_MS)
        here.later(48.9)
        assert await here.clean() == 0, "its successor began an hour later, so it may be younger"
        here.later(49)
        assert await here.clean() == 1
        assert held(here.store) == VisibleRange(3, 9)


@pytest.mark.parametrize(("zone", "hours_until_four"), [("UTC0", 5.8), ("XXX-9", 20.8)])
async def test_expired_segments_are_removed_at_the_local_hour(
    zone: str, hours_until_four: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`NOW` is 22:13 in UTC; nine hours further east it is 07:13 of the next day."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        with scene(hours=frozenset({4})) as here:
            fill(here.store, 12)
            for hours in (48 + hours_until_four - 0.1, 48 + hours_until_four + 1.1):
                here.later(hours)
                assert await here.clean() == 0, hours
            here.later(48 + hours_until_four)
            assert await here.clean() == 1
    finally:
        monkeypatch.undo()
        time.tzset()


async def test_log_is_kept_below_its_maximum_size() -> None:
    with scene(log_bytes_max=3_000) as here:
        fill(here.store, 20)
        await here.clean()
        assert len(here.segments()) == 3
        assert readable(here.store) == list(range(12, 20))


async def test_needed_segment_stays_with_all_later_ones() -> None:
    with scene() as here:
        receipts = fill(here.store, 12)
        here.needed_from = receipts[4].position
        here.later(100)
        await here.clean()
        assert here.segments()[0] == f"{1_000:020d}"
        here.needed_from = None
        await here.clean()
        assert len(here.segments()) == 1


async def test_segment_that_is_not_safe_stays() -> None:
    with scene() as here:
        for _ in range(10):
            append(here.store, batch(bytes(180)))
        here.later(100)
        assert here.store.log.sealed() == []
        assert await here.clean() == 0


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

    with scene(Watched()) as here:
        fill(here.store, 2, queue_id=1)
        fill(here.store, 8)
        fill(here.store, 2, now=NOW + 40 * HOUR_MS)
        here.later(60)
        snapshots.clear()
        assert await here.clean() == 1
        assert await here.checkpointer.take()
        assert (held(here.store), held(here.store, 1)) == (VisibleRange(7, 10), VisibleRange(2, 2))
    steps = [step for step, _ in snapshots]
    assert any(step.startswith("remove log/") for step in steps)
    assert f"replace {floors.PATH}" in steps
    for step, disk in snapshots:
        for without_checkpoint in (False, True):
            after = disk.killed()
            if without_checkpoint:
                after.remove("checkpoint")
            with scene(after) as again:
                first = held(again.store).first_offset
                assert readable(again.store) == list(range(first, 10)), step
                assert first <= 7
                fill(again.store, 1)
                (receipt,) = fill(again.store, 1, queue_id=1)
                assert receipt.first_offset == 2, (step, without_checkpoint)


async def test_emptied_queue_continues_its_offsets() -> None:
    with scene() as here:
        fill(here.store, 2, queue_id=1)
        fill(here.store, 10)
        here.later(100)
        await here.clean()
        assert held(here.store, 1) == VisibleRange(2, 2)
        fill(here.store, 6, queue_id=1, now=here.clock.now_unix_ms)
        fill(here.store, 6, now=here.clock.now_unix_ms)
        here.later(200)
        await here.clean()
        (floor,) = floors.decode(here.disk.load(floors.PATH))
        assert floor == (TOPIC, TOPIC_ID, 1, 8)
        for path in ("", "checkpoint"):
            after = here.disk.killed()
            after.remove(path)
            with scene(after) as again:
                assert held(again.store, 1) == VisibleRange(8, 8)


async def test_empty_queue_of_a_deleted_topic_is_removed() -> None:
    with scene() as here:
        fill(here.store, 3, queue_id=1)
        fill(here.store, 8)
        here.gone = {TOPIC_ID}
        here.later(100)
        await here.clean()
        assert list(here.store.queues) == [(TOPIC_ID, 0)], "the other one still has messages"
        assert await here.checkpointer.take()
        assert floors.decode(here.disk.load(floors.PATH)) == []
        assert here.disk.names(f"consumequeue/{TOPIC}-{TOPIC_ID}") == ["0"]


async def test_index_files_are_removed_once_no_checkpoint_needs_them() -> None:
    with scene() as here:
        fill(here.store, 30)
        await here.checkpointer.take()
        before = here.disk.names("keyindex")
        here.later(100)
        await here.clean()
        assert await here.checkpointer.take()
        assert len(here.disk.names("keyindex")) < len(before)


async def test_forced_cleaning_removes_the_oldest_until_the_disk_is_below_the_watermark() -> None:
    with scene(MemoryDisk(room=2_000_000)) as here:
        fill(here.store, 31)
        sizes = sum(here.disk.space())
        here.disk.room = round(here.disk.space()[0] * 0.1)
        assert here.retention.state is DiskState.OK
        before = len(here.segments())
        assert await here.clean() >= 1
        used, free = here.disk.space()
        assert here.retention.state < DiskState.CLEAN_FORCIBLY
        assert 0.85 > used / (used + free) > 0.80
        assert 1 < len(here.segments()) < before
        assert sizes > 0
        assert readable(here.store)[-1] == 30


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
    with scene() as here:
        fill(here.store, 12)
        second = here.segments()[1]
        here.disk.files[f"log/{second}"].content[20] ^= 1
        fill(here.store, 3, now=NOW + 2 * HOUR_MS)
        here.later(49)
        assert await here.clean() == 0, "the newest message bounds the age of what lies before"
        here.later(51)
        assert await here.clean() == 1
        assert len(here.segments()) <= 2


async def test_reserve_that_a_crash_left_empty_is_created_again() -> None:
    with scene() as here:
        here.disk.files[RESERVE] = MemoryFile()
        await here.cleaner.observe()
        assert here.disk.load(RESERVE) == bytes(RESERVE_BYTES)


@pytest.mark.parametrize("refused", ["checkpoint", floors.PATH])
async def test_disk_without_a_free_byte_is_still_cleaned(refused: str) -> None:
    disk = Full()
    with scene(disk) as here:
        await here.cleaner.observe()
        assert disk.load(RESERVE)
        fill(here.store, 2, queue_id=1)
        fill(here.store, 10)
        disk.refused, disk.room = (refused,), 0
        assert await here.clean() >= 1
        assert held(here.store).first_offset > 0
        assert [floor.queue_id for floor in floors.decode(disk.load(floors.PATH))] == [1]
        assert not disk.load(RESERVE)
        disk.room = 100 << 20
        for _ in range(2):
            await here.cleaner.observe()
        assert disk.load(RESERVE), "for the next time"


async def test_scheduled_batch_survives_a_power_cut_between_its_delivery_and_the_sync() -> None:
    """The delivery makes the segment of the batch unneeded: it must be safe first."""
    inner = batch(b"for later", queue_id=1)
    later = encode_scheduled(ScheduledBatch(NOW + 1, TOPIC_ID, FIRST, inner))
    with scene() as here:
        here.cleaner._bounds = replace(
            here.cleaner._bounds, needed_from=(here.store.schedule.waiting.oldest_position,)
        )
        here.store.append([checked(later)], SYSTEM_TOPICS, NOW)
        fill(here.store, 12)
        assert await here.checkpointer.take()
        here.later(49)
        assert await here.clean() == 0, "it waits"
        (entry,) = here.store.schedule.waiting.due(NOW + 1, 9)
        here.store.append([checked(delivery(entry.key, inner, 1))], TOPICS, NOW)
        assert not here.store.schedule.waiting
        async with asyncio.TaskGroup() as tasks:
            cleaning = tasks.create_task(here.clean())
            await until(lambda: here.flusher._waiting or cleaning.done())
            with recover_directory(
                here.disk.power_cut(lambda _: 0), segment_bytes=SEGMENT_BYTES, monotonic_ms=int
            ) as again:
                (waits,) = again.store.schedule.waiting.due(NOW + 1, 9)
                (found,) = read_scheduled(again.store.log, [waits.position])
                assert isinstance(found, ScheduledBatch)
                assert found.batch == inner
            await here.flusher.sync()
            assert await cleaning == 1
        with recover_directory(
            here.disk.power_cut(lambda _: 0), segment_bytes=SEGMENT_BYTES, monotonic_ms=int
        ) as again:
            assert bodies(again.store, 1) == [b"for later"]
            assert not again.store.schedule.waiting


async def test_segment_after_the_checkpoint_stays() -> None:
    disk = Full()
    with scene(disk) as here:
        fill(here.store, 4)
        assert await here.checkpointer.take()
        fill(here.store, 8)
        disk.never = ("checkpoint",)
        here.later(100)
        assert await here.clean() == 1
        assert here.store.log.first_position == 1_000
    with scene(disk.killed()) as again:
        assert again.node.report.rebuilt == ""
        assert readable(again.store) == list(range(3, 12))


async def test_readers_are_served_between_the_steps() -> None:
    """While a segment is being removed, reads return the messages that are kept."""
    with scene() as here:
        fill(here.store, 10)
        seen = []
        remove = here.disk.remove

        def watched(path: str) -> None:
            if path.startswith("log/"):
                seen.append((readable(here.store), held(here.store)))
            remove(path)

        here.disk.remove = watched  # type: ignore[method-assign]
        here.later(100)
        async with asyncio.timeout(10):
            await here.clean()
        assert len(seen) == 3
        assert set(map(str, seen)) == {str(([9], VisibleRange(9, 10)))}


async def test_gauges_show_the_disk() -> None:
    with scene(MemoryDisk(room=100_000)) as here:
        stored(here.store, batch(b"a"))
        await here.cleaner.observe()
        used, free = here.disk.space()
        value = here.registry.get_sample_value
        ratio = pytest.approx(used / (used + free))
        assert value("baton_storage_disk_used_ratio") == ratio
        assert value("baton_storage_disk_free_bytes") == free
        assert value("baton_storage_disk_seconds_until_full") == float("inf")
        assert value("baton_storage_disk_state") == here.retention.state


async def test_follower_removes_what_its_leader_has_removed_and_nothing_else() -> None:
    with scene() as here:
        fill(here.store, 12)
        here.later(hours=100)
        here.leader_first_position = 0
        assert await here.clean() == 0, "however old it is"
        here.leader_first_position = 2 * SEGMENT_BYTES + 1
        await here.clean()
        assert here.store.log.first_position == 2 * SEGMENT_BYTES
        here.leader_first_position = None
        await here.clean()
        assert here.store.log.first_position == 3 * SEGMENT_BYTES, "now it decides by itself"
