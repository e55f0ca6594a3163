"""Goal: a process without a free file descriptor puts work off; it does not end and loses nothing.

Method: a node on a disk in memory that can't open files for a while; a real disk with a low limit.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from batonmq.errors import Overloaded
from batonmq_server.runtime.descriptors import open_descriptors
from batonmq_server.storage.checkpointer import Checkpointer
from batonmq_server.storage.core.files import Disk, File, FileCache
from batonmq_server.storage.core.fsck import Fsck
from batonmq_server.storage.disk import RealDisk
from batonmq_server.storage.flusher import Flusher, waiting_for_descriptors
from batonmq_server.storage.node import StorageNode, recover_directory
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import append, batch, bodies, stored
from tests.storage.test_log_cleaner import at_once

SEGMENT_BYTES = 1_000


class ShortDisk(MemoryDisk):
    """A disk whose process has no free descriptor while `short` is set."""

    short = False

    def _open_one(self) -> None:
        if self.short:
            raise OSError(errno.EMFILE, "Too many open files")

    def create(self, path: str, size: int) -> File:
        self._open_one()
        return super().create(path, size)

    def open(self, path: str, *, create: bool = False) -> File:
        self._open_one()
        return super().open(path, create=create)

    def replace(self, path: str, content: bytes) -> None:
        self._open_one()
        super().replace(path, content)

    def sync(self, paths: Sequence[str]) -> None:
        self._open_one()
        super().sync(paths)


@contextmanager
def opened(disk: Disk) -> Iterator[StorageNode]:
    with recover_directory(disk, segment_bytes=SEGMENT_BYTES, monotonic_ms=lambda: 0) as node:
        yield node


def test_batch_that_needs_a_new_segment_is_rejected_and_stored_later() -> None:
    disk = ShortDisk()
    with opened(disk) as node:
        stored(node.store, batch(b"a" * 600))
        disk.short = True
        (outcome,) = append(node.store, batch(b"b" * 600))
        assert isinstance(outcome, Overloaded)
        assert outcome.retry_after_ms
        assert "ulimit -n" in outcome.remedy
        disk.short = False
        stored(node.store, batch(b"b" * 600))
        assert bodies(node.store) == [b"a" * 600, b"b" * 600]
    with opened(disk.killed()) as node:
        assert bodies(node.store) == [b"a" * 600, b"b" * 600]


async def test_checkpoint_is_taken_later_and_counted() -> None:
    disk = ShortDisk()
    counted: list[int] = []
    with opened(disk) as node:
        flusher = Flusher(node, lambda _: None, lambda _: None, in_thread=at_once)
        checkpointer = Checkpointer(node, flusher, at_once, lambda: counted.append(1))
        stored(node.store, batch(b"a"))
        disk.short = True
        assert not await checkpointer.take()
        assert (checkpointer.position(), counted) == (0, [1])
        disk.short = False
        assert await checkpointer.take()
        assert checkpointer.position() == node.store.log.next_position
    with opened(disk.killed()) as node:
        assert node.report.batches == 0, "the checkpoint has everything"
        assert bodies(node.store) == [b"a"]


async def test_work_in_a_thread_is_repeated_until_a_descriptor_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batonmq_server.storage.flusher.SHORTAGE_PAUSE_S", 0)
    disk = ShortDisk()
    counted: list[int] = []
    disk.short = True

    def on_shortage() -> None:
        counted.append(1)
        disk.short = len(counted) < 3

    patient = waiting_for_descriptors(at_once, on_shortage)
    await patient(lambda content: disk.replace("floors", content), b"x")
    assert (disk.load("floors"), len(counted)) == (b"x", 3)
    with pytest.raises(FileNotFoundError):
        await patient(lambda path: disk.open(path).close(), "missing")


class FewDescriptors(MemoryDisk):
    """A disk whose process has four descriptors."""

    left = 4

    def open(self, path: str, *, create: bool = False) -> File:
        if self.left == 0:
            raise OSError(errno.EMFILE, "Too many open files")
        self.left -= 1
        file = super().open(path, create=create)
        file.close = self._closed  # type: ignore[method-assign]
        return file

    def _closed(self) -> None:
        self.left += 1


def test_cache_closes_its_oldest_files_to_open_another() -> None:
    disk = FewDescriptors()
    cache = FileCache(disk)
    for number in range(40):
        cache.get(str(number), create=True)
    cache.close()
    assert disk.left == 4
    disk.left = 0
    with pytest.raises(OSError, match="Too many open files"):
        cache.get("0")


@pytest.mark.parametrize("free", [32, 33, 39, 49])
def test_node_starts_with_fewer_descriptors_than_segments(tmp_path: Path, free: int) -> None:
    disk, count = RealDisk(tmp_path), 100
    with opened(disk) as node:
        for _ in range(count):
            stored(node.store, batch(bytes(600)))
    with few_descriptors(free), opened(disk) as node:
        assert node.store.log.synced_position == node.store.log.next_position
        assert len(bodies(node.store)) == count


def test_indexes_are_rebuilt_with_fewer_descriptors_than_segments(tmp_path: Path) -> None:
    disk, count = RealDisk(tmp_path), 100
    with opened(disk) as node:
        for _ in range(count):
            stored(node.store, batch(bytes(600)))
    with few_descriptors(free=32):
        fsck = Fsck(disk, 0)
        assert fsck.run().batches == count
        assert fsck.repair()
    assert Fsck(disk, 0).run().problem_count == 0


@contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """Let the process open `free` more files, at most, in the body."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
