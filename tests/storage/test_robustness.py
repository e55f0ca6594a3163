"""Goal: whatever a client sends, and whatever happens to the files, the node answers as its
contract says, serves other clients, and loses nothing.

Method: the whole node over gRPC: numbers at the limits of their fields, thousands of long polls,
reads during retention, and files that disappear.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from random import Random

import grpc.aio
import pytest
from crc32c import crc32c

from baton.common.v1 import queue_pb2
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._core.records import BatchBuilder, Message, decode_records, encode_record, read_header
from batonmq.errors import BatonError, DataLoss, QueueNotFound, TopicNotFound
from batonmq_server.storage.core import checks
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.query import MessageQueries, TimeWindow
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import NOW, TOPIC, TOPIC_ID, TOPICS, batch, bodies, open_store, sync
from tests.storage.running_node import BROKER, TIMEOUT_S, RunningNode, pull_request, running_node
from tests.support.conditions import until

INT64_MAX, INT64_MIN = (1 << 63) - 1, -(1 << 63)
INT32_MAX, UINT32_MAX = (1 << 31) - 1, (1 << 32) - 1


def queue(queue_id: int = 0, topic: str = TOPIC) -> queue_pb2.QueueRef:
    return queue_pb2.QueueRef(topic=topic, broker=BROKER, queue_id=queue_id)


async def reason(call: Awaitable[object]) -> str:
    """Return the reason of the error; OK if there was none."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    except BatonError as error:
        return error.reason
    return "OK"


async def test_numbers_at_the_limits_of_their_fields_are_stored_or_rejected_by_name(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    def edge(**fields: int) -> bytes:
        builder = BatchBuilder()
        builder.add(Message(b"edge"), encode_record(Message(b"edge")))
        values = {"id": 0, "epoch": 0, "sequence": 0, "born": 0, "queue_id": 0} | fields
        return builder.encode(
            topic=TOPIC,
            queue_id=values["queue_id"],
            producer=(values["id"], values["epoch"]),
            sequence=values["sequence"],
            born_unix_ms=values["born"],
        )

    async with running_node(etcd_endpoint, tmp_path) as node:
        outcomes = await node.outcomes(
            edge(id=INT64_MAX, epoch=UINT32_MAX, sequence=UINT32_MAX),
            edge(id=INT64_MAX, epoch=UINT32_MAX, sequence=0),
            edge(id=INT64_MAX, epoch=UINT32_MAX, sequence=UINT32_MAX),
            edge(id=INT64_MAX, epoch=UINT32_MAX, sequence=1 << 31),
            edge(id=INT64_MIN),
            edge(id=-1),
            edge(queue_id=UINT32_MAX),
            edge(born=INT64_MIN),
            edge(born=INT64_MAX),
        )
        results = [
            error_from_pb(one.error).reason
            if one.HasField("error")
            else (one.receipt.first_offset, one.receipt.duplicate)
            for one in outcomes
        ]
        assert results == [
            (0, False), (1, False), (0, True), "SEQUENCE_GAP", "BAD_BATCH", "BAD_BATCH",
            "QUEUE_NOT_FOUND", (2, False), (3, False),
        ]  # fmt: skip
        assert await reason(node.pull(offset=INT64_MAX)) == "OFFSET_AHEAD_OF_LOG"
        assert await reason(node.pull(offset=INT64_MIN)) == "INVALID_ARGUMENT"
        assert await reason(node.pull(queue_id=UINT32_MAX)) == "LIMIT_EXCEEDED"
        assert await reason(node.pull(hold_ms=UINT32_MAX)) == "LIMIT_EXCEEDED"
        assert (await node.pull(pull_id=(1 << 64) - 1)).pull_id == (1 << 64) - 1
        for unix_ms, offset in ((INT64_MIN, 0), (INT64_MAX, 4)):
            search = query_pb.SearchOffsetRequest(queue=queue(), unix_ms=unix_ms)
            answer = await node.queries.SearchOffset(search, timeout=TIMEOUT_S)
            assert answer.offset == offset
        for window in ((INT64_MIN, INT64_MIN), (INT64_MAX, 1), (INT64_MAX, INT64_MAX)):
            begin, end = window
            by_key = query_pb.FindByKeyRequest(
                topic=TOPIC, key="k", from_unix_ms=begin, to_unix_ms=end
            )
            assert not (await node.queries.FindByKey(by_key, timeout=TIMEOUT_S)).messages
    async with running_node(etcd_endpoint, tmp_path) as node:
        (again,) = await node.append(edge(id=INT64_MAX, epoch=UINT32_MAX, sequence=0))
        assert (again.first_offset, again.duplicate) == (1, True)


def spoiled(raw: bytes, random: Random) -> bytes:
    """Return `raw` with changed bytes and numbers and a correct checksum."""
    changed = bytearray(raw)
    for _ in range(random.choice((1, 1, 2, 3, 8))):
        at = random.randrange(4, len(changed) - 4)
        numbers = (0, 1, 7, 8, 255, 65_535, 65_536, INT32_MAX, UINT32_MAX, random.randrange(200))
        changed[at : at + 4] = random.choice(numbers).to_bytes(4, "big")
    changed[8:12] = len(changed).to_bytes(4, "big")
    changed[52:56] = crc32c(bytes(changed[56:])).to_bytes(4, "big")
    return bytes(changed)


def test_batch_that_passes_the_checks_never_harms_the_store_or_its_readers() -> None:
    """An exception during an append would stop the node."""
    random = Random(7)
    messages = [Message(b"b" * n, f"t{n}", ("k", f"k{n}"), {"a": "b"}) for n in range(5)]
    batches = [batch(*messages, producer=(3, 1)), batch(*messages * 12), batch(b"x", queue_id=1)]
    opened = open_store(MemoryDisk(), segment_bytes=1 << 20, run_entries=500)
    stored_count = 0
    for _ in range(3_000):
        try:
            checked = checks.check(spoiled(random.choice(batches), random))
        except BatonError:
            continue
        if checked.header.topic == TOPIC:
            (outcome,) = opened.store.append([checked], TOPICS, NOW)
            stored_count += isinstance(outcome, StoreReceipt) and not outcome.duplicate
    sync(opened.store)
    assert stored_count > 100
    again = open_store(opened.disk.killed(), segment_bytes=1 << 20, run_entries=500)
    assert (again.report.batches, again.report.truncated_bytes) == (stored_count, 0)
    for key in ("k", "k1"):
        window = TimeWindow(0, 1 << 62)
        MessageQueries(again.store).find(
            TOPIC_ID, key, window, messages_max=1_000, bytes_max=1 << 30
        )
    for queue_id in range(8):
        bodies(again.store, queue_id)


async def test_one_append_wakes_thousands_of_long_polls_of_its_queue_only(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    count = 2_000
    async with running_node(etcd_endpoint, tmp_path) as node, asyncio.TaskGroup() as tasks:

        async def held(number: int) -> pb.PullResponse:
            request = pull_request(group=f"g{number}", queue_id=number % 2, hold_ms=30_000)
            return await node.stub.Pull(request, timeout=60)

        waiting = [tasks.create_task(held(number)) for number in range(count)]
        await node.wait_long_polls(count)
        await node.append(batch(b"a"))
        answers = [await one for one in waiting[::2]]
        assert {len(answer.batches) for answer in answers} == {1}
        assert len({group for group, *_ in node.offsets.recorded}) == count // 2
        await node.wait_long_polls(count // 2)
        await node.append(batch(b"b", queue_id=1))
        assert {(await one).next_offset for one in waiting[1::2]} == {1}


@pytest.mark.parametrize("change", ["deleted", "shrunk", "recreated"])
async def test_long_polls_are_answered_when_their_topic_changes(
    etcd_endpoint: str, tmp_path: Path, change: str
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, asyncio.TaskGroup() as tasks:

        async def held(number: int) -> BatonError | pb.PullResponse:
            try:
                return await node.pull(group=f"g{number}", queue_id=5, offset=1, hold_ms=20_000)
            except BatonError as error:
                return error

        await node.append(batch(b"old", queue_id=5))
        waiting = [tasks.create_task(held(number)) for number in range(50)]
        await node.wait_long_polls(50)
        if change == "deleted":
            await node.etcd.delete(node.etcd.key("topics", TOPIC))
        elif change == "shrunk":
            await node.put_topic(broker_a=3)
        else:
            await node.put_topic(topic_id=99, broker_a=8)
        expected = {"deleted": TopicNotFound, "shrunk": QueueNotFound}.get(change, BatonError)
        outcomes = [await one for one in waiting]
        assert all(isinstance(one, expected) for one in outcomes)
        if change == "recreated":
            reasons = {one.reason for one in outcomes if isinstance(one, BatonError)}
            assert reasons == {"OFFSET_AHEAD_OF_LOG"}, "the new topic has no message at offset 1"
        await node.wait_long_polls(0)


class EdgeReaders:
    """Read the oldest message in every way and count the results."""

    def __init__(self, node: RunningNode) -> None:
        self._node, self._stopping = node, False
        self.seen: Counter[str] = Counter()

    def stop(self) -> None:
        self._stopping = True

    async def run(self, call: Callable[[], Awaitable[None]]) -> None:
        while not self._stopping:
            self.seen[f"{call.__name__} {await reason(call())}"] += 1

    async def first(self) -> int:
        request = pb.QueryOffsetsRequest(queues=[queue()])
        answer = await self._node.stub.QueryOffsets(request, timeout=TIMEOUT_S)
        return answer.outcomes[0].offsets.first_offset

    async def pull(self) -> None:
        answer = await self._node.pull(offset=max(await self.first() - 2, 0), messages_max=3)
        check_bodies(answer.batches)

    async def read(self) -> None:
        request = query_pb.ReadRequest(queue=queue(), offset=await self.first(), messages_max=3)
        answer = await self._node.queries.Read(request, timeout=TIMEOUT_S)
        check_bodies(answer.batches)

    async def find(self) -> None:
        request = query_pb.FindByKeyRequest(topic=TOPIC, key="all", messages_max=1_000)
        answer = await self._node.queries.FindByKey(request, timeout=TIMEOUT_S)
        assert answer.messages
        oldest = answer.messages[-1]
        message_id = f"{BROKER}-{read_header(oldest.batch).position:x}-{oldest.index:x}"
        await self._node.queries.GetMessage(
            query_pb.GetMessageRequest(message_id=message_id), timeout=TIMEOUT_S
        )

    async def search(self) -> None:
        request = query_pb.SearchOffsetRequest(queue=queue(), unix_ms=1)
        await self._node.queries.SearchOffset(request, timeout=TIMEOUT_S)


def check_bodies(batches: Iterable[bytes]) -> None:
    for raw in batches:
        header = read_header(raw)
        for record in decode_records(raw, header, range(header.count)):
            assert record.body.startswith(b"%d:" % record.offset)


async def test_reads_during_retention_are_correct_or_rejected(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(
        etcd_endpoint, tmp_path, segment_bytes=4_096, retention_bytes=12_288, disk_interval_ms=10
    ) as node:
        readers = EdgeReaders(node)
        await node.append(batch(Message(b"0:", keys=("all",))))
        async with asyncio.TaskGroup() as tasks:
            for call in (readers.pull, readers.read, readers.find, readers.search):
                tasks.create_task(readers.run(call))
            for number in range(1, 150):
                body = b"%d:" % number + bytes(1_200)
                await node.append(batch(Message(body, keys=("all",))))
            readers.stop()

        async def moved() -> bool:
            return await readers.first() > 100

        await until(moved)
        assert {"pull OK", "read OK", "find OK", "search OK"} <= readers.seen.keys()
        allowed = {"read OFFSET_OUT_OF_RANGE", "find MESSAGE_NOT_FOUND"}
        assert {one for one in readers.seen if not one.endswith(" OK")} <= allowed


async def test_missing_segment_is_data_loss_and_the_rest_is_served(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    """The file was removed; a node that has it open could still read it."""
    async with running_node(etcd_endpoint, tmp_path, segment_bytes=4_096) as node:
        for number in range(6):
            await node.append(batch(b"%d" % number + bytes(1_800)))
    names = sorted(path.name for path in (tmp_path / "log").iterdir())
    # The scrub may have opened it before it vanishes.
    async with running_node(
        etcd_endpoint, tmp_path, segment_bytes=4_096, scrub_bytes_per_s=0
    ) as node:
        (tmp_path / "log" / names[1]).unlink()
        for _ in range(2):
            with pytest.raises(DataLoss) as lost:
                await node.pull(offset=2)
        assert lost.value.facts == {"position": str(int(names[1]))}
        assert (await node.pull(offset=0, messages_max=2)).next_offset == 2
        assert (await node.pull(offset=4)).next_offset == 6
        assert (await node.append(batch(b"more")))[0].first_offset == 6
        assert (await node.describe()).damaged_batch_count == 1


async def test_missing_index_is_rebuilt_by_the_next_read(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"), batch(b"b", queue_id=1))
    async with running_node(etcd_endpoint, tmp_path) as node:
        (index,) = (tmp_path / "consumequeue").glob("*/0/*")
        index.unlink()
        assert (await node.pull()).next_offset == 1
        assert (await node.pull(queue_id=1)).next_offset == 1
        assert (await node.describe()).damaged_batch_count == 0
    async with running_node(etcd_endpoint, tmp_path) as node:
        assert (await node.pull()).next_offset == 1
