"""Builds the data directory with the files in `tests/storage/golden`.

`python -m tests.storage.golden` writes the files again. That is needed only if a format changes;
then its version and docs/reference/format.md must change too.
"""

from __future__ import annotations

from pathlib import Path

from batonmq._core.records import Message
from batonmq_server.storage.core import floors
from batonmq_server.storage.core.checkpoint_writer import CheckpointWriter
from batonmq_server.storage.core.delay_queue import DelayedBatch
from batonmq_server.storage.core.floors import QueueFloor
from batonmq_server.storage.core.recovery import encode_synced
from batonmq_server.storage.core.schedule import TOPIC as SCHEDULE_TOPIC
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import TOPIC, TOPIC_ID, Opened, append, batch, open_store, sync

FOLDER = Path(__file__).parent / "golden"
SEGMENT_BYTES, RUN_ENTRIES = 900, 6
NOW = 1_700_000_000_000
FLOORS = [QueueFloor(TOPIC, TOPIC_ID, 5, 77), QueueFloor(SCHEDULE_TOPIC, 0, 1, 1 << 40)]


def build() -> Opened:
    """Build the directory."""
    opened = open_store(MemoryDisk(), segment_bytes=SEGMENT_BYTES, run_entries=RUN_ENTRIES)
    batches = [
        batch(
            Message(b"body %d" % n, tag="TagA", keys=(f"order-{n}", "customer-9")),
            Message(b"plain"),
            Message(b"", tag="ü", properties={"name": "value", "other": ""}),
            queue_id=n % 2,
            producer=(5 + n % 2, 3),
            sequence=3 * (n // 2),
        )
        for n in range(6)
    ]
    for number, raw in enumerate(batches):
        append(opened.store, raw, now=NOW + 1_000 * number)
    sync(opened.store)
    opened.store.schedule.waiting.add(DelayedBatch(NOW + 86_400_000, 446, 669))
    CheckpointWriter(opened.disk, opened.store, 0).run()
    opened.disk.replace(floors.PATH, floors.encode(FLOORS))
    opened.disk.replace("synced", encode_synced(opened.store.log.synced_position))
    return opened


def files(disk: MemoryDisk) -> dict[str, bytes]:
    """Return the files of a disk by name; `/` in paths becomes `__`."""
    return {
        path.replace("/", "__"): bytes(file.content) for path, file in sorted(disk.files.items())
    }


def written() -> dict[str, bytes]:
    """Return the golden files by name."""
    return {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir())}


def main() -> None:
    """Write the golden files again."""
    for path in FOLDER.iterdir():
        path.unlink()
    for name, content in files(build().disk).items():
        (FOLDER / name).write_bytes(content)


if __name__ == "__main__":
    main()
