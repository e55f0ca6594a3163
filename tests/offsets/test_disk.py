"""Goal: written entries survive a restart, or the service does not start.

Method: the real disk in a folder of its own; the test damages its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from batonmq._core.queues import GroupQueue
from batonmq.errors import DataLoss
from batonmq_server.offsets.codec import (
    META,
    decode_key,
    decode_progress,
    encode_key,
    encode_progress,
    seal,
    unseal,
)
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.resets import ResetSlot
from batonmq_server.offsets.core.values import Instant, QueueLimits, Tombstone
from batonmq_server.offsets.disk import DataDirInUse, LmdbDisk
from batonmq_server.offsets.persistence import (
    FORMAT,
    RESET,
    TERM,
    TOPIC,
    DurableKey,
    entries_of,
    recover_standalone,
)
from tests.offsets.rules_scene import FORCED, KEY, A, B, Scene, offsets

HISTORY = META + b"history"
NOW = Instant(5, 6)


def life(folder: Path) -> ProgressTable:
    """Return the table of a process that stops at once."""
    with LmdbDisk(folder) as disk:
        return recover_standalone(disk, QueueLimits(), NOW)[1]


def busy() -> Scene:
    """Return a queue with a value in every field."""
    scene = Scene()
    scene.fence(A, 0, initial_offset=3)
    scene.record(1, 3, 20)
    scene.commit(1, 5, offsets((7, 9), (12, 13)))
    scene.fence(B, 1, FORCED, attempt="by-hand", token_min=8)
    scene.record(9, 5, 20)
    scene.commit(9, 6)
    return scene


async def test_written_entries_are_read_in_key_order(tmp_path: Path) -> None:
    with LmdbDisk(tmp_path / "new" / "folder") as disk:
        await disk.write([(b"b", b"2"), (b"a", b"1")])
        await disk.write([(b"b", b"3")])
    with LmdbDisk(tmp_path / "new" / "folder") as disk:
        assert list(disk.read()) == [(b"a", b"1"), (b"b", b"3")]


async def test_entries_of_a_prefix_are_read_after_a_key_and_up_to_a_size(tmp_path: Path) -> None:
    of_prefix = [(b"b%d" % number, bytes(10)) for number in range(5)]
    with LmdbDisk(tmp_path) as disk:
        await disk.write([(b"a", b"1"), *of_prefix, (b"c", b"2")])
        assert await disk.read_prefix(b"b") == of_prefix
        assert await disk.read_prefix(b"b", after=b"a") == of_prefix
        assert await disk.read_prefix(b"b", after=b"b1") == of_prefix[2:]
        assert await disk.read_prefix(b"b", after=b"b1", bytes_max=13) == of_prefix[2:4]
        assert await disk.read_prefix(b"b", after=b"b4") == []
        assert await disk.read_prefix(b"c", after=b"d") == []
        assert await disk.read_prefix(b"b", bytes_max=1) == of_prefix[:1]


def test_second_process_can_not_open_the_folder(tmp_path: Path) -> None:
    with LmdbDisk(tmp_path), pytest.raises(DataDirInUse):
        LmdbDisk(tmp_path)
    LmdbDisk(tmp_path).close()


async def test_map_grows_when_it_is_used_up(tmp_path: Path) -> None:
    entries = [(b"%d" % number, bytes(10_000)) for number in range(100)]
    with closing(LmdbDisk(tmp_path, map_bytes=64 * 1024)) as disk:
        await disk.write(entries)
        assert sorted(disk.read()) == sorted(entries)


async def test_failed_write_writes_nothing(tmp_path: Path) -> None:
    with LmdbDisk(tmp_path) as disk:
        with pytest.raises(lmdb.Error):
            await disk.write([(b"a", b"1"), (b"k" * 1_000, b"a key too long")])
        assert not list(disk.read())


async def test_closed_disk_rejects_writes(tmp_path: Path) -> None:
    disk = LmdbDisk(tmp_path)
    disk.close()
    disk.close()
    with pytest.raises(OSError, match="closed"):
        await disk.write([(b"a", b"1")])


def test_each_restart_begins_a_new_epoch(tmp_path: Path) -> None:
    assert [life(tmp_path).epoch for _ in range(3)] == [1, 2, 3]


async def test_term_and_every_field_of_a_queue_survive_a_restart(tmp_path: Path) -> None:
    scene = busy()
    with LmdbDisk(tmp_path) as disk:
        recover_standalone(disk, QueueLimits(), NOW)
        entries = entries_of(scene.table, scene.resets.history)
        await disk.write([*entries(KEY), *entries(None)])
    table = life(tmp_path)
    scene.restart()
    after = table.query(KEY)
    assert after.last_call_monotonic_ms == NOW.monotonic_ms
    after.last_call_monotonic_ms = scene.queue.last_call_monotonic_ms
    assert after == scene.queue
    assert table.term == 7


async def test_tombstones_of_a_deleted_topic_survive_a_restart(tmp_path: Path) -> None:
    scene = busy()
    with LmdbDisk(tmp_path) as disk:
        recover_standalone(disk, QueueLimits(), NOW)
        scene.delete(4)
        entries = entries_of(scene.table, scene.resets.history)
        await disk.write([*entries(KEY.topic), *entries(KEY)])
    table = life(tmp_path)
    assert (len(table), table.deleted_topic_id(KEY.topic), table.deleted_topic_id("other")) == (
        0,
        4,
        0,
    )
    assert table.state(KEY) == scene.table.state(KEY) == Tombstone(10, 1, scene.now.unix_ms)


def test_keys_round_trip_and_keys_of_a_group_are_adjacent() -> None:
    keys = [
        GroupQueue(group, topic, "b", queue_id)
        for group in ("g", "g-1", "g1")
        for topic in ("t", "t%")
        for queue_id in (0, 65_535)
    ]
    stored = sorted(encode_key(key) for key in keys)
    assert [decode_key(key).group for key in stored] == ["g"] * 4 + ["g-1"] * 4 + ["g1"] * 4
    assert sorted(decode_key(key) for key in stored) == sorted(keys)


@pytest.mark.parametrize("stored", [b"group\0topic\0broker", b"a\0b\0c\0x", b"\xff\0b\0c\01"])
def test_damaged_key_is_data_loss(stored: bytes) -> None:
    with pytest.raises(DataLoss):
        decode_key(stored)


def damaged() -> Iterator[tuple[str, bytes]]:
    scene = busy()
    intact = encode_progress(scene.queue)
    yield "cut", intact[:-1]
    yield "no message", b"\xff" * 20
    yield "empty", b""
    scene.queue.delivered_reserved = scene.queue.committed_offset - 1
    yield "reserved below committed", encode_progress(scene.queue)
    scene = busy()
    scene.queue.committed_offset = 9
    yield "acked below committed", encode_progress(scene.queue)
    yield "deleted without a token", encode_progress(Tombstone(0, 1, 0))
    yield "deleted without a reset", encode_progress(Tombstone(2, 0, 0))


@pytest.mark.parametrize(("case", "stored"), list(damaged()))
def test_damaged_progress_is_data_loss(case: str, stored: bytes) -> None:
    with pytest.raises(DataLoss, match="readers/news/broker-a/3"):
        decode_progress(KEY, stored)


@pytest.mark.parametrize(
    "entries",
    [
        [(FORMAT, b"1")],
        [(HISTORY, seal(HISTORY, b"1"))],
        [(TERM, seal(TERM, b""))],
        [(TOPIC + b"news", seal(TOPIC + b"news", b"x"))],
        [(RESET + b"readers\x000", seal(RESET + b"readers\x000", b"\xff"))],
        [(encode_key(KEY), seal(encode_key(KEY), encode_progress(busy().queue)))],
        [(TERM, b"1")],
    ],
    ids=["format", "history", "term", "topic", "reset", "queues without position", "no checksum"],
)
def test_contradicting_entries_are_rejected(
    tmp_path: Path, entries: list[tuple[bytes, bytes]]
) -> None:
    with LmdbDisk(tmp_path) as disk:
        disk.write_blocking(entries)
        with pytest.raises(DataLoss):
            recover_standalone(disk, QueueLimits(), NOW)


def test_flipped_bit_anywhere_is_data_loss() -> None:
    key, stored = encode_key(KEY), seal(encode_key(KEY), encode_progress(busy().queue))
    assert unseal(key, stored) == encode_progress(busy().queue)
    for place in range(len(stored) * 8):
        damaged = bytearray(stored)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(DataLoss):
            unseal(key, bytes(damaged))
    with pytest.raises(DataLoss):
        unseal(encode_key(KEY._replace(queue_id=4)), stored)


def test_start_with_a_flipped_bit_is_rejected(tmp_path: Path) -> None:
    with LmdbDisk(tmp_path) as disk:
        recover_standalone(disk, QueueLimits(), NOW)
        scene = busy()
        ((key, value),) = entries_of(scene.table, scene.resets.history)(KEY)
        assert value is not None
        disk.write_blocking([(key, value[:-1] + bytes([value[-1] ^ 1]))])
    with pytest.raises(DataLoss, match="checksum"):
        life(tmp_path)


async def test_recorded_resets_survive_a_restart_with_every_field_in_order(tmp_path: Path) -> None:
    scene = busy()
    scene.reset(2, "first")
    scene.undo("first")
    with LmdbDisk(tmp_path) as disk:
        recover_standalone(disk, QueueLimits(), NOW)
        records = scene.resets.history
        entries = entries_of(scene.table, records)
        slots = [operation.number for operation in records.newest_first(KEY.group)]
        assert slots == [2, 1]
        keys: list[DurableKey] = [KEY, *(ResetSlot(KEY.group, slot) for slot in slots)]
        await disk.write([entry for key in keys for entry in entries(key)])
    with LmdbDisk(tmp_path) as disk:
        history = recover_standalone(disk, QueueLimits(), NOW)[2]
    operations = history.newest_first(KEY.group)
    assert operations == records.newest_first(KEY.group)
    assert operations[0].order.undone_op_id == "first"
    assert operations[1].steps[0].effect.before.acked == scene.queue.acked


def test_file_that_is_no_database_is_data_loss(tmp_path: Path) -> None:
    life(tmp_path)
    (tmp_path / "progress" / "data.mdb").write_bytes(b"x" * 20_000)
    with pytest.raises(DataLoss):
        LmdbDisk(tmp_path)
    (tmp_path / "progress" / "data.mdb").unlink()
    with pytest.raises(DataLoss, match="was rolled back"):
        LmdbDisk(tmp_path)
    (tmp_path / "progress" / "newest").unlink()
    assert life(tmp_path).epoch == 1
