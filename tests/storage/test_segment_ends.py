"""A last segment that is too short, after a crash during a cut or on a full disk.

Goal: no interrupted cut leaves a segment that followers can't copy, and two logs with different
ends of their last segments continue together, with the same bytes and valid indexes.
Method: the real files with system calls that fail; the log on a disk in memory; three real nodes in
one process (tests/storage/replicas.py), one of which gets such a segment while it is stopped.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from batonmq._core.records import Message
from batonmq.errors import DataLoss
from batonmq_server.storage.core.commitlog import CommitLog, PositionRange, segment_path
from batonmq_server.storage.core.files import FileCache
from batonmq_server.storage.core.fsck import Fsck
from batonmq_server.storage.disk import RealDisk
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import batch, bodies, open_store, stored
from tests.storage.replicas import Replica, Scene

SIZE = 64 * 1024
CALLS = ("ftruncate", "posix_fallocate", "fsync")


def copy(log: CommitLog, data: bytes, segment: PositionRange) -> None:
    log.copy(data, segment, log.next_position + len(data))


def opened(disk: MemoryDisk | RealDisk) -> CommitLog:
    return CommitLog(disk, FileCache(disk), SIZE)


def fail_call(patch: pytest.MonkeyPatch, number: int, error: int) -> list[str]:
    """Let the call with this number that changes a file fail; return the names of all calls."""
    calls: list[str] = []
    for name in CALLS:
        real = getattr(os, name)

        def call(*arguments: Any, name: str = name, real: Any = real) -> Any:
            calls.append(name)
            if len(calls) == number:
                raise OSError(error, os.strerror(error))
            return real(*arguments)

        patch.setattr(os, name, call)
    return calls


def test_cut_without_space_to_allocate_still_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RealDisk(tmp_path).create("log/x", SIZE)
    file.write(0, [b"keep, torn"])

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert file.cut(4) == 6
    assert file.size == SIZE
    assert file.read(0, SIZE) == b"keep".ljust(SIZE, b"\0")
    file.close()


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_log_continues_like_the_other_one_after_a_cut_interrupted_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    segment = 0, SIZE
    log = opened(RealDisk(tmp_path))
    copy(log, b"a" * 1_000, segment)
    copy(log, b"b" * 1_000, segment)
    with monkeypatch.context() as patch:
        calls = fail_call(patch, number, errno.EIO)
        with pytest.raises(OSError, match="Input/output"):
            log.truncate(1_000)
        assert len(calls) == number
    log.close()
    log = opened(RealDisk(tmp_path))  # recovery finds the first 1,000 bytes good
    log.truncate(1_000)
    copy(log, b"c" * 2_000, segment)
    assert log.read(0, 4_000) == (b"a" * 1_000 + b"c" * 2_000).ljust(4_000, b"\0")
    assert log.end_position == (tmp_path / segment_path(0)).stat().st_size == SIZE
    log.close()


def test_removed_segment_is_not_allocated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(RealDisk(tmp_path))
    for number in range(3):
        copy(log, b"a" * SIZE, (number * SIZE, (number + 1) * SIZE))
    with monkeypatch.context() as patch:
        calls = fail_call(patch, 0, errno.EIO)
        assert log.truncate(SIZE - 10) == 2 * SIZE + 10
    assert calls.count("posix_fallocate") == 1
    log.close()


@pytest.mark.parametrize(("mine", "theirs"), [(1_000, SIZE), (SIZE, 1_000), (SIZE, 2 * SIZE)])
def test_last_segment_gets_the_end_that_it_has_in_the_other_log(mine: int, theirs: int) -> None:
    disk = MemoryDisk()
    log = opened(disk)
    copy(log, b"a" * 700, (0, mine))
    copy(log, b"b" * 300, (0, theirs))
    assert (log.next_position, log.end_position) == (1_000, theirs)
    again = opened(disk.killed())
    assert again.end_position == theirs
    assert again.read(0, 1_001) == (b"a" * 700 + b"b" * 300).ljust(min(theirs, 1_001), b"\0")


def test_segment_ends_where_the_other_log_begins_the_next_one() -> None:
    disk = MemoryDisk()
    log = opened(disk)
    copy(log, b"a" * 1_000, (0, SIZE))
    copy(log, b"b" * 10, (1_000, 1_000 + SIZE))
    again = opened(disk.killed())
    assert again.end_position == 1_000 + SIZE
    assert (again.read(0, SIZE), again.read(1_000, 10)) == (b"a" * 1_000, b"b" * 10)


@pytest.mark.parametrize("segment", [(0, 999), (1, SIZE), (999, SIZE), (1_001, SIZE)])
def test_segment_that_does_not_follow_changes_nothing(
    segment: tuple[int, int],
) -> None:
    disk = MemoryDisk()
    log = opened(disk)
    copy(log, b"a" * 1_000, (0, SIZE))
    with pytest.raises(DataLoss):
        copy(log, b"b", segment)
    assert (log.next_position, log.end_position) == (1_000, SIZE)
    assert bytes(disk.files[segment_path(0)].content) == (b"a" * 1_000).ljust(SIZE, b"\0")


@pytest.mark.parametrize("end", [1_024, 4_096])
def test_key_index_runs_end_at_the_final_end_of_the_segment(end: int) -> None:
    """As if the segment had been created with that size: a rebuilt index must be equal."""
    disk = MemoryDisk()
    first = open_store(disk, segment_bytes=2_048).store
    stored(first, keyed(0))
    copy(first.log, b"", (0, end))
    assert first.log.end_position == end
    for number in range(1, 40):
        stored(first, keyed(number))
    rebuilt = open_store(disk.killed(), segment_bytes=2_048).store
    assert bodies(rebuilt) == [b"%d" % number for number in range(40)]
    one, other = (store.keys.unsaved(store.log.next_position) for store in (first, rebuilt))
    assert len(one.ended) > 0
    assert [run.extent for run in one.ended] == [run.extent for run in other.ended]
    assert one.open_run == other.open_run


def keyed(number: int) -> bytes:
    return batch(Message(b"%d" % number, keys=(f"key-{number}",)))


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def shorten(node: Replica) -> None:
    """Cut the last segment of a stopped node after its last batch."""
    last = max((node.folder / "log").iterdir())
    os.truncate(last, len(last.read_bytes().rstrip(b"\0")))


def assert_good(node: Replica) -> None:
    """Run fsck on a stopped node."""
    report = Fsck(RealDisk(node.folder), 0).run()
    assert not report.problems


async def wait_following(scene: Scene) -> None:
    """Wait until all nodes follow without a restart; their indexes match their logs."""
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()
    assert not [name for name, node in scene.nodes.items() if node.ended.is_set()]
    await scene.stop()
    for node in scene.nodes.values():
        assert_good(node)


async def test_follower_with_a_short_segment_follows_again(scene: Scene) -> None:
    await scene.start("a", "b", "c")
    leader = await scene.leader()
    await scene.wait_in_sync("a", "b", "c")
    await leader.append(*map(keyed, range(3)))
    await scene.wait_equal()
    follower = next(node for node in scene.nodes.values() if node is not leader)
    await follower.stop()
    shorten(follower)
    await scene.start(follower.name)
    await leader.append(*map(keyed, range(3, 6)))
    await scene.wait_in_sync("a", "b", "c")
    assert await leader.bodies() == numbers(6)
    await wait_following(scene)


async def test_followers_follow_a_leader_with_a_short_segment(scene: Scene) -> None:
    await scene.start("a", "b", "c")
    first = await scene.leader()
    await scene.wait_in_sync("a", "b", "c")
    await first.append(*map(keyed, range(3)))
    await scene.wait_equal()
    for name in sorted(scene.nodes.keys() - {first.name}):
        await scene.nodes[name].stop()
    await scene.wait_in_sync(first.name)
    await first.stop()
    shorten(first)
    await scene.start(first.name)  # no other node may be elected
    leader = await scene.leader()
    await scene.start(*sorted(scene.nodes.keys() - {first.name}))
    await scene.wait_in_sync("a", "b", "c")
    await leader.append(*map(keyed, range(3, 6)))
    assert await leader.bodies() == numbers(6)
    assert len(list((leader.folder / "log").iterdir())) == 2
    await wait_following(scene)
