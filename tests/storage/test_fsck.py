"""Goal: fsck calls an undamaged directory clean, finds all damage, and never changes the log.

Method: directories in memory with one damage each; then the command on real directories.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batonmq._core.records import Message
from batonmq_server.storage.core.checkpoint_writer import CheckpointWriter
from batonmq_server.storage.core.consumequeue import ENTRY, folder_of
from batonmq_server.storage.core.fsck import Fsck, FsckReport
from batonmq_server.storage.core.recovery import encode_synced
from batonmq_server.storage.node import SYNCED, StorageNode, open_directory
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import (
    TOPIC,
    TOPIC_ID,
    Opened,
    append,
    batch,
    bodies,
    open_store,
    stored,
)

FIRST = f"log/{0:020d}"
QUEUE_FILE = f"{folder_of(TOPIC, TOPIC_ID, 1)}/{0:020d}"


def filled(count: int = 40, *, with_checkpoint: bool = True) -> Opened:
    opened = open_store(MemoryDisk(), segment_bytes=1_200)
    for number in range(count):
        message = Message(b"%d" % number * 20, keys=(f"k{number}",))
        stored(opened.store, batch(message, queue_id=number % 3))
    if with_checkpoint:
        CheckpointWriter(opened.disk, opened.store, 0).run()
    return opened


def examined(opened: Opened) -> tuple[FsckReport, MemoryDisk]:
    disk = opened.disk.killed()
    before = {path: bytes(file.content) for path, file in disk.files.items()}
    report = Fsck(disk, opened.store.log.synced_position).run()
    assert {path: bytes(file.content) for path, file in disk.files.items()} == before
    return report, disk


def parts(report: FsckReport) -> set[str]:
    return {problem.part for problem in report.problems}


def test_directory_of_a_stopped_node_is_clean() -> None:
    opened = filled()
    report, _ = examined(opened)
    assert (report.problems, report.notes) == ([], [])
    assert (report.batches, report.messages, report.queues) == (40, 40, 3)
    assert report.next_position == opened.store.log.next_position
    assert report.segments == len(opened.disk.names("log"))
    assert report.indexes_compared


def test_directory_of_a_crashed_node_is_clean() -> None:
    opened = filled()
    for number in range(40, 55):
        stored(opened.store, batch(b"%d" % number, queue_id=number % 3))
    opened.store.flush()
    append(opened.store, batch(b"torn" * 10))
    opened.disk.files[f"log/{opened.disk.names('log')[-1]}"].content[-1] = 0
    cut = Opened(opened.disk.power_cut(lambda length: length // 2), opened.store, opened.report)
    report, _ = examined(cut)
    assert report.problems == []
    assert (report.batches, len(report.notes)) == (55, 1)
    assert report.notes[0].startswith("torn tail")


def test_empty_directory_is_clean() -> None:
    report, _ = examined(open_store(MemoryDisk()))
    assert (report.problems, report.notes, report.batches) == ([], [], 0)


def test_missing_checkpoint_is_noted() -> None:
    report, _ = examined(filled(with_checkpoint=False))
    assert report.problems == []
    assert len(report.notes) == 1
    assert not report.indexes_compared


def _flip(path: str, at: int) -> Callable[[MemoryDisk], None]:
    def flip(disk: MemoryDisk) -> None:
        disk.files[path].content[at] ^= 1

    return flip


def _remove(path: str) -> Callable[[MemoryDisk], None]:
    return lambda disk: disk.remove(path)


def _swap_entries(disk: MemoryDisk) -> None:
    content, size = disk.files[QUEUE_FILE].content, ENTRY.itemsize
    content[:size], content[size : 2 * size] = content[size : 2 * size], content[:size]


def _cut(disk: MemoryDisk) -> None:
    del disk.files[QUEUE_FILE].content[-3:]


def _older_checkpoint(disk: MemoryDisk) -> None:
    older = filled(20).disk
    disk.replace("checkpoint", bytes(older.files["checkpoint"].content))


INDEX_DAMAGE = [
    (_flip(QUEUE_FILE, 3), "consumequeue"),
    (_flip(QUEUE_FILE, 25 * 4), "consumequeue"),
    (_swap_entries, "consumequeue"),
    (_cut, "consumequeue"),
    (_remove(QUEUE_FILE), "consumequeue"),
    (_remove("consumequeue"), "consumequeue"),
    (_flip(f"keyindex/{0:020d}", 200), "keyindex"),
    (_remove(f"keyindex/{0:020d}"), "keyindex"),
    (_flip("checkpoint", 30), "checkpoint"),
]


@pytest.mark.parametrize(("spoil", "part"), INDEX_DAMAGE)
def test_damaged_index_is_found_and_repaired(
    spoil: Callable[[MemoryDisk], None], part: str
) -> None:
    opened = filled()
    good = {path: bytes(file.content) for path, file in opened.disk.files.items()}
    spoil(opened.disk)
    disk = opened.disk.killed()
    fsck = Fsck(disk, opened.store.log.synced_position)
    assert parts(fsck.run()) == {part}
    assert fsck.repair()
    assert fsck.report.repaired
    assert {path: bytes(file.content) for path, file in disk.files.items()} == good
    assert Fsck(disk, opened.store.log.synced_position).run().problems == []


@pytest.mark.parametrize("at", [0, 5, 20, 30, 60, 100, 130])
def test_damaged_batch_is_found_and_the_rest_is_examined(at: int) -> None:
    opened = filled()
    third = opened.store.queues[TOPIC_ID, 2].first_position
    opened.disk.files[FIRST].content[third + at] ^= 1
    disk = opened.disk.killed()
    before = {path: bytes(file.content) for path, file in disk.files.items()}
    fsck = Fsck(disk, opened.store.log.synced_position)
    report = fsck.run()
    assert (report.damaged_batches, report.batches) == (1, 39)
    assert report.problems[0].position == third
    assert parts(report) == {"log"}
    assert not fsck.repair()
    assert {path: bytes(file.content) for path, file in disk.files.items()} == before


def test_damage_below_the_checkpoint_is_not_a_torn_tail_even_without_a_synced_position() -> None:
    opened = filled()
    third = opened.store.queues[TOPIC_ID, 2].first_position
    opened.disk.files[FIRST].content[third + 20] ^= 1
    report = Fsck(opened.disk.killed(), 0).run()
    assert (report.damaged_batches, report.batches) == (1, 39)
    assert report.synced_position == report.checkpoint_position == opened.store.log.next_position


def test_missing_segment_is_found() -> None:
    opened = filled()
    middle = opened.disk.names("log")[2]
    opened.disk.remove(f"log/{middle}")
    report, _ = examined(opened)
    assert parts(report) == {"log"}
    assert f"no segment at {int(middle)}" in report.problems[0].detail


def test_log_that_ends_below_what_was_synced_is_found() -> None:
    opened = filled()
    last = opened.disk.names("log")[-1]
    opened.disk.files[f"log/{last}"].content[:] = bytes(1_200)
    report, _ = examined(opened)
    assert [problem.position for problem in report.problems] == [int(last)]


def test_gap_in_the_offsets_is_found() -> None:
    opened = filled(with_checkpoint=False)
    # A batch in place of another one of the same size: only its offset is wrong.
    other = open_store(MemoryDisk(), segment_bytes=1_200)
    for number in range(40):
        queue_id = 1 if number == 2 else number % 3
        message = Message(b"%d" % number * 20, keys=(f"k{number}",))
        stored(other.store, batch(message, queue_id=queue_id))
    opened.disk.files[FIRST].content[:] = other.disk.files[FIRST].content
    report, _ = examined(opened)
    assert parts(report) == {"log"}
    assert any("continues at" in problem.detail for problem in report.problems)


def node_in(folder: Path) -> Any:
    return open_directory(folder, segment_bytes=4_096, monotonic_ms=lambda: 0)


def write(node: StorageNode, *batches: bytes) -> None:
    append(node.store, *batches)
    unsynced = node.store.log.unsynced()
    node.sync(unsynced)
    node.store.synced(unsynced.position)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "batonmq_server.storage.fsck", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_command_prints_a_table_or_json(tmp_path: Path) -> None:
    with node_in(tmp_path) as node:
        write(node, *(batch(b"x" * 100, queue_id=queue_id) for queue_id in range(8)))
        node.checkpointing.run()
    clean = command(tmp_path)
    assert (clean.returncode, clean.stdout.splitlines()[-1]) == (0, "clean")
    with (tmp_path / QUEUE_FILE).open("r+b") as file:
        file.write(b"rubbish")
    spoiled = command(tmp_path, "--format", "json")
    report = json.loads(spoiled.stdout)
    assert (spoiled.returncode, report["clean"], report["problem_count"]) == (1, False, 1)
    assert report["problems"][0]["part"] == "consumequeue"
    assert "--repair" in command(tmp_path).stdout
    repaired = command(tmp_path, "--repair", "--format", "json")
    assert (repaired.returncode, json.loads(repaired.stdout)["repaired"]) == (0, True)
    assert command(tmp_path).returncode == 0
    with node_in(tmp_path) as node:
        assert (node.report.rebuilt, bodies(node.store, 1)) == ("", [b"x" * 100])


def test_command_rejects_a_directory_in_use_and_a_folder_without_a_log(tmp_path: Path) -> None:
    with node_in(tmp_path) as node:
        write(node, batch(b"a"))
        refused = command(tmp_path, "--format", "json")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert json.loads(refused.stderr)["error"]["reason"] == "DATA_DIR_IN_USE"
    (tmp_path / "empty").mkdir()
    none = command(tmp_path / "empty")
    assert (none.returncode, none.stdout) == (1, "")
    assert "NOT_A_DATA_DIR" in none.stderr
    assert list((tmp_path / "empty").iterdir()) == []
    assert command().returncode == 2


def test_damaged_log_is_not_repaired(tmp_path: Path) -> None:
    with node_in(tmp_path) as node:
        write(node, batch(b"a"), batch(b"b"))
        node.checkpointing.run()
    log = tmp_path / FIRST
    content = bytearray(log.read_bytes())
    content[len(batch(b"a")) - 1] ^= 1
    log.write_bytes(content)
    done = command(tmp_path, "--repair")
    assert done.returncode == 1
    assert "can't be repaired here" in done.stdout
    assert log.read_bytes() == content
    assert (tmp_path / SYNCED).read_bytes() == encode_synced(2 * len(batch(b"a")))
