"""Goal: a data directory is used by one process, has a rising epoch, and a report of each start.

Method: a temporary folder is opened, closed and damaged in between.
"""

from __future__ import annotations

import json
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from batonmq.errors import DataLoss
from batonmq_server.storage.core.recovery import decode_synced
from batonmq_server.storage.disk import InUse
from batonmq_server.storage.node import StorageNode, open_directory
from tests.storage.batches import TOPIC_ID, append, batch, bodies


def open_node(folder: Path, *, accept_loss: bool = False) -> AbstractContextManager[StorageNode]:
    times = iter(range(1_000, 100_000, 7))
    return open_directory(
        folder,
        segment_bytes=4_096,
        monotonic_ms=lambda: next(times),
        accept_loss=accept_loss,
    )


def synced(node: StorageNode, *batches: bytes) -> None:
    append(node.store, *batches)
    unsynced = node.store.log.unsynced()
    node.sync(unsynced)
    node.store.synced(unsynced.position)


def segment(folder: Path) -> Path:
    return folder / "log" / f"{0:020d}"


def test_stored_batches_are_there_after_a_restart(tmp_path: Path) -> None:
    with open_node(tmp_path) as node:
        synced(node, batch(b"a"), batch(b"b"))
    with open_node(tmp_path) as node:
        assert bodies(node.store) == [b"a", b"b"]


def test_epoch_rises_with_each_start(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        with open_node(tmp_path) as node:
            epochs.append(node.store.epoch)
    assert epochs == [1, 2, 3]


def test_epoch_that_wrote_nothing_is_not_in_the_history(tmp_path: Path) -> None:
    with open_node(tmp_path) as node:
        synced(node, batch(b"a"))
        end = node.store.log.next_position
    for _ in range(3):
        with open_node(tmp_path) as node:
            history = node.history
    assert history.starts == ((1, 0), (4, end))


def test_unreadable_epochs_fail_the_start(tmp_path: Path) -> None:
    with open_node(tmp_path):
        pass
    (tmp_path / "epochs").write_bytes(b"\x00\x31")
    with pytest.raises(DataLoss) as refused, open_node(tmp_path):
        pass
    assert "recovery.json" in refused.value.remedy


def test_directory_with_an_epoch_and_no_history_continues(tmp_path: Path) -> None:
    with open_node(tmp_path) as node:
        synced(node, batch(b"a"))
        end = node.store.log.next_position
    (tmp_path / "epochs").unlink()
    (tmp_path / "epoch").write_bytes(b"\x00\x31")
    with pytest.raises(DataLoss) as refused, open_node(tmp_path):
        pass
    assert "recovery.json" in refused.value.remedy
    (tmp_path / "epoch").write_bytes(b"7")
    with open_node(tmp_path) as node:
        assert node.history.starts == ((7, 0), (8, end))
    assert not (tmp_path / "epoch").exists()
    with open_node(tmp_path) as node:
        assert node.store.epoch == 9


def test_second_process_is_rejected(tmp_path: Path) -> None:
    with open_node(tmp_path), pytest.raises(InUse), open_node(tmp_path):
        pass


def test_recovery_report_is_written(tmp_path: Path) -> None:
    with open_node(tmp_path) as node:
        synced(node, batch(b"a", b"b"))
        end = node.store.log.next_position
    with segment(tmp_path).open("r+b") as file:
        file.seek(end)
        file.write(b"torn")
    with open_node(tmp_path) as node:
        report = node.report
    assert json.loads((tmp_path / "recovery.json").read_text()) == {
        "epoch": 2,
        "first_position": 0,
        "next_position": end,
        "synced_position": end,
        "checkpoint_position": 0,
        "rebuilt": "there is no checkpoint",
        "scanned_bytes": end,
        "batches": 1,
        "messages": 2,
        "queues": 1,
        "producers": 0,
        "truncated_bytes": 4,
        "end_reason": report.end_reason,
        "elapsed_ms": 7,
    }
    assert report.end_reason.startswith("not a batch of version 1: magic")


def test_synced_position_is_written_after_each_sync(tmp_path: Path) -> None:
    with open_node(tmp_path) as node:
        synced(node, batch(b"a"))
        end = node.store.log.next_position
        append(node.store, batch(b"b"))
        assert decode_synced((tmp_path / "synced").read_bytes()) == end


def test_damage_of_acknowledged_batches_fails_the_start(tmp_path: Path) -> None:
    with open_node(tmp_path) as node:
        synced(node, batch(b"a"), batch(b"b"))
    content = bytearray(segment(tmp_path).read_bytes())
    content[len(batch(b"a")) + 100] ^= 1
    segment(tmp_path).write_bytes(content)
    with pytest.raises(DataLoss) as refused, open_node(tmp_path):
        pass
    assert refused.value.facts == {"position": str(len(batch(b"a")))}
    assert segment(tmp_path).read_bytes() == content
    with open_node(tmp_path, accept_loss=True) as node:
        assert bodies(node.store) == [b"a"]


@pytest.mark.parametrize("lost", [("synced",), ("synced", "consumequeue")])
def test_checkpoint_replaces_a_lost_synced_position(tmp_path: Path, lost: tuple[str, ...]) -> None:
    """This holds also after a failed start, which may have removed the checkpoint."""
    with open_node(tmp_path) as node:
        synced(node, batch(b"a"), batch(b"b"), batch(b"c"))
        node.checkpointing.run()
    content = bytearray(segment(tmp_path).read_bytes())
    content[len(batch(b"a")) + 100] ^= 1
    segment(tmp_path).write_bytes(content)
    for name in lost:
        path = tmp_path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if len(lost) == 1:
        with open_node(tmp_path) as node:
            assert node.report.synced_position == 3 * len(batch(b"a"))
            assert node.store.offsets((TOPIC_ID, 0)).next_offset == 3, "nothing was cut"
        return
    for _ in range(2):
        with pytest.raises(DataLoss), open_node(tmp_path):
            pass
    assert segment(tmp_path).read_bytes() == content


def test_node_starts_without_a_synced_position(tmp_path: Path) -> None:
    with open_node(tmp_path) as node:
        synced(node, batch(b"a"))
    (tmp_path / "synced").unlink()
    with open_node(tmp_path) as node:
        assert bodies(node.store) == [b"a"]
