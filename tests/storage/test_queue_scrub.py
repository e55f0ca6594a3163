"""Goal: the scrub finds every entry of a consume queue that differs from the log, and rebuilds it.

Method: a real node on files; bits of its index are flipped while it runs and while it is stopped,
also bits that no read can notice. A round of the scrub must repair the index without a read.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from baton.common.v1 import queue_pb2
from batonmq_server.storage import scrubber
from batonmq_server.storage.core import scrub as core
from batonmq_server.storage.core.consumequeue import ENTRY
from tests.storage.batches import TOPIC, batch, tagged
from tests.storage.running_node import BROKER, RunningNode, running_node
from tests.support.conditions import until
from tools.faults.file_damage import flip_bit

SEGMENT_BYTES = 4_096
COUNT = 24
TAG_LOW_BYTE = ENTRY.itemsize - 1


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "RANGE_BYTES", 300)
    monkeypatch.setattr(scrubber, "ROUND_INTERVAL_S", 0.05)


@pytest.fixture
async def folder(etcd_endpoint: str, tmp_path: Path) -> Path:
    """A stopped node; queue 0 has batches of two messages with the tags a and b."""
    async with running_node(etcd_endpoint, tmp_path, segment_bytes=SEGMENT_BYTES) as node:
        for _ in range(COUNT // 2):
            await node.append(tagged("a", "b"), batch(bytes(300), queue_id=1))
    return tmp_path


def index(folder: Path, queue_id: int = 0) -> Path:
    (path,) = (folder / "consumequeue").glob(f"*/{queue_id}/*")
    return path


def rebuilt(node: RunningNode) -> float:
    return node.runtime.registry.get_sample_value("baton_storage_rebuilt_queues_total") or 0


async def test_flipped_bit_of_a_tag_is_rebuilt_by_the_scrub(
    etcd_endpoint: str, folder: Path
) -> None:
    """A read by tag skips the message and can't notice it: only the log has the right tag."""
    content = index(folder).read_bytes()
    async with running_node(etcd_endpoint, folder, segment_bytes=SEGMENT_BYTES) as node:
        with node.runtime.hub.listen() as buffer:
            flip_bit(index(folder), 6 * ENTRY.itemsize + TAG_LOW_BYTE, 2)
            await until(lambda: rebuilt(node) == 1)
            assert index(folder).read_bytes() == content
            (event,) = [one for one in buffer.take(1 << 20) if one.HasField("queue_rebuilt")]
        answer = await node.pull(offset=0, expression="a", messages_max=COUNT)
        assert (answer.next_offset, answer.filtered_count) == (COUNT, COUNT // 2)
        assert (await node.describe()).damaged_batch_count == 0
    assert event.queue.queue == queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=0)
    assert event.queue_rebuilt.range == queue_pb2.OffsetRange(first_offset=6, next_offset=7)


async def test_undamaged_indexes_are_never_rebuilt(etcd_endpoint: str, folder: Path) -> None:
    """Also not while appends, checkpoints and retention change the log and the indexes."""
    async with running_node(
        etcd_endpoint,
        folder,
        segment_bytes=SEGMENT_BYTES,
        retention_bytes=2 * SEGMENT_BYTES,
        disk_interval_ms=10,
    ) as node:
        for _ in range(30):
            await node.append(tagged("a", "b"), batch(bytes(300), queue_id=1))
        await until(lambda: not (folder / "log" / f"{0:020d}").exists())
        assert rebuilt(node) == 0


@pytest.mark.parametrize("damage", ["remove", "cut"])
async def test_lost_part_of_an_index_is_rebuilt_by_the_scrub(
    etcd_endpoint: str, folder: Path, damage: str
) -> None:
    content, path = index(folder).read_bytes(), index(folder)
    async with running_node(etcd_endpoint, folder, segment_bytes=SEGMENT_BYTES) as node:
        if damage == "remove":
            path.unlink()
        else:
            with path.open("r+b") as file:
                file.truncate(5 * ENTRY.itemsize + 3)
        await until(lambda: path.exists() and path.read_bytes() == content)
        await until(lambda: rebuilt(node))


async def test_failed_repair_is_tried_again_by_the_next_round(
    etcd_endpoint: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    content = index(folder).read_bytes()
    async with running_node(etcd_endpoint, folder, segment_bytes=SEGMENT_BYTES) as node:
        with monkeypatch.context() as patch:
            patch.setattr("batonmq_server.storage.queue_repairer.apply_repair", failing)
            flip_bit(index(folder), 6 * ENTRY.itemsize + TAG_LOW_BYTE, 2)
            await until(lambda: "consume queue not rebuilt" in caplog.text)
        await until(lambda: rebuilt(node) == 1)
        assert index(folder).read_bytes() == content


@pytest.mark.parametrize("at", range(ENTRY.itemsize))
async def test_every_byte_of_an_entry_is_compared(
    etcd_endpoint: str, folder: Path, at: int
) -> None:
    content = index(folder).read_bytes()
    flip_bit(index(folder), 6 * ENTRY.itemsize + at, at % 8)
    async with running_node(etcd_endpoint, folder, segment_bytes=SEGMENT_BYTES) as node:
        await until(lambda: index(folder).read_bytes() == content)
        await until(lambda: rebuilt(node) == 1)
