"""Goal: a key finds exactly the entries that were indexed under it, in memory or in files.

Method: a plain list is the model. Runs and segments are small, so that few batches make many. The
index is searched before, between and after checkpoints, and after it was opened again.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq_server.storage.core.files import BadIndex, FileCache
from batonmq_server.storage.core.keyindex import (
    FENCE_STEP,
    DamagedRun,
    KeyIndex,
    UnsavedRuns,
    encode_run,
    open_path,
)
from batonmq_server.testing.memory_disks import MemoryDisk

SEGMENT_BYTES = 1_000
Entry = tuple[int, int, int, int]
"""Topic id, key hash, position, index in the batch."""


def open_index(disk: MemoryDisk, first_position: int = 0, run_entries: int = 5) -> KeyIndex:
    return KeyIndex(
        disk,
        FileCache(disk),
        lambda position: (position // SEGMENT_BYTES + 1) * SEGMENT_BYTES,
        first_position,
        run_entries=run_entries,
    )


def add(index: KeyIndex, position: int, topic_id: int, keys: list[tuple[int, int]]) -> list[Entry]:
    """Index a batch of 100 bytes; return its entries."""
    columns = (
        np.array([at for at, _ in keys], np.uint16),
        np.array([key_hash for _, key_hash in keys], np.uint32),
    )
    index.append((position, position + 100), topic_id, columns, 1_000 + position)
    return [(topic_id, key_hash, position, at) for at, key_hash in keys]


def matches(index: KeyIndex, topic_id: int, key_hash: int) -> list[tuple[int, int]]:
    """Return positions and indexes: newest run first, oldest first within a run."""
    return [
        (int(position), int(at))
        for part in index.find(topic_id, key_hash)
        for position, at in zip(part.positions, part.indexes, strict=True)
    ]


def save(disk: MemoryDisk, index: KeyIndex, position: int) -> UnsavedRuns:
    """Write and record what a checkpoint at `position` writes."""
    unsaved = index.unsaved(position)
    for run in unsaved.ended:
        disk.replace(run.path, encode_run(run))
    path = open_path(unsaved.open_run.extent.first_position)
    file = disk.open(path, create=True)
    file.write(unsaved.rows_from * unsaved.rows.itemsize, [unsaved.rows.tobytes()])
    index.saved(unsaved)
    return unsaved


batches = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.lists(st.tuples(st.integers(0, 65_534), st.integers(1, 4)), max_size=7),
    ),
    max_size=40,
)


@given(batches=batches, save_after=st.sets(st.integers(0, 39)), reopen=st.booleans())
def test_each_entry_is_found_and_no_other(
    batches: list[tuple[int, list[tuple[int, int]]]], save_after: set[int], reopen: bool
) -> None:
    disk = MemoryDisk()
    index, model = open_index(disk), list[Entry]()
    for number, (topic_id, keys) in enumerate(batches):
        model += add(index, number * 100, topic_id, keys)
        if number in save_after:
            unsaved = save(disk, index, number * 100 + 100)
            if reopen:
                index = open_index(disk)
                index.resume(unsaved.open_run, 0)
    for topic_id in range(1, 4):
        for key_hash in range(1, 6):
            expected = [
                (at, i) for topic, key, at, i in model if (topic, key) == (topic_id, key_hash)
            ]
            assert sorted(matches(index, topic_id, key_hash)) == sorted(expected)


def test_runs_are_found_newest_first_with_their_times() -> None:
    disk = MemoryDisk()
    index = open_index(disk, run_entries=2)
    for number in range(7):
        add(index, number * 100, 1, [(0, 9)])
    save(disk, index, 700)
    stretches = [part.extent for part in index.find(1, 9)]
    assert [(s.first_unix_ms, s.last_unix_ms) for s in stretches] == [
        (1_600, 1_600), (1_400, 1_500), (1_200, 1_300), (1_000, 1_100),
    ]  # fmt: skip


def test_no_run_covers_two_segments() -> None:
    disk = MemoryDisk()
    index = open_index(disk, run_entries=4)
    for number in range(25):
        add(index, number * 100, 1, [(0, number + 1)])
    save(disk, index, 2_500)
    names = [int(name) for name in disk.names("keyindex") if "." not in name]
    assert names == [0, 400, 800, 1_000, 1_400, 1_800, 2_000]
    assert index.drop_before(1_000) == [f"keyindex/{at:020d}" for at in (0, 400, 800)]
    assert matches(index, 1, 4) == []
    assert matches(index, 1, 11) == [(1_000, 0)]


def test_search_covers_a_run_with_many_fences() -> None:
    disk = MemoryDisk()
    index = open_index(disk, run_entries=3 * FENCE_STEP + 1)
    hashes = [1] + [7] * (2 * FENCE_STEP) + list(range(10, 10 + FENCE_STEP))
    add(index, 0, 1, list(enumerate(hashes)))
    save(disk, index, 100)
    assert disk.names("keyindex")[0] == f"{0:020d}"
    assert matches(index, 1, 7) == [(0, at) for at in range(1, 1 + 2 * FENCE_STEP)]
    assert matches(index, 1, 1) == [(0, 0)]
    assert matches(index, 1, 9 + FENCE_STEP) == [(0, 3 * FENCE_STEP)]
    assert matches(index, 1, 8) == matches(index, 1, 10 + FENCE_STEP) == matches(index, 2, 7) == []


def test_search_finds_a_flipped_bit_in_everything_that_it_reads() -> None:
    """Every bit of a run of several blocks; a search that does not read it finds all."""
    disk = MemoryDisk()
    index = open_index(disk, run_entries=2 * FENCE_STEP + 3)
    for number in range(3):
        add(index, 100 * number, 1, [(at, 7 + at % 2) for at in range(FENCE_STEP)])
    save(disk, index, 300)
    path = disk.names("keyindex")[0]
    expected = {key: matches(index, 1, key) for key in (1, 7, 8)}
    content, undetected = disk.load(f"keyindex/{path}"), []
    for at in range(52, len(content), 7):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        disk.replace(f"keyindex/{path}", bytes(damaged))
        noticed = 0
        for key, entries in expected.items():
            again = open_index(disk, run_entries=2 * FENCE_STEP + 3)
            again.resume(index.unsaved(300).open_run, 0)
            try:
                assert matches(again, 1, key) == entries
            except DamagedRun as error:
                assert error.extent.first_position == 0
                noticed += 1
        if not noticed:
            undetected.append(at)
    assert not undetected


@pytest.mark.parametrize("spoiled", ["run missing", "run cut", "run head", "open row", "open cut"])
def test_damaged_files_are_rejected(spoiled: str) -> None:
    disk = MemoryDisk()
    index = open_index(disk)
    for number in range(8):
        add(index, number * 100, 1, [(0, number + 1)])
    unsaved = save(disk, index, 800)
    run, rows = disk.files[f"keyindex/{0:020d}"], disk.files[open_path(500)]
    if spoiled == "run missing":
        disk.remove(f"keyindex/{0:020d}")
    elif spoiled == "run cut":
        del run.content[-1:]
    elif spoiled == "run head":
        run.content[20] ^= 1
    elif spoiled == "open row":
        rows.content[3] ^= 1
    else:
        del rows.content[-1:]
    with pytest.raises(BadIndex):
        open_index(disk).resume(unsaved.open_run, 0)


def test_files_that_no_checkpoint_refers_to_are_removed() -> None:
    disk = MemoryDisk()
    index = open_index(disk)
    for number in range(3):
        add(index, number * 100, 1, [(0, 9)])
    unsaved = save(disk, index, 300)
    for number in range(3, 8):
        add(index, number * 100, 1, [(0, 9)])
    save(disk, index, 800)  # its checkpoint was never written
    again = open_index(disk)
    again.resume(unsaved.open_run, 0)
    assert disk.names("keyindex") == [f"{0:020d}.open"]
    assert matches(again, 1, 9) == [(0, 0), (100, 0), (200, 0)]


def test_ended_runs_without_a_checkpoint_are_written() -> None:
    disk = MemoryDisk()
    index = open_index(disk, run_entries=1)
    for number in range(30):
        add(index, number * 100, 1, [(0, 9)])
    assert len(disk.names("keyindex")) >= 20
    assert sorted(matches(index, 1, 9)) == [(number * 100, 0) for number in range(30)]
