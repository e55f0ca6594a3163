"""Goal: one flipped bit in any file of a node that is alone is repaired or reported, never silent.

Method: a real node on files of every kind. A bit is flipped while the node is down, or while it
runs; then everything that a client can read is compared with what it was before. An error with a
remedy is the other allowed answer. A file of an unknown kind fails the test.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random

import grpc.aio
import pytest

from baton.common.v1 import queue_pb2
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._core.records import Message, decode_records, read_header
from batonmq.errors import BatonError, DataLoss
from tests.storage.batches import TOPIC, batch
from tests.storage.running_node import BROKER, TIMEOUT_S, RunningNode, running_node
from tools.faults.file_damage import KINDS, flip, flip_bit

SEGMENT_BYTES = 4_096
QUEUES, ROUNDS, KEYS = 3, 20, 7
DAY_MS = 86_400_000
WITHOUT_CONTENT = {"lock", "reserve", "recovery.json"}
"""Files that a start does not read."""

Readings = dict[str, object]


def message(number: int) -> Message:
    return Message(b"%d" % number + bytes(60), tag="a", keys=(f"key-{number % KEYS}",))


def last(queue_id: int) -> bytes:
    """Return the last batch of a queue."""
    return batch(message(queue_id), queue_id=queue_id, producer=(queue_id + 1, 0), sequence=ROUNDS)


@pytest.fixture
async def folder(etcd_endpoint: str, tmp_path: Path) -> Path:
    async with running_node(etcd_endpoint, tmp_path / "first", segment_bytes=SEGMENT_BYTES) as node:
        for number in range(ROUNDS):
            await node.append(
                *(
                    batch(
                        message(number),
                        queue_id=queue_id,
                        producer=(queue_id + 1, 0),
                        sequence=number,
                    )
                    for queue_id in range(QUEUES)
                )
            )
        await node.append(*map(last, range(QUEUES)))
        await scheduled(node)
    return tmp_path / "first"


async def readings(node: RunningNode) -> Readings:
    """Return all that clients can read, or the reason of the error instead."""
    answers: Readings = {}

    async def note(name: str, call: Callable[[], Awaitable[object]]) -> None:
        try:
            answers[name] = await call()
        except grpc.aio.AioRpcError as error:
            answers[name] = from_rpc_error(error)
        except BatonError as error:
            answers[name] = error

    for queue_id in range(QUEUES):
        await note(f"queue {queue_id}", partial(read_queue, node, queue_id))
        await note(f"repeat {queue_id}", partial(repeated, node, queue_id))
    await note("scheduled", partial(scheduled, node))
    for number in range(KEYS):
        await note(f"key {number}", partial(find, node, f"key-{number}"))
    return answers


async def read_queue(node: RunningNode, queue_id: int) -> list[bytes]:
    queue = queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=queue_id)
    batches: dict[bytes, None] = {}
    offset = 0
    while offset <= ROUNDS:
        request = query_pb.ReadRequest(queue=queue, offset=offset)
        answer = await node.queries.Read(request, timeout=TIMEOUT_S)
        batches.update(dict.fromkeys(answer.batches))
        assert answer.next_offset > offset, "the queue ends early"
        offset = answer.next_offset
    return list(batches)


async def repeated(node: RunningNode, queue_id: int) -> tuple[int, int, bool]:
    [receipt] = await node.append(last(queue_id))
    return receipt.first_offset, receipt.position, receipt.duplicate


async def scheduled(node: RunningNode) -> tuple[str, bool, float | None]:
    """Schedule a batch, always the same, for later than the test."""
    raw = batch(b"later", producer=(9, 0))
    item = schedule_pb.ScheduleItem(batch=raw, deliver_unix_ms=Clock().unix_ms() + 20 * DAY_MS)
    request = schedule_pb.ScheduleRequest(items=[item])
    [outcome] = (await node.schedule.Schedule(request, timeout=TIMEOUT_S)).outcomes
    if outcome.HasField("error"):
        raise error_from_pb(outcome.error)
    waiting = node.runtime.registry.get_sample_value("baton_storage_scheduled_batches")
    return outcome.receipt.schedule_id, outcome.receipt.duplicate, waiting


async def find(node: RunningNode, key: str) -> list[bytes]:
    request = query_pb.FindByKeyRequest(topic=TOPIC, key=key)
    answer = await node.queries.FindByKey(request, timeout=TIMEOUT_S)
    return [
        next(iter(decode_records(one.batch, read_header(one.batch), [one.index]))).body
        for one in answer.messages
    ]


def silent_changes(expected: Readings, answers: Readings) -> dict[str, object]:
    """Return the answers that differ without an error of lost data."""
    return {
        name: answer
        for name, answer in answers.items()
        if answer != expected[name] and not (isinstance(answer, DataLoss) and answer.remedy)
    }


def test_every_kind_of_file_is_damaged_by_these_tests(folder: Path) -> None:
    kinds = KINDS["storage"].values()
    covered = {path for kind in kinds for path in folder.glob(kind.pattern)}
    files = {path for path in folder.rglob("*") if path.is_file()}
    assert {path.name for path in files - covered} <= WITHOUT_CONTENT


CASES = [kind for kind in KINDS["storage"] if kind != "floors"]


@pytest.mark.parametrize("kind", CASES)
async def test_bit_flipped_while_the_node_is_down_is_repaired_or_reported(
    etcd_endpoint: str, folder: Path, tmp_path: Path, kind: str
) -> None:
    async with running_node(etcd_endpoint, folder, segment_bytes=SEGMENT_BYTES) as node:
        expected = await readings(node)
    random, wrong = Random(kind), []
    for number in range(10):
        damaged = tmp_path / f"{number}"
        shutil.copytree(folder, damaged)
        done = flip(damaged, random, kind)
        try:
            async with running_node(etcd_endpoint, damaged, segment_bytes=SEGMENT_BYTES) as node:
                answers = await readings(node)
        except DataLoss as error:
            assert error.remedy
            continue
        if difference := silent_changes(expected, answers):
            wrong.append((done, difference))
    assert not wrong


@pytest.mark.parametrize("kind", CASES)
async def test_bit_flipped_while_the_node_runs_is_repaired_or_reported(
    etcd_endpoint: str, folder: Path, kind: str
) -> None:
    random, wrong = Random(kind), []
    async with running_node(etcd_endpoint, folder, segment_bytes=SEGMENT_BYTES) as node:
        expected = await readings(node)
        for _ in range(10):
            done = flip(folder, random, kind)
            if difference := silent_changes(expected, await readings(node)):
                wrong.append((done, difference))
    assert not wrong


def first_run(folder: Path) -> Path:
    return folder / "keyindex" / f"{0:020d}"


async def test_search_by_key_rebuilds_a_damaged_file_of_the_key_index(
    etcd_endpoint: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_node(etcd_endpoint, folder, segment_bytes=SEGMENT_BYTES) as node:
        expected, content = await find(node, "key-1"), first_run(folder).read_bytes()
    flip_bit(first_run(folder), 60, 3)
    async with running_node(etcd_endpoint, folder, segment_bytes=SEGMENT_BYTES) as node:
        with node.runtime.hub.listen() as buffer:
            for _ in range(2):
                assert await find(node, "key-1") == expected
                assert first_run(folder).read_bytes() == content
            events = [one for one in buffer.take(1 << 20) if one.HasField("key_index_rebuilt")]
        count = node.runtime.registry.get_sample_value("baton_storage_rebuilt_key_runs_total")
    assert count == 1
    assert "key index rebuilt from the log" in caplog.text
    (event,) = events
    assert event.key_index_rebuilt.first_position == 0
    assert event.key_index_rebuilt.next_position == SEGMENT_BYTES


async def test_key_index_that_cannot_be_rebuilt_from_a_damaged_log_is_data_loss(
    etcd_endpoint: str, folder: Path
) -> None:
    async with running_node(etcd_endpoint, folder, segment_bytes=SEGMENT_BYTES) as node:
        content = first_run(folder).read_bytes()
        flip_bit(folder / "log" / f"{0:020d}", 200, 3)
        flip_bit(first_run(folder), 60, 3)
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await find(node, "key-1")
            error = from_rpc_error(lost.value)
            assert isinstance(error, DataLoss)
            assert "fsck" in error.remedy
        assert first_run(folder).read_bytes() != content
