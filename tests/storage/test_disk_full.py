"""Goal: a node with a full disk rejects writes with numbers, serves reads, and recovers by itself.

Method: a disk in memory that runs out of space during a write, and the whole node over gRPC on a
small file system that really becomes full.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.common.v1 import queue_pb2
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._core.records import decode_records, read_header
from batonmq.errors import DiskFull
from batonmq_server.storage.core.checks import check
from batonmq_server.storage.core.files import File
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.retention import DiskState, DiskUsage
from batonmq_server.testing.memory_disks import MemoryDisk, MemoryFile
from tests.storage import schedule_scene
from tests.storage.batches import (
    NOW,
    TOPIC,
    TOPICS,
    append,
    batch,
    bodies,
    open_store,
    stored,
    sync,
)
from tests.storage.running_node import BROKER, TIMEOUT_S, RunningNode, running_node
from tests.support.conditions import until
from tests.support.tmpfs import fill_up, small_file_system

PROPER: dict[str, Any] = {
    "disk_warn_percent": 70,
    "disk_clean_percent": 75,
    "disk_clean_forcibly_percent": 85,
    "disk_full_percent": 90,
    "disk_interval_ms": 20,
}
SEGMENT_BYTES = 256 * 1024
BODY = bytes(60_000)


class Sparse(MemoryFile):
    """A file without space after byte `room`: what fits is written, then the write fails."""

    room: int | None = None

    def write(self, at: int, parts: Sequence[bytes | memoryview]) -> None:
        raw = b"".join(parts)
        if self.room is None or at + len(raw) <= self.room:
            super().write(at, parts)
            return
        if at < self.room:
            super().write(at, [raw[: self.room - at]])
        raise OSError(errno.ENOSPC, "no space")


class SparseDisk(MemoryDisk):
    """A disk that allocates files when they are written, as on copy-on-write file systems."""

    def create(self, path: str, size: int) -> File:
        super().create(path, size)
        file = self.files[path] = Sparse(size)
        return file


def test_write_without_space_is_rejected_and_leaves_no_bytes() -> None:
    disk = SparseDisk()
    opened = open_store(disk)
    store = opened.store
    stored(store, batch(b"a" * 500, producer=(5, 1)))
    end = store.log.next_position
    file = disk.files["log/00000000000000000000"]
    assert isinstance(file, Sparse)
    sizes = len(batch(b"b" * 300))
    file.room = end + 2 * sizes + 50  # the third batch of three is torn
    outcomes = append(store, *(batch(bytes((n,)) * 300, queue_id=n) for n in (1, 2, 3)))
    assert [type(one) for one in outcomes] == [DiskFull] * 3
    assert store.log.next_position == end
    assert bytes(file.content[end:]) == bytes(4_096 - end)
    file.room = None
    (receipt,) = append(store, batch(b"b" * 300, producer=(5, 1), sequence=1))
    assert isinstance(receipt, StoreReceipt)
    assert (receipt.position, receipt.first_offset) == (end, 1)
    sync(store)
    again = open_store(disk.killed()).store
    assert bodies(again) == [b"a" * 500, b"b" * 300]
    assert [bodies(again, queue_id) for queue_id in (1, 2, 3)] == [[], [], []]


def test_rejected_batch_does_not_reappear_after_a_later_one_of_the_same_length() -> None:
    """The bytes of the second of two rejected batches lie where the next append ends."""
    disk = SparseDisk()
    store = open_store(disk).store
    stored(store, batch(b"a"))
    file = disk.files["log/00000000000000000000"]
    assert isinstance(file, Sparse)
    size = len(batch(b"x"))
    file.room = 3 * size + 1
    refused = append(store, batch(b"x"), batch(b"y"), batch(b"z"))
    assert {type(one) for one in refused} == {DiskFull}
    file.room = None
    stored(store, batch(b"b"))
    assert bodies(open_store(disk.killed()).store) == [b"a", b"b"]


def test_append_over_two_segments_without_space_leaves_nothing_in_the_first() -> None:
    disk = SparseDisk()
    store = open_store(disk, segment_bytes=1_000).store
    stored(store, batch(bytes(500)))
    end = store.log.next_position
    disk.room = 1_000

    class LateFile(Sparse):
        room = 0

    create = disk.create

    def created(path: str, size: int) -> File:
        create(path, size)
        file = disk.files[path] = LateFile(size)
        return file

    disk.create = created  # type: ignore[method-assign]
    outcomes = append(store, batch(bytes(100), queue_id=1), batch(bytes(500), queue_id=2))
    assert [type(one) for one in outcomes] == [DiskFull] * 2
    assert store.log.next_position == end
    after = open_store(disk.killed(), segment_bytes=1_000).store
    assert [len(bodies(after, queue_id)) for queue_id in (0, 1, 2)] == [1, 0, 0]


def test_kill_while_an_append_over_two_segments_is_undone_leaves_a_log_that_opens() -> None:
    """A cut makes a file shorter for a moment; the next segment must be gone by then."""
    disk = SparseDisk()
    store = open_store(disk, segment_bytes=1_000).store
    stored(store, batch(bytes(500)))
    killed: list[MemoryDisk] = []

    class CutFile(Sparse):
        def cut(self, at: int) -> int:
            del self.content[at:]
            killed.append(disk.killed())
            self.content.extend(bytes(1_000 - at))
            return 0

    class LateFile(CutFile):
        room = 0

    def created(path: str, size: int) -> File:
        file = disk.files[path] = LateFile(size)
        return file

    disk.create = created  # type: ignore[method-assign]
    disk.files[f"log/{0:020d}"].__class__ = CutFile
    outcomes = append(store, batch(bytes(100), queue_id=1), batch(bytes(500), queue_id=2))
    assert [type(one) for one in outcomes] == [DiskFull] * 2
    assert killed
    for after in killed:
        assert len(bodies(open_store(after, segment_bytes=1_000).store)) == 1


def test_other_write_error_is_not_a_full_disk() -> None:
    disk = SparseDisk()
    store = open_store(disk).store
    stored(store, batch(b"a"))
    disk.files["log/00000000000000000000"].failure = OSError(errno.EIO, "input/output error")
    with pytest.raises(OSError, match="input/output"):
        append(store, batch(b"b"))


def test_retry_of_a_stored_batch_gets_its_receipt_on_a_full_disk() -> None:
    store = open_store(MemoryDisk()).store
    raw = batch(b"a", producer=(5, 1))
    (first,) = stored(store, raw)
    batches = [check(raw), check(batch(b"b", producer=(5, 1), sequence=1))]
    again, fresh = store.append(batches, TOPICS, NOW, DiskFull("full"))
    assert isinstance(again, StoreReceipt)
    assert (again.first_offset, again.position, again.duplicate) == (0, first.position, True)
    assert isinstance(fresh, DiskFull)


async def test_rejection_has_the_current_disk_numbers() -> None:
    """The last disk check may be a second old, when the disk was still empty."""
    async with schedule_scene.new_scene() as scene:
        scene.retention.observe(DiskUsage(10, 1 << 40), 0, 0)
        assert scene.retention.state is DiskState.OK
        scene.disk.room = 1_000
        outcomes = [
            *scene.appender.append([check(batch(bytes(3_000)))], TOPICS),
            *scene.appender.append([check(batch(bytes(3_000)))], TOPICS),
        ]
        first, second = (one for one in outcomes if isinstance(one, DiskFull))
        assert first.facts["free_bytes"] == second.facts["free_bytes"] == "1000"
        scene.disk.room = 900
        (again,) = scene.appender.append([check(batch(b"a"))], TOPICS)
        assert isinstance(again, DiskFull)
        assert again.facts["free_bytes"] == "900"


async def test_write_is_accepted_as_soon_as_space_is_freed() -> None:
    """No check of the disk has to run in between."""
    async with schedule_scene.new_scene() as scene:
        scene.disk.room = 1_000
        outcomes = [
            *scene.appender.append([check(batch(bytes(3_000)))], TOPICS),
            *scene.appender.append([check(batch(bytes(3_000)))], TOPICS),
        ]
        assert any(isinstance(one, DiskFull) for one in outcomes)
        scene.disk.room = 1 << 40
        (stored_now,) = scene.appender.append([check(batch(b"a"))], TOPICS)
        assert isinstance(stored_now, StoreReceipt)
        assert scene.retention.state is DiskState.OK


async def rejections(node: RunningNode, *batches: bytes) -> list[DiskFull | None]:
    """Append batches; return the error of each, None if it was stored."""
    errors: list[DiskFull | None] = []
    for outcome in await node.outcomes(*batches):
        error = error_from_pb(outcome.error) if outcome.HasField("error") else None
        assert error is None or isinstance(error, DiskFull), error
        errors.append(error)
    return errors


async def next_offset(node: RunningNode) -> int:
    queue = queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=0)
    request = pb.QueryOffsetsRequest(queues=[queue])
    try:
        answer = await node.stub.QueryOffsets(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return answer.outcomes[0].offsets.next_offset


async def match_count(node: RunningNode, body: bytes) -> int:
    """Return in how many ways the first message of queue 0 is found."""
    queue = queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=0)
    read = await node.queries.Read(query_pb.ReadRequest(queue=queue), timeout=TIMEOUT_S)
    search = query_pb.SearchOffsetRequest(queue=queue, unix_ms=1)
    at = await node.queries.SearchOffset(search, timeout=TIMEOUT_S)
    header = read_header(read.batches[0])
    by_id = query_pb.GetMessageRequest(message_id=f"{BROKER}-{header.position:x}-0")
    answer = await node.queries.GetMessage(by_id, timeout=TIMEOUT_S)
    message_bodies = [
        record.body
        for raw in (read.batches[0], answer.message.batch)
        for record in decode_records(raw, header, [0])
    ]
    return message_bodies.count(body) + (at.offset == header.first_offset)


async def state(node: RunningNode) -> pb.DiskState.ValueType:
    return (await node.describe()).disk_state


async def test_disk_filled_by_other_files_rejects_writes_and_serves_reads_until_they_are_removed(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    with small_file_system(tmp_path / "disk", 8) as disk:
        async with running_node(
            etcd_endpoint, disk / "data", segment_bytes=SEGMENT_BYTES, **PROPER
        ) as node:
            await node.append(batch(b"a"))
            ballast = fill_up(disk, leave_bytes=512 * 1024)
            await until(lambda: has_state(node, pb.DISK_STATE_FULL))
            (refused,) = await rejections(node, batch(b"b"))
            assert refused is not None
            assert float(refused.facts["used_percent"]) >= 90
            assert refused.facts["limit_percent"] == "90"
            assert 0 < int(refused.facts["free_bytes"]) <= 512 * 1024
            assert "below 85 %" in refused.remedy
            answer = await node.pull()
            (raw,) = answer.batches
            assert [r.body for r in decode_records(raw, read_header(raw), [0])] == [b"a"]
            assert await next_offset(node) == 1
            assert await match_count(node, b"a") == 3
            described = await node.describe()
            assert described.disk_used_percent >= 90
            ballast.unlink()
            await until(lambda: has_state(node, pb.DISK_STATE_OK))
            assert await rejections(node, batch(b"b")) == [None]
            assert await next_offset(node) == 2


async def has_state(node: RunningNode, expected: pb.DiskState.ValueType) -> bool:
    return await state(node) == expected


async def test_log_that_outgrows_its_disk_loses_its_oldest_segments_and_continues(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    """Twice the size of the disk is written; rejected batches are sent again."""
    with small_file_system(tmp_path / "disk", 8) as disk:
        async with running_node(
            etcd_endpoint, disk / "data", segment_bytes=SEGMENT_BYTES, **PROPER
        ) as node:
            stored_count = 0
            async with asyncio.timeout(60):
                while stored_count < 260:
                    (refused,) = await rejections(node, batch(BODY))
                    if refused is None:
                        stored_count += 1
                    else:
                        await asyncio.sleep(0.01)
            assert await next_offset(node) == stored_count
            answer = await node.pull(offset=0, bytes_max=1)
            assert answer.lost_count > stored_count / 2, "half of it does not fit"
            assert read_header(answer.batches[0]).first_offset == answer.lost_count
        async with running_node(
            etcd_endpoint, disk / "data", segment_bytes=SEGMENT_BYTES, **PROPER
        ) as node:
            assert await next_offset(node) == stored_count
            assert (await node.append(batch(b"x")))[0].first_offset == stored_count


async def test_purge_frees_a_full_disk_although_the_log_is_needed_from_its_begin_on(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    """Not a byte is free. Retention can't help: a message for later is in the first segment."""
    with small_file_system(tmp_path / "disk", 8) as disk:
        async with running_node(
            etcd_endpoint, disk / "data", segment_bytes=SEGMENT_BYTES, **PROPER
        ) as node:
            await node.put_topic("junk", 99)
            for number in range(12):
                if number == 1:
                    await schedule_later(node)
                await node.append(*(batch(bytes(100_000), topic="junk") for _ in range(2)))
            await node.append(batch(b"a"))
            fill_up(disk, leave_bytes=0)
            await until(lambda: has_state(node, pb.DISK_STATE_FULL))
            (refused,) = await rejections(node, batch(b"b"))
            assert refused is not None
            await node.etcd.delete(node.etcd.key("topics", "junk"))
            purge = pb.PurgeTopicRequest(topic="junk")
            answer = await node.stub.PurgeTopic(purge, timeout=TIMEOUT_S)
            assert (answer.purged_segments, answer.remaining_segments) == (10, 2)
            await until(lambda: has_state(node, pb.DISK_STATE_OK))
            assert await rejections(node, batch(b"b")) == [None]
        async with running_node(
            etcd_endpoint, disk / "data", segment_bytes=SEGMENT_BYTES, **PROPER
        ) as node:
            assert await next_offset(node) == 2


async def schedule_later(node: RunningNode) -> None:
    item = schedule_pb.ScheduleItem(
        batch=batch(b"later"), deliver_unix_ms=Clock().unix_ms() + 3_600_000
    )
    request = schedule_pb.ScheduleRequest(items=[item])
    (outcome,) = (await node.schedule.Schedule(request, timeout=TIMEOUT_S)).outcomes
    assert outcome.HasField("receipt"), outcome


async def test_append_is_rejected_until_a_new_segment_fits(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    """A real ENOSPC occurs below every watermark."""
    segment_bytes = 2 * 1024 * 1024
    with small_file_system(tmp_path / "disk", 8) as disk:
        async with running_node(
            etcd_endpoint, disk / "data", segment_bytes=segment_bytes, disk_interval_ms=20
        ) as node:
            await node.append(batch(b"a"))
            ballast = fill_up(disk, leave_bytes=segment_bytes // 2)
            outcomes: list[DiskFull | None] = []
            while not outcomes or outcomes[-1] is None:
                outcomes += await rejections(node, batch(bytes(200_000)))
            assert 5 <= len(outcomes) <= 12, "space that is already allocated is used first"
            last = outcomes[-1]
            assert last is not None
            assert 0 < int(last.facts["free_bytes"]) < segment_bytes
            assert await next_offset(node) == len(outcomes)
            assert await state(node) == pb.DISK_STATE_FULL
            assert await rejections(node, batch(b"b")) != [None]
            ballast.unlink()
            await until(lambda: has_state(node, pb.DISK_STATE_OK))
            assert await rejections(node, batch(b"b")) == [None]
