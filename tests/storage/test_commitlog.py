"""Goal: the log keeps each batch at its assigned position, in segments of fixed size.

Method: a disk in memory, small segments, and a comparison with a plain list of batches.
"""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.errors import DataLoss, DiskFull, LimitExceeded
from batonmq_server.storage.core.commitlog import FILLER_MAGIC, CommitLog, StampedBatch
from batonmq_server.storage.core.files import FileCache
from batonmq_server.testing.memory_disks import MemoryDisk, MemoryFile

SEGMENT = 100


def open_log(disk: MemoryDisk, segment_bytes: int = SEGMENT) -> CommitLog:
    return CommitLog(disk, FileCache(disk), segment_bytes)


def write(log: CommitLog, *batches: bytes) -> list[int]:
    positions = log.place([len(one) for one in batches])
    log.append(
        [
            StampedBatch(p, one[:2], memoryview(one)[2:])
            for p, one in zip(positions, batches, strict=True)
        ]
    )
    return positions


@given(st.lists(st.lists(st.integers(3, SEGMENT), min_size=1, max_size=5), max_size=12))
def test_each_batch_is_read_back_from_its_position(appends: list[list[int]]) -> None:
    log = open_log(MemoryDisk())
    expected: dict[int, bytes] = {}
    for number, lengths in enumerate(appends):
        batches = [bytes([number * 5 + i + 1]) * n for i, n in enumerate(lengths)]
        positions = write(log, *batches)
        assert positions == sorted(positions)
        expected |= dict(zip(positions, batches, strict=True))
        assert log.next_position == positions[-1] + len(batches[-1])
    for position, one in expected.items():
        assert position // SEGMENT == (position + len(one) - 1) // SEGMENT, "straddles segments"
        assert log.read(position, len(one)) == one


def test_rest_of_a_segment_is_filled_with_a_filler() -> None:
    disk = MemoryDisk()
    log = open_log(disk)
    assert write(log, b"x" * 60, b"y" * 60) == [0, 100]
    assert disk.files[f"log/{0:020d}"].content[60:68] == struct.pack(">II", FILLER_MAGIC, 40)
    assert disk.names("log") == [f"{0:020d}", f"{100:020d}"]


@pytest.mark.parametrize("room", [1, 7])
def test_rest_of_fewer_than_eight_bytes_stays_zero(room: int) -> None:
    disk = MemoryDisk()
    log = open_log(disk)
    write(log, b"x" * (SEGMENT - room), b"y" * 10)
    assert disk.files[f"log/{0:020d}"].content[SEGMENT - room :] == bytes(room)


def test_batch_may_fill_a_segment_to_the_last_byte() -> None:
    log = open_log(MemoryDisk())
    assert write(log, b"x" * SEGMENT, b"y" * SEGMENT) == [0, 100]
    assert log.read(100, 1_000) == b"y" * SEGMENT


def test_batch_longer_than_a_segment_is_rejected() -> None:
    log = open_log(MemoryDisk())
    write(log, b"x" * 10)
    with pytest.raises(LimitExceeded) as refused:
        log.check_length(SEGMENT + 1)
    assert refused.value.facts == {"field": "batch", "limit": "100", "actual": "101"}
    assert log.next_position == 10


def test_read_outside_of_the_log_returns_nothing() -> None:
    log = open_log(MemoryDisk())
    write(log, b"x" * 90, b"y" * 90)
    log.drop_before(100)
    for position in (-1, 0, 99, 200, 1 << 62):
        assert log.read(position, 50) == b""
    assert log.read(100, -1) == b""


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT])
def test_unreadable_bytes_are_data_loss(number: int) -> None:
    class UnreadableFile(MemoryFile):
        def read(self, at: int, bytes_max: int) -> bytes:
            raise OSError(number, "not there")

    disk = MemoryDisk()
    log = open_log(disk)
    write(log, b"x" * 90)
    log.synced(100)
    log.close()
    disk.files[f"log/{0:020d}"] = UnreadableFile(SEGMENT)
    with pytest.raises(DataLoss) as lost:
        log.read(7, 50)
    assert lost.value.facts == {"position": "7"}


def test_append_without_space_for_a_segment_writes_nothing() -> None:
    disk = MemoryDisk(room=2 * SEGMENT)
    log = open_log(disk)
    write(log, b"x" * 60)
    before = disk.killed()
    positions = log.place([60, 60, 60])
    with pytest.raises(DiskFull):
        log.append([StampedBatch(p, b"yy", memoryview(b"y" * 58)) for p in positions])
    assert log.next_position == 60
    first = f"log/{0:020d}"
    assert disk.files[first].content == before.files[first].content
    disk.room = SEGMENT
    assert write(log, b"y" * 60, b"z" * 60) == [100, 200]


def test_unsynced_names_each_segment_written_since_the_last_sync() -> None:
    disk = MemoryDisk()
    log = open_log(disk)
    write(log, b"x" * 60, b"y" * 60)
    unsynced = log.unsynced()
    assert unsynced.position == 160
    assert list(unsynced.files) == [disk.files[f"log/{at:020d}"] for at in (0, 100)]
    log.synced(unsynced.position)
    assert log.synced_position == 160
    write(log, b"z" * 10)
    assert list(log.unsynced().files) == [disk.files[f"log/{100:020d}"]]


def test_nothing_is_unsynced_after_a_sync() -> None:
    log = open_log(MemoryDisk())
    write(log, b"x" * SEGMENT)
    log.synced(log.unsynced().position)
    assert log.unsynced().files == ()


def test_truncate_zeroes_the_tail_and_drops_later_segments() -> None:
    disk = MemoryDisk()
    log = open_log(disk)
    write(log, b"x" * 60, b"y" * 60, b"z" * 60)
    again = open_log(disk.killed())
    assert again.truncate(30) == 30 + 8 + 60 + 8 + 60
    assert again.next_position == 30
    assert again.read(0, SEGMENT) == b"x" * 30 + bytes(70)
    assert write(again, b"w" * 60) == [30]


def test_truncate_at_the_end_drops_nothing() -> None:
    disk = MemoryDisk()
    log = open_log(disk)
    write(log, b"x" * 60)
    again = open_log(disk.killed())
    assert again.truncate(60) == 0
    assert write(again, b"y" * 40) == [60]


def test_removed_segment_is_not_read_from_an_open_file() -> None:
    disk = MemoryDisk()
    write(open_log(disk), b"x" * 90, b"y" * 90, b"z" * 90)
    log = open_log(disk.killed())
    assert log.read(100, 90) == b"y" * 90
    log.truncate(90)
    assert write(log, b"w" * 90, b"v" * 90) == [100, 200]
    log.synced(log.unsynced().position)
    assert log.read(100, 90) == b"w" * 90


def test_missing_segment_is_data_loss() -> None:
    disk = MemoryDisk()
    write(open_log(disk), b"x" * 90, b"y" * 90, b"z" * 90)
    disk.remove(f"log/{100:020d}")
    with pytest.raises(DataLoss) as raised:
        open_log(disk)
    assert raised.value.facts == {"position": "100"}


def test_segment_file_without_bytes_is_dropped() -> None:
    disk = MemoryDisk()
    write(open_log(disk), b"x" * 90)
    disk.open(f"log/{100:020d}", create=True)
    log = open_log(disk)
    assert disk.names("log") == [f"{0:020d}"]
    assert log.next_position == 100


def test_segments_keep_their_size_when_the_setting_changes() -> None:
    disk = MemoryDisk()
    write(open_log(disk), b"x" * 90, b"y" * 50)
    log = open_log(disk, segment_bytes=1_000)
    log.truncate(150)
    assert write(log, b"z" * 60, b"w" * 900) == [200, 260]
    assert log.read(100, 50) == b"y" * 50
