"""Goal: a damaged consume queue is rebuilt from the log by the read that finds the damage.

Method: a real node on files; bits of its index are flipped while it runs and while it is stopped,
files of the index are removed or cut. Every read must return what it returned before.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from random import Random

import grpc.aio
import pytest

from baton.common.v1 import queue_pb2
from baton.storage.v1 import query_service_pb2 as query_pb
from batonmq._common.backoff import Backoff
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import DataLoss
from batonmq_server.storage import queue_repairer
from batonmq_server.storage.core.consumequeue import ENTRY
from tests.storage.batches import TOPIC, batch, tagged
from tests.storage.running_node import BROKER, TIMEOUT_S, RunningNode, running_node
from tests.support.conditions import until

COUNT = 24
POSITION_BYTES, SIZE_BYTES = 8, 4
"""First bytes of an entry; behind them is the tag. A batch's size is read from its first entry."""


@pytest.fixture
async def folder(etcd_endpoint: str, tmp_path: Path) -> Path:
    """A stopped node; queue 0 has batches of one and two messages, among those of others."""
    async with running_node(
        etcd_endpoint, tmp_path, segment_bytes=4_096, scrub_bytes_per_s=0
    ) as node:
        for number in range(COUNT // 3):
            await node.append(
                batch(b"%d" % number),
                batch(bytes(300), queue_id=1),
                batch(b"%d first" % number, b"%d second" % number),
                batch(bytes(100), queue_id=2),
            )
    return tmp_path


def index(folder: Path) -> Path:
    (path,) = (folder / "consumequeue").glob("*/0/*")
    return path


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


async def pulled(node: RunningNode, offset: int, **fields: object) -> tuple[list[bytes], int]:
    answer = await node.pull(offset=offset, **fields)
    return list(answer.batches), answer.next_offset


async def batches(node: RunningNode) -> list[bytes]:
    """Return all batches of queue 0; a size that is too large ends an answer early."""
    raw_batches: dict[bytes, None] = {}
    offset = 0
    while offset < COUNT:
        some, offset = await pulled(node, offset)
        raw_batches.update(dict.fromkeys(some))
    return list(raw_batches)


def rebuilt(node: RunningNode) -> float:
    return node.runtime.registry.get_sample_value("baton_storage_rebuilt_queues_total") or 0


def flips(random: Random) -> Iterator[tuple[int, int]]:
    """Yield a byte and a bit in the entry of each offset."""
    for offset in range(COUNT):
        first = offset % 3 != 2
        at = random.randrange(POSITION_BYTES + SIZE_BYTES * first)
        yield offset * ENTRY.itemsize + at, random.randrange(8)


@pytest.mark.parametrize("seed", range(3))
async def test_flipped_bit_of_a_running_node_is_rebuilt_by_the_read_that_finds_it(
    etcd_endpoint: str, folder: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_node(
        etcd_endpoint, folder, segment_bytes=4_096, scrub_bytes_per_s=0
    ) as node:
        expected, content = await batches(node), index(folder).read_bytes()
        for number, (at, bit) in enumerate(flips(Random(seed)), start=1):
            flip(index(folder), at, bit)
            assert await batches(node) == expected
            assert index(folder).read_bytes() == content
            assert rebuilt(node) == number
        assert "consume queue rebuilt from the log" in caplog.text
        assert (await node.describe()).damaged_batch_count == 0


async def test_rebuilt_queue_is_an_event_of_the_metrics_stream(
    etcd_endpoint: str, folder: Path
) -> None:
    damaged = (5, 7)
    async with running_node(
        etcd_endpoint, folder, segment_bytes=4_096, scrub_bytes_per_s=0
    ) as node:
        for offset in damaged:
            flip(index(folder), offset * ENTRY.itemsize + POSITION_BYTES - 1, 3)
        with node.runtime.hub.listen() as buffer:
            await pulled(node, damaged[0])
            events = [one for one in buffer.take(1 << 20) if one.HasField("queue_rebuilt")]
        assert rebuilt(node) == 1
    (event,) = events
    assert event.queue == queue_pb2.GroupQueue(
        queue=queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=0)
    )
    assert event.queue_rebuilt.range == queue_pb2.OffsetRange(first_offset=5, next_offset=8)


async def test_flipped_bits_of_a_stopped_node_are_rebuilt_and_other_queues_are_served(
    etcd_endpoint: str, folder: Path
) -> None:
    content = index(folder).read_bytes()
    for at, bit in flips(Random(7)):
        if at < (COUNT - 1) * ENTRY.itemsize:  # the last entry is tested at the start
            flip(index(folder), at, bit)
    async with running_node(
        etcd_endpoint, folder, segment_bytes=4_096, scrub_bytes_per_s=0
    ) as node:
        assert (await pulled(node, 0, queue_id=1))[1] == COUNT // 3
        assert len(await batches(node)) == COUNT * 2 // 3
        assert index(folder).read_bytes() == content


async def test_search_by_time_rebuilds_the_entries_that_it_reads(
    etcd_endpoint: str, folder: Path
) -> None:
    queue = queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=0)
    async with running_node(
        etcd_endpoint, folder, segment_bytes=4_096, scrub_bytes_per_s=0
    ) as node:
        for unix_ms, expected in ((1, 0), (1 << 50, COUNT)):
            for at, _ in flips(Random(8)):
                flip(index(folder), at - at % ENTRY.itemsize + 6, 5)
            request = query_pb.SearchOffsetRequest(queue=queue, unix_ms=unix_ms)
            answer = await node.queries.SearchOffset(request, timeout=TIMEOUT_S)
            assert answer.offset == expected
            assert await batches(node)
        assert rebuilt(node) > 0
        assert (await node.describe()).damaged_batch_count == 0


@pytest.mark.parametrize("damage", ["remove", "cut", "zero"])
async def test_lost_part_of_an_index_is_rebuilt(
    etcd_endpoint: str, folder: Path, damage: str
) -> None:
    async with running_node(
        etcd_endpoint, folder, segment_bytes=4_096, scrub_bytes_per_s=0
    ) as node:
        content = index(folder).read_bytes()
        path = index(folder)
        match damage:
            case "remove":
                path.unlink()
            case "cut":
                with path.open("r+b") as file:
                    file.truncate(5 * ENTRY.itemsize + 3)
            case _:
                path.write_bytes(bytes(len(content)))
        queue = queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=0)
        read = await node.queries.Read(query_pb.ReadRequest(queue=queue), timeout=TIMEOUT_S)
        assert read.next_offset == COUNT
        assert (await pulled(node, 0))[1] == COUNT
        assert path.read_bytes() == content


@pytest.mark.parametrize("damage", ["repair in the middle of a cut file", "zeros", "tag"])
async def test_filter_skips_no_message_whose_entry_is_damaged(
    etcd_endpoint: str, tmp_path: Path, damage: str
) -> None:
    async with running_node(
        etcd_endpoint, tmp_path, segment_bytes=4_096, scrub_bytes_per_s=0
    ) as node:
        for _ in range(COUNT // 2):
            await node.append(tagged("a", "b"))
    async with running_node(
        etcd_endpoint, tmp_path, segment_bytes=4_096, scrub_bytes_per_s=0
    ) as node:
        expected = await pulled(node, 0, expression="a", messages_max=COUNT)
        content, path = index(tmp_path).read_bytes(), index(tmp_path)
        match damage:
            case "zeros":
                path.write_bytes(bytes(len(content)))
            case "tag":
                for offset in range(0, COUNT, 2):
                    flip(path, offset * ENTRY.itemsize + POSITION_BYTES + SIZE_BYTES, 5)
            case _:
                with path.open("r+b") as file:
                    file.truncate(0)
                assert (await pulled(node, COUNT // 2))[1] == COUNT  # leaves zeros before
        assert await pulled(node, 0, expression="a", messages_max=COUNT) == expected
        assert path.read_bytes() == content
        assert rebuilt(node) > 0


async def test_repair_without_a_free_descriptor_is_tried_again_by_the_next_read(
    etcd_endpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with running_node(
        etcd_endpoint, folder, segment_bytes=4_096, scrub_bytes_per_s=0
    ) as node:
        content = index(folder).read_bytes()
        flip(index(folder), POSITION_BYTES - 1, 3)
        with monkeypatch.context() as patch, pytest.raises(DataLoss):
            patch.setattr("batonmq_server.storage.queue_repairer.read_log", no_descriptor)
            await node.pull(offset=0)
        assert (await pulled(node, 0))[1] == COUNT
        assert index(folder).read_bytes() == content


async def test_repair_that_fails_is_tried_again_and_is_no_damage_of_the_log(
    etcd_endpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(queue_repairer, "_BACKOFF", Backoff(first_ms=1, delay_ms_max=1))
    async with running_node(
        etcd_endpoint, folder, segment_bytes=4_096, scrub_bytes_per_s=0
    ) as node:
        content = index(folder).read_bytes()
        flip(index(folder), POSITION_BYTES - 1, 3)
        with monkeypatch.context() as patch:
            patch.setattr("batonmq_server.storage.queue_repairer.read_log", unreadable)
            for _ in range(3):
                with pytest.raises(DataLoss, match="can't be rebuilt now") as lost:
                    await node.pull(offset=0)
                assert lost.value.detail.position is None
        assert (await node.describe()).damaged_batch_count == 1, "the index, once"

        async def served() -> bool:
            try:
                return (await pulled(node, 0))[1] == COUNT
            except DataLoss:
                return False

        await until(served)
        assert index(folder).read_bytes() == content


async def test_read_by_offset_rebuilds_several_damaged_entries(
    etcd_endpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second damaged batch lies beyond the entries that the first repair tests."""
    monkeypatch.setattr(queue_repairer, "ENTRIES_AT_ONCE", 6)
    monkeypatch.setattr("batonmq_server.storage.core.queue_repair.ENTRIES_AT_ONCE", 6)
    queue = queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=0)
    async with running_node(
        etcd_endpoint, folder, segment_bytes=4_096, scrub_bytes_per_s=0
    ) as node:
        flip(index(folder), POSITION_BYTES - 1, 3)
        flip(index(folder), (COUNT - 6) * ENTRY.itemsize + POSITION_BYTES - 1, 3)
        request = query_pb.ReadRequest(queue=queue)
        answer = await node.queries.Read(request, timeout=TIMEOUT_S)
        assert answer.next_offset == COUNT
        assert rebuilt(node) == 2


async def test_damage_of_the_log_is_still_data_loss_and_changes_no_index(
    etcd_endpoint: str, folder: Path
) -> None:
    async with running_node(
        etcd_endpoint, folder, segment_bytes=4_096, scrub_bytes_per_s=0
    ) as node:
        content = index(folder).read_bytes()
        flip(folder / "log" / f"{0:020d}", 3, 0)  # in the first batch, of offset 0
        for _ in range(2):
            with pytest.raises(DataLoss):
                await node.pull(offset=0)
            queue = queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=0)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await node.queries.Read(query_pb.ReadRequest(queue=queue), timeout=TIMEOUT_S)
            assert from_rpc_error(failed.value).reason == "DATA_LOSS"
        assert index(folder).read_bytes() == content
        assert rebuilt(node) == 0
        assert (await node.describe()).damaged_batch_count == 1
        assert (await pulled(node, 1))[1] == COUNT
