"""Goal: a replica detects damaged progress, sets it aside and starts empty; it does not crash.

Method: a real store with queues; its file is truncated, or bits are flipped, in many places.
Afterwards the store has either all its entries, or none and the damaged file is set aside.
"""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random

import lmdb
import pytest

from batonmq_server.offsets.codec import seal
from batonmq_server.offsets.disk import LmdbDisk, StoredEntry, set_aside_damage
from batonmq_server.offsets.persistence import FORMAT
from batonmq_server.offsets.verify import verify

COUNT = 400


def stored(folder: Path) -> list[StoredEntry]:
    with LmdbDisk(folder) as disk:
        return list(disk.read())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys = [b"group\0topic\0broker\0%d" % number for number in range(COUNT)]
    with LmdbDisk(tmp_path) as disk:
        disk.write_blocking([(FORMAT, b"1")])
        for begin in range(0, COUNT, 50):  # pages are freed and reused
            disk.write_blocking([(key, seal(key, b"x" * 60)) for key in keys[: begin + 50]])
    return tmp_path


def data(folder: Path) -> Path:
    return folder / "progress" / "data.mdb"


def test_undamaged_progress_stays(folder: Path) -> None:
    before = stored(folder)
    set_aside_damage(folder)
    assert stored(folder) == before
    assert len(before) == COUNT + 1


def test_empty_folder_stays_empty(tmp_path: Path) -> None:
    set_aside_damage(tmp_path)
    assert stored(tmp_path) == []


def test_truncated_progress_is_set_aside(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Reading the file would crash the process."""
    with data(folder).open("r+b") as file:
        file.truncate(data(folder).stat().st_size // 2)
    with caplog.at_level(logging.ERROR):
        set_aside_damage(folder)
    assert "progress is damaged" in caplog.text
    assert (folder / "progress.damaged" / "data.mdb").exists()
    assert stored(folder) == []
    with LmdbDisk(folder) as disk:
        disk.write_blocking([(FORMAT, b"1")])
    set_aside_damage(folder)
    assert stored(folder) == [(FORMAT, b"1")]


def test_flipped_bits_of_stored_values_are_detected(folder: Path) -> None:
    before, content = stored(folder), data(folder).read_bytes()
    data(folder).write_bytes(content.replace(b"x" * 60, b"y" + b"x" * 59))
    with pytest.raises(Exception, match="checksum"):
        verify(folder / "progress")
    set_aside_damage(folder)
    assert stored(folder) == []
    assert len(before) == COUNT + 1


@pytest.mark.parametrize("seed", range(8))
def test_check_leaves_either_all_entries_or_none(folder: Path, seed: int) -> None:
    """Eight bits are flipped, outside of the first two pages, which select the valid state."""
    before, content, random = stored(folder), bytearray(data(folder).read_bytes()), Random(seed)
    for _ in range(8):
        at = random.randrange(2 * 4_096, len(content))
        content[at] ^= 1 << random.randrange(8)
    data(folder).write_bytes(content)
    set_aside_damage(folder)
    assert stored(folder) in (before, [])


def test_verifying_writes_nothing(folder: Path) -> None:
    before = data(folder).read_bytes()
    verify(folder / "progress")
    assert data(folder).read_bytes() == before
    with pytest.raises(lmdb.Error):
        verify(folder / "nothing")
