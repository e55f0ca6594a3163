"""Goal: no format on disk changes unnoticed, and files written earlier can be read.

Method: a data directory built from fixed input is compared with the files in `golden`, which are
also opened.
"""

from __future__ import annotations

import struct
from pathlib import Path

from crc32c import crc32c

from batonmq._core.records import key_hash, tag_hash
from batonmq_server.storage.core import checkpoint, floors
from batonmq_server.storage.core.keyindex import search_hash
from batonmq_server.storage.core.producers import ProducerTable
from batonmq_server.storage.core.query import MessageQueries, TimeWindow
from batonmq_server.storage.core.recovery import decode_synced
from batonmq_server.testing.memory_disks import MemoryDisk, MemoryFile
from tests.storage import golden
from tests.storage.batches import TOPIC_ID, Opened, bodies, open_store

OLD_CHECKPOINT = Path(__file__).parent / "golden_old" / "checkpoint_1"


def opened() -> Opened:
    """Return a store on the golden files."""
    disk = MemoryDisk()
    for name, content in golden.written().items():
        path = name.replace("__", "/")
        file = disk.files[path] = MemoryFile()
        file.write(0, [content])
        file.sync()
    return open_store(disk, segment_bytes=golden.SEGMENT_BYTES, run_entries=golden.RUN_ENTRIES)


def test_written_bytes_equal_the_golden_files() -> None:
    assert golden.files(golden.build().disk) == golden.written()


def test_golden_files_contain_every_kind_of_file() -> None:
    names = golden.written()
    assert {name.split("__")[0] for name in names} == {
        "log", "consumequeue", "keyindex", "checkpoint", "floors", "synced",
    }  # fmt: skip
    assert any(name.endswith(".open") for name in names)
    assert any(b"BTNF" in content for name, content in names.items() if name.startswith("log"))


def test_golden_files_can_be_read() -> None:
    store = opened().store
    assert opened().report.rebuilt == ""
    assert bodies(store, 1) == [body for n in (1, 3, 5) for body in (b"body %d" % n, b"plain", b"")]
    matches = MessageQueries(store).find(
        TOPIC_ID, "customer-9", TimeWindow(0, 1 << 62), messages_max=9, bytes_max=1 << 20
    )
    assert len(matches.messages) == 6
    assert len(store.producers) == 2
    assert store.schedule.waiting.next_unix_ms() is not None


def test_consume_queue_entry_byte_by_byte() -> None:
    (name,) = (name for name in golden.written() if name.startswith("consumequeue__orders-7__1"))
    content = golden.written()[name]
    first = opened().store.queues[TOPIC_ID, 1]
    size = int(first.read(0, 1).sizes[0])
    entries = list(struct.iter_unpack(">qiq", content))
    assert entries[:3] == [(first.first_position, size, tag_hash(tag)) for tag in ("TagA", "", "ü")]


def test_run_of_the_key_index_byte_by_byte() -> None:
    content = golden.written()[f"keyindex__{0:020d}"]
    magic, version, _, begin, end, first_ms, last_ms, count, crc, head_crc = struct.unpack_from(
        ">4sHHqqqqIII", content
    )
    assert (magic, version, begin, first_ms, last_ms, count) == (
        b"BTNK", 2, 0, golden.NOW, golden.NOW + 2_000, 6,
    )  # fmt: skip
    assert crc == crc32c(content[52:])
    assert head_crc == crc32c(content[:48])
    (fence,) = struct.unpack_from(">Q", content, 52)
    hashes_crc, places_crc, directory_crc = struct.unpack_from(">3I", content, 60)
    hashes = list(struct.unpack_from(">6Q", content, 72))
    assert directory_crc == crc32c(content[52:68])
    assert hashes_crc == crc32c(content[72 : 72 + 6 * 8])
    assert places_crc == crc32c(content[72 + 6 * 8 :])
    keys = ["order-0", "order-1", "order-2", *["customer-9"] * 3]
    assert sorted(hashes) == hashes == sorted(search_hash(7, key_hash(key)) for key in keys)
    assert fence == hashes[0]
    positions = struct.unpack_from(">6q", content, 72 + 6 * 8)
    assert set(positions) == {0, end // 3, 2 * end // 3}
    assert content[72 + 12 * 8 :] == bytes(2 * 6)


def test_run_of_the_key_index_of_version_1_is_read() -> None:
    old = (OLD_CHECKPOINT.parent / "keyindex_1").read_bytes()
    assert old[:6] == b"BTNK\x00\x01"
    disk = MemoryDisk()
    for name, content in golden.written().items():
        disk.replace(name.replace("__", "/"), content)
    path = f"keyindex/{0:020d}"
    new = disk.load(path)
    disk.replace(path, old)
    opened = open_store(disk, segment_bytes=golden.SEGMENT_BYTES, run_entries=golden.RUN_ENTRIES)
    hits = [match.positions.tolist() for match in opened.store.keys.find(7, key_hash("customer-9"))]
    assert disk.load(path) == old
    assert hits[-1] == sorted(hits[-1])
    disk.replace(path, new)
    again = open_store(disk, segment_bytes=golden.SEGMENT_BYTES, run_entries=golden.RUN_ENTRIES)
    assert hits == [
        match.positions.tolist() for match in again.store.keys.find(7, key_hash("customer-9"))
    ]


def test_floors_and_the_synced_position_byte_by_byte() -> None:
    assert floors.decode(golden.written()["floors"]) == golden.FLOORS
    content = golden.written()["synced"]
    assert content[:8] == decode_synced(content).to_bytes(8, "big")
    assert content[8:] == crc32c(content[:8]).to_bytes(4, "big")


def test_checkpoint_is_of_version_2() -> None:
    content = golden.written()["checkpoint"]
    assert content[:6] == b"BTNC\x00\x02"
    decoded = checkpoint.decode(content)
    assert decoded is not None
    assert decoded.position == opened().store.log.next_position


def test_checkpoint_of_version_1_is_read() -> None:
    content = OLD_CHECKPOINT.read_bytes()
    assert content[:6] == b"BTNC\x00\x01"
    old = checkpoint.decode(content)
    new = checkpoint.decode(golden.written()["checkpoint"])
    assert old is not None
    assert new is not None
    assert (old.position, old.queues, old.waiting) == (new.position, new.queues, new.waiting)
    assert [one.owner for one in old.producers] == [0, 0]
    stored = [
        batch for one in old.producers for batches in one.queues.values() for batch in batches
    ]
    assert {checksum for *_, checksum in stored} == {0}
    table = ProducerTable()
    table.load(old.producers)
    assert len(table) == 2
