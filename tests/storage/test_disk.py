"""Goal: real files behave as the core expects.

Method: a temporary folder; the commit log on it is compared with one on the disk in memory.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from batonmq_server.storage.core.commitlog import CommitLog, StampedBatch
from batonmq_server.storage.core.files import FileCache
from batonmq_server.storage.disk import PARTS_MAX, InUse, RealDisk, locked
from tests.support.tmpfs import fill_up, small_file_system


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_parts_beyond_the_limit_of_one_call_are_written_in_order(tmp_path: Path) -> None:
    file = RealDisk(tmp_path).open("a", create=True)
    parts = [bytes([n % 251]) * (n % 7) for n in range(3 * PARTS_MAX + 1)]
    file.write(5, parts)
    assert file.read(5, 1 << 20) == b"".join(parts)
    file.close()


def test_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwritev

    def short(fd: int, parts: list[bytes], at: int) -> int:
        return whole(fd, [b"".join(parts)[:3]], at)

    monkeypatch.setattr(os, "pwritev", short)
    file = RealDisk(tmp_path).open("a", create=True)
    file.write(0, [b"abcd", b"efgh", b"ij"])
    assert file.read(0, 100) == b"abcdefghij"
    file.close()


def test_created_file_is_zero_and_fully_allocated(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    file = disk.create("log/x", 1 << 20)
    assert file.size == 1 << 20
    assert (tmp_path / "log/x").stat().st_blocks * 512 >= 1 << 20
    assert file.read(0, 1 << 20) == bytes(1 << 20)
    assert disk.names("log") == ["x"]
    with pytest.raises(FileExistsError):
        disk.create("log/x", 1)
    assert file.size == 1 << 20
    file.close()


def test_replacement_that_does_not_fit_takes_no_space(tmp_path: Path) -> None:
    """For example a checkpoint: it is tried again and again, and something smaller may fit."""
    with small_file_system(tmp_path / "disk", 2) as folder:
        disk = RealDisk(folder)
        disk.replace("checkpoint", b"good")
        fill_up(folder, leave_bytes=256 * 1024)
        _, free_bytes = disk.space()
        with pytest.raises(OSError, match="No space"):
            disk.replace("checkpoint", bytes(512 * 1024))
        assert disk.space()[1] == free_bytes
        assert disk.load("checkpoint") == b"good"


def test_cut_removes_an_unreadable_sector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RealDisk(tmp_path).create("log", 3 << 20)
    file.write(0, [b"x" * 10])
    file.write(1 << 20, [b"y" * 10])
    pread = os.pread

    def failing(descriptor: int, bytes_max: int, at: int) -> bytes:
        if at <= (1 << 20) < at + bytes_max:
            raise OSError(errno.EIO, "Input/output error")
        return pread(descriptor, bytes_max, at)

    monkeypatch.setattr(os, "pread", failing)
    assert file.cut(4) > 1 << 20
    monkeypatch.undo()
    assert file.read(0, 3 << 20) == b"x" * 4 + bytes((3 << 20) - 4)


def test_cut_zeroes_the_rest_and_returns_the_used_bytes(tmp_path: Path) -> None:
    file = RealDisk(tmp_path).create("log/x", 8 << 20)
    file.write(0, [b"keep"])
    file.write(6 << 20, [b"torn"])
    assert file.cut(4) == (6 << 20)
    assert file.size == 8 << 20
    assert file.read(0, 8 << 20) == b"keep" + bytes((8 << 20) - 4)
    assert file.cut(4) == 0
    file.close()


def test_read_ends_at_the_end_of_the_file(tmp_path: Path) -> None:
    file = RealDisk(tmp_path).open("a", create=True)
    file.write(0, [b"abc"])
    assert (file.read(1, 10), file.read(3, 10)) == (b"bc", b"")
    file.close()


def test_replace_leaves_no_trace_of_the_old_content(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    assert disk.load("epoch") == b""
    disk.replace("epoch", b"a longer content")
    disk.replace("epoch", b"2")
    assert disk.load("epoch") == b"2"
    assert [path.name for path in tmp_path.iterdir()] == ["epoch"]


def test_sparse_file_takes_no_space_beyond_its_head(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    disk.create("log/0", 1 << 20).close()
    disk.replace_sparse("log/0", b"head", 1 << 20)
    status = (tmp_path / "log" / "0").stat()
    assert (status.st_size, status.st_blocks * 512 < 65_536) == (1 << 20, True)
    assert disk.load("log/0") == b"head".ljust(1 << 20, b"\0")
    assert disk.names("log") == ["0"]


def test_remove_accepts_folders_and_missing_names(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    disk.open("a/b/c", create=True).close()
    disk.remove("a")
    disk.remove("a")
    disk.remove("never/there")
    assert disk.names("a") == []


def test_missing_file_is_not_created_without_create(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RealDisk(tmp_path).open("a")


def test_data_directory_is_locked_by_one_process(tmp_path: Path) -> None:
    owner = str(os.getpid())
    with locked(tmp_path / "data"), pytest.raises(InUse, match=owner), locked(tmp_path / "data"):
        pass
    with locked(tmp_path / "data"):
        pass


def test_cache_keeps_few_files_open(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    cache = FileCache(disk, files_max=2)
    for name in "abcd":
        cache.get(name, create=True).write(0, [name.encode()])
    before = open_files()
    assert [cache.get(name).read(0, 1) for name in "abcd"] == [b"a", b"b", b"c", b"d"]
    assert open_files() == before
    cache.close()
    assert open_files() == before - 2


def test_log_closes_sealed_and_synced_segments(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    log = CommitLog(disk, FileCache(disk, files_max=1), 100)
    before = open_files()
    for number in range(20):
        (position,) = log.place([90])
        log.append([StampedBatch(position, bytes([number]), memoryview(bytes(89)))])
        unsynced = log.unsynced()
        for file in unsynced.files:
            file.sync()
        log.synced(unsynced.position)
    assert open_files() <= before + 1
    assert [log.read(100 * n, 1) for n in range(20)] == [bytes([n]) for n in range(20)]
    log.close()
