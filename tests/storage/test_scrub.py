"""Goal: the scrub checks everything synced to disk and finds every damaged batch once.

Method: the core on a disk in memory, range by range; the loop on a temporary folder.
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from batonmq.errors import DataLoss, DataLossDetail
from batonmq_server.storage.core import scrub as core
from batonmq_server.storage.core.queue_repair import QueueRepair
from batonmq_server.storage.core.scrub import LogScrub
from batonmq_server.storage.damage_tracker import DamageTracker
from batonmq_server.storage.node import open_directory
from batonmq_server.storage.scrubber import Scrubber
from batonmq_server.testing.memory_disks import MemoryDisk, MemoryFile
from tests.storage.batches import Opened, append, batch, open_store, stored
from tests.support.conditions import until


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "RANGE_BYTES", 300)


def filled(count: int = 60) -> Opened:
    opened = open_store(MemoryDisk(), segment_bytes=1_500)
    for number in range(count):
        stored(opened.store, batch(b"x" * (number * 37 % 400), queue_id=number % 3))
    return opened


async def no_repair(repair: QueueRepair) -> None:
    pytest.fail(f"an undamaged consume queue is rebuilt: {repair}")


def round_of(scrub: LogScrub) -> tuple[dict[int, str], int]:
    """Run one round; return the damage and the number of ranges."""
    damaged: dict[int, str] = {}
    pieces = 0
    while (range_ := scrub.next_range()) is not None:
        begin = range_.position
        scrub.check(range_)
        assert range_.position > begin
        scrub.checked(range_)
        damaged |= range_.damaged
        pieces += 1
    return damaged, pieces


def test_undamaged_log_is_checked_to_its_end_in_each_round() -> None:
    opened = filled()
    scrub = LogScrub(opened.disk, opened.store.log)
    for _ in range(2):
        damaged, pieces = round_of(scrub)
        assert damaged == {}
        assert pieces > opened.store.log.next_position // 1_500
        assert scrub.position == opened.store.log.first_position


def test_each_damaged_batch_is_found_wherever_it_is_damaged() -> None:
    opened = filled()
    positions = sorted({int(queue.first_position) for queue in opened.store.queues.values()})
    entries = opened.store.queues[7, 0]
    positions += entries.read(0, entries.next_offset).positions.tolist()[1:]
    for number, position in enumerate(positions):
        path, begin, _ = opened.store.log.segment_of(position)
        spoiled = opened.disk.killed()
        spoiled.files[path].content[position - begin + number * 7 % 100] ^= 4
        damaged, _ = round_of(LogScrub(spoiled, opened.store.log))
        assert list(damaged) == [position]


def test_zeroed_part_is_damage() -> None:
    opened = filled()
    path, begin, end = opened.store.log.segment_of(1_500)
    opened.disk.files[path].content[:] = bytes(end - begin)
    damaged, _ = round_of(LogScrub(opened.disk, opened.store.log))
    assert damaged == {1_500: "no batch is written here"}


@pytest.mark.parametrize("kept_bytes", [0, 100, 700])
def test_short_file_is_damage(kept_bytes: int) -> None:
    opened = filled()
    path, begin, _ = opened.store.log.segment_of(1_500)
    del opened.disk.files[path].content[kept_bytes:]
    damaged, _ = round_of(LogScrub(opened.disk, opened.store.log))
    (position,) = damaged
    assert begin <= position <= begin + kept_bytes


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT])
def test_unreadable_sector_is_damage_and_the_rest_is_checked(number: int) -> None:
    class UnreadableFile(MemoryFile):
        def read(self, at: int, bytes_max: int) -> bytes:
            if at <= 400 < at + bytes_max:
                raise OSError(number, "not there")
            return super().read(at, bytes_max)

    opened = filled()
    path, begin, _ = opened.store.log.segment_of(1_500)
    rotten = UnreadableFile()
    rotten.content[:] = opened.disk.files[path].content
    opened.disk.files[path] = rotten
    scrub = LogScrub(opened.disk, opened.store.log)
    damaged, _ = round_of(scrub)
    assert damaged
    assert all(begin <= position < begin + 1_500 for position in damaged)
    later = opened.store.log.segment_of(3_000)[0]
    opened.disk.files[later].content[5] ^= 1
    assert damaged.keys() < round_of(scrub)[0].keys()


def test_unsynced_part_is_not_checked() -> None:
    opened = filled(3)
    append(opened.store, batch(b"unsynced"))
    last = opened.disk.files[f"log/{0:020d}"]
    last.content[opened.store.log.synced_position] ^= 1
    scrub = LogScrub(opened.disk, opened.store.log)
    assert round_of(scrub)[0] == {}


def test_round_continues_after_segments_that_retention_has_removed() -> None:
    opened = filled()
    scrub = LogScrub(opened.disk, opened.store.log)
    range_ = scrub.next_range()
    assert range_ is not None
    (_, position), *_ = opened.store.log.sealed()
    for path in opened.store.log.drop_before(position):
        opened.disk.remove(path)
    with pytest.raises(FileNotFoundError):
        scrub.check(range_)
    following = scrub.next_range()
    assert following is not None
    assert following.position == position


def test_each_damage_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    damage = DamageTracker(lambda: None)
    for _ in range(2):
        damage.report_batch(7, "rotten")
        damage.report_error(DataLoss("rotten", detail=DataLossDetail(position=7)))
        damage.report_error(DataLoss("rotten too", detail=DataLossDetail(position=8)))
        damage.report_error(DataLoss("one index ends early", facts={"offset": 1}))
        damage.report_error(DataLoss("another index ends early", facts={"offset": 1}))
    assert len(damage) == len(caplog.records) == 4
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 4


async def test_damage_is_found_in_the_background_counted_and_shown(tmp_path: Path) -> None:
    counter = Counter("found", "DamageTracker.", registry=CollectorRegistry())
    damage = DamageTracker(counter.inc)
    with open_directory(tmp_path, segment_bytes=4_096, monotonic_ms=lambda: 0) as node:
        raw = batch(b"x" * 200)
        append(node.store, raw, raw, raw)
        unsynced = node.store.log.unsynced()
        node.sync(unsynced)
        node.store.synced(unsynced.position)
        with (tmp_path / "log" / f"{0:020d}").open("r+b") as file:
            file.seek(2 * len(raw) - 1)
            file.write(b"?")
        scrubber = Scrubber(node, damage, no_repair, bytes_per_s=1 << 30)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(scrubber.run())
            await until(lambda: len(damage) and scrubber.position == 0)
            running.cancel()
        again, damages = LogScrub(node.disk, node.store.log), dict[int, str]()
        while (range_ := again.next_range()) is not None:
            await scrubber.check(range_)
            again.checked(range_)
            damages |= range_.damaged
        assert list(damages) == [len(raw)]
        assert len(damage) == 1
        assert counter._value.get() == 1
        stopped = Scrubber(node, damage, no_repair, bytes_per_s=0)
        await stopped.run()
        assert stopped.position == 0
