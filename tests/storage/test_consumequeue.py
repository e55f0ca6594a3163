"""Goal: entry N of a queue is that of the batch with offset N, in memory or in a file.

Method: a disk in memory, few entries per file, and a plain list beside the queue.
"""

from __future__ import annotations

import errno
import struct

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batonmq_server.storage.core.consumequeue import ConsumeQueue, folder_of
from batonmq_server.storage.core.files import FileCache
from batonmq_server.testing.memory_disks import MemoryDisk, MemoryFile

FOLDER = folder_of("orders", 7, 3)


def open_queue(disk: MemoryDisk, entries_per_file: int = 50, first_offset: int = 0) -> ConsumeQueue:
    cache = FileCache(disk, files_max=2)
    return ConsumeQueue(cache, FOLDER, first_offset=first_offset, entries_per_file=entries_per_file)


def tags(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, ">i4")


@given(
    counts=st.lists(st.integers(1, 3_000), min_size=1, max_size=6),
    flush_after=st.sets(st.integers(0, 5)),
    first_offset=st.sampled_from([0, 17, 1_000]),
)
def test_entries_are_read_back_by_offset(
    counts: list[int], flush_after: set[int], first_offset: int
) -> None:
    queue = open_queue(MemoryDisk(), entries_per_file=700, first_offset=first_offset)
    model: list[tuple[int, int, int]] = []
    for number, count in enumerate(counts):
        values = range(-number, count - number)
        queue.append(1_000 * number, 10 + number, tags(*values))
        model += [(1_000 * number, 10 + number, value) for value in values]
        if number in flush_after:
            queue.flush()
    queue.make_visible(queue.next_offset)
    assert queue.next_offset == first_offset + len(model)
    for begin, end in ((0, len(model)), (len(model) // 3, len(model) // 2), (0, 0)):
        entries = queue.read(first_offset + begin, first_offset + end)
        columns = zip(entries.positions, entries.sizes, entries.tags, strict=True)
        assert [tuple(map(int, row)) for row in columns] == model[begin:end]


def test_entry_has_twenty_bytes_at_twenty_times_its_offset() -> None:
    disk = MemoryDisk()
    queue = open_queue(disk, entries_per_file=2)
    queue.append(4_096, 128, tags(2_598_919, -1, -2_147_483_648))
    queue.flush()
    first, second = (disk.files[f"{FOLDER}/{at:020d}"].content for at in (0, 40))
    assert first == struct.pack(">qiqqiq", 4_096, 128, 2_598_919, 4_096, 128, -1)
    assert second == bytes.fromhex("0000000000001000 00000080 ffffffff80000000")


def test_entries_are_visible_only_after_make_visible() -> None:
    queue = open_queue(MemoryDisk())
    queue.append(0, 10, tags(1, 2))
    queue.append(10, 10, tags(3))
    assert (queue.visible_offset, queue.next_offset) == (0, 3)
    queue.make_visible(2)
    assert queue.visible_offset == 2


def test_full_disk_loses_no_entry() -> None:
    disk = MemoryDisk()
    file = disk.files[f"{FOLDER}/{0:020d}"] = MemoryFile()
    file.failure = OSError(errno.ENOSPC, "no space")
    queue = open_queue(disk, entries_per_file=100_000)
    for number in range(5):
        queue.append(number, 1, tags(*range(3_000)))
    assert file.size == 0
    file.failure = None
    queue.append(5, 1, tags(*range(3_000)))
    assert file.size > 0
    queue.make_visible(queue.next_offset)
    assert queue.read(0, 18_000).positions.tolist() == [n for n in range(6) for _ in range(3_000)]


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["append", "flush", "trim"]), st.integers(1, 300)),
        min_size=1,
        max_size=12,
    )
)
@example([("append", 150), ("append", 150), ("trim", 10), ("flush", 1)])
def test_trimmed_entries_leave_the_disk_and_the_others_stay(
    steps: list[tuple[str, int]],
) -> None:
    disk = MemoryDisk()
    queue = open_queue(disk, entries_per_file=100)
    model: list[int] = []  # position of each message, one batch per append
    position = first = 0
    for step, number in steps:
        if step == "append":
            queue.append(position, 10, tags(*range(number)))
            queue.make_visible(queue.next_offset)
            model += [position] * number
            position += 10
        elif step == "flush":
            queue.flush()
        else:
            cut = number % (position + 11)
            for path in queue.trim_before(cut):
                queue._files.forget(path)
                disk.remove(path)
            first = max(first, sum(at < cut for at in model))
        assert (queue.first_offset, queue.next_offset) == (first, len(model))
        assert queue.read(first, len(model)).positions.tolist() == model[first:]
        files = [int(name) // 2_000 for name in disk.names(FOLDER)]
        assert all(number >= first // 100 for number in files), (files, first)
