"""Goal: progress that lost confirmed writes is detected at the start and by `verify`.

Method: a real store with changes as a node writes them. Bits of LMDB's two meta pages are flipped:
these pages select the valid state, and have no checksums. Files are restored from earlier copies.
"""

from __future__ import annotations

import os
import struct
from contextlib import nullcontext, suppress
from pathlib import Path

import lmdb
import pytest

from batonmq.errors import DataLoss
from batonmq_server.offsets import newest_position
from batonmq_server.offsets.codec import seal, unseal
from batonmq_server.offsets.core.change_log import ChangeLog
from batonmq_server.offsets.disk import LmdbDisk, set_aside_damage
from batonmq_server.offsets.newest_position import FILE, SLOT_BYTES, NewestPosition
from batonmq_server.offsets.persistence import next_change
from batonmq_server.offsets.verify import verify
from batonmq_server.runtime.replication.position import NO_POSITION, ReplicaPosition

PAGE_BYTES = os.sysconf("SC_PAGESIZE")
TXNID_AT = 144
"""Place of the number of the write in a meta page."""
KEY = b"group\0topic\0broker\0000"


def write(disk: LmdbDisk, changes: ChangeLog, epoch: int, value: bytes) -> None:
    change = next_change(changes, epoch, [(KEY, seal(KEY, value))])
    disk.write_blocking(change.entries)
    changes.append(change)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with three writes; the newest value is 43."""
    changes = ChangeLog((), 0)
    with LmdbDisk(tmp_path) as disk:
        for value in (b"41", b"42", b"43"):
            write(disk, changes, 1, value)
    return tmp_path


def data(folder: Path) -> Path:
    return folder / "progress" / "data.mdb"


def value(folder: Path) -> bytes:
    with LmdbDisk(folder) as disk:
        return unseal(KEY, dict(disk.read())[KEY])


def newest_page(content: bytes | bytearray) -> int:
    """Return the place of the meta page that LMDB uses."""
    txnids = [struct.unpack_from("<Q", content, at + TXNID_AT)[0] for at in (0, PAGE_BYTES)]
    return PAGE_BYTES * txnids.index(max(txnids))


def roll_back(folder: Path) -> None:
    """Let LMDB use the older meta page, as after flips in the number of the newer one."""
    content = bytearray(data(folder).read_bytes())
    struct.pack_into("<Q", content, newest_page(content) + TXNID_AT, 0)
    data(folder).write_bytes(content)


def test_no_flipped_bit_in_the_number_of_a_meta_page_reverts_a_write(folder: Path) -> None:
    original, refusals = data(folder).read_bytes(), 0
    for bit in range(64):
        for page in (0, PAGE_BYTES):
            content = bytearray(original)
            content[page + TXNID_AT + bit // 8] ^= 1 << bit % 8
            data(folder).write_bytes(content)
            try:
                with LmdbDisk(folder) as disk:
                    assert unseal(KEY, dict(disk.read())[KEY]) == b"43"
            except DataLoss:
                refusals += 1
    assert refusals > 60


def test_replica_that_was_rolled_back_starts_empty(folder: Path) -> None:
    """The replica then copies the leader, as a node with a lost disk does."""
    roll_back(folder)
    set_aside_damage(folder)
    with LmdbDisk(folder) as disk:
        assert list(disk.read()) == []
    assert (folder / "progress.damaged" / FILE).exists()


def test_error_names_both_versions_and_the_remedy(folder: Path) -> None:
    roll_back(folder)
    with pytest.raises(DataLoss, match="version 2 of epoch 1, and version 3 of epoch 1") as raised:
        LmdbDisk(folder)
    assert f"remove {folder / 'progress' / FILE}" in raised.value.remedy
    assert raised.value.facts["confirmed"] == "3"
    with pytest.raises(DataLoss, match="was rolled back"):
        verify(folder / "progress")
    (folder / "progress" / FILE).unlink()
    assert value(folder) == b"42"


def test_verify_beside_a_node_that_writes_reports_no_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node writes just after `verify` has read the position of the state."""
    changes = ChangeLog(((1, 1),), 3)
    with LmdbDisk(folder) as disk:

        def read_then_write(_: lmdb.Environment) -> ReplicaPosition:
            position = newest_position.read_position(disk._environment)
            write(disk, changes, 1, b"44")
            return position

        monkeypatch.setattr("batonmq_server.offsets.verify.read_position", read_then_write)
        # LMDB opens a folder once in a process; `verify` runs in one of its own.
        monkeypatch.setattr(lmdb, "open", lambda *_, **__: nullcontext(disk._environment))
        verify(folder / "progress")
    assert changes.position.version == 4


def test_older_copy_of_the_data_file_is_refused(folder: Path) -> None:
    older = data(folder).read_bytes()
    changes = ChangeLog(((1, 1),), 3)
    with LmdbDisk(folder) as disk:
        write(disk, changes, 1, b"44")
    data(folder).write_bytes(older)
    with pytest.raises(DataLoss, match="was rolled back"):
        LmdbDisk(folder)


def test_crash_between_the_write_and_its_record_is_no_rollback(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ChangeLog(((1, 1),), 3)

    def crash(_: NewestPosition, __: ReplicaPosition) -> None:
        raise OSError("the process crashes here")

    with monkeypatch.context() as patch, LmdbDisk(folder) as disk:
        patch.setattr(NewestPosition, "record", crash)
        with suppress(OSError):
            write(disk, changes, 1, b"44")
    verify(folder / "progress")
    assert value(folder) == b"44"


@pytest.mark.parametrize("crash_at", [1, 2])
def test_crash_while_a_newer_epoch_replaces_the_state_is_no_rollback(
    folder: Path, crash_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of the leader may be at a lower version, as after a change that was dropped."""
    change = next_change(ChangeLog((), 0), 1, [(KEY, seal(KEY, b"leader"))])
    stored = [(key, one) for key, one in change.entries if one is not None]
    real, count = NewestPosition.record, 0

    def record(self: NewestPosition, position: ReplicaPosition) -> None:
        nonlocal count
        count += 1
        if count == crash_at:
            raise OSError("the process crashes here")
        real(self, position)

    with monkeypatch.context() as patch, LmdbDisk(folder) as disk:
        patch.setattr(NewestPosition, "record", record)
        with pytest.raises(OSError, match="crashes here"):
            disk.write_blocking(stored, replace=True)
    verify(folder / "progress")
    assert value(folder) == (b"43" if crash_at == 1 else b"leader")


def test_every_bit_of_the_record_may_flip(folder: Path) -> None:
    """One slot is lost; the older one never marks an intact state as damaged."""
    path = folder / "progress" / FILE
    original = path.read_bytes()
    for at in (*range(40), *range(SLOT_BYTES, SLOT_BYTES + 40)):
        for bit in range(8):
            content = bytearray(original)
            content[at] ^= 1 << bit
            path.write_bytes(content)
            newest_position.check_not_rolled_back(folder / "progress", ReplicaPosition(1, 3))
    path.write_bytes(bytes(2 * SLOT_BYTES))
    assert value(folder) == b"43"


def test_progress_of_an_earlier_version_gets_a_record(folder: Path) -> None:
    (folder / "progress" / FILE).unlink()
    assert value(folder) == b"43"
    newest = NewestPosition(folder / "progress")
    assert newest.position == ReplicaPosition(1, 3)
    newest.close()


def test_empty_store_has_no_position(tmp_path: Path) -> None:
    with LmdbDisk(tmp_path) as disk:
        assert list(disk.read()) == []
    newest = NewestPosition(tmp_path / "progress")
    assert newest.position == NO_POSITION
    newest.close()
