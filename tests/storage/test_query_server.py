"""Goal: QueryService finds appended messages and rejects requests as its contract says.

Method: the whole node over gRPC with a real etcd.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc.aio
import pytest

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from baton.storage.v1 import query_service_pb2 as pb
from baton.storage.v1 import query_service_pb2_grpc as pb_grpc
from batonmq._common.rpc import from_rpc_error
from batonmq._core.records import Message, decode_records, read_header
from batonmq.errors import BatonError, DataLoss, NotReadable, WrongBroker
from tests.storage.batches import TOPIC, TOPIC_ID, batch, tagged
from tests.storage.running_node import BROKER, TIMEOUT_S, RunningNode, running_node
from tests.support.conditions import until

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class QueryNode:
    """A node and a stub for its queries."""

    node: RunningNode
    stub: pb_grpc.QueryServiceAsyncStub

    async def search(self, unix_ms: int, queue_id: int = 0) -> int:
        request = pb.SearchOffsetRequest(queue=queue(queue_id=queue_id), unix_ms=unix_ms)
        return (await response(self.stub.SearchOffset(request, timeout=TIMEOUT_S))).offset

    async def read(self, **fields: object) -> pb.ReadResponse:
        request = pb.ReadRequest(**({"queue": queue()} | fields))  # type: ignore[arg-type]
        return await response(self.stub.Read(request, timeout=TIMEOUT_S))

    async def find(self, **fields: object) -> pb.FindByKeyResponse:
        request = pb.FindByKeyRequest(**({"topic": TOPIC} | fields))  # type: ignore[arg-type]
        return await response(self.stub.FindByKey(request, timeout=TIMEOUT_S))

    async def get(self, message_id: str) -> bytes:
        """Return the body of a message."""
        request = pb.GetMessageRequest(message_id=message_id)
        return body((await response(self.stub.GetMessage(request, timeout=TIMEOUT_S))).message)


async def response(call: Awaitable[Answer]) -> Answer:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def rejection_of(call: Awaitable[object]) -> str:
    """Return the reason of the error of a call that must fail."""
    with pytest.raises(BatonError) as refused:
        await call
    return refused.value.reason


def queue(topic: str = TOPIC, broker: str = BROKER, queue_id: int = 0) -> queue_pb2.QueueRef:
    return queue_pb2.QueueRef(topic=topic, broker=broker, queue_id=queue_id)


def body(message: pb.StoredMessage) -> bytes:
    (record,) = decode_records(message.batch, read_header(message.batch), [message.index])
    return record.body


@asynccontextmanager
async def query_node(
    etcd_endpoint: str, folder: Path, **settings: object
) -> AsyncIterator[QueryNode]:
    async with running_node(etcd_endpoint, folder, cluster="", **settings) as node:
        yield QueryNode(node, node.queries)


@pytest.fixture
async def queries(etcd_endpoint: str, tmp_path: Path) -> AsyncIterator[QueryNode]:
    async with query_node(etcd_endpoint, tmp_path) as node:
        yield node


async def test_messages_are_found_by_time_key_and_id(queries: QueryNode) -> None:
    messages = [Message(b"one", keys=("k", "x")), Message(b"two"), Message(b"3", keys=("k",))]
    (first,) = await queries.node.append(batch(*messages))
    (second,) = await queries.node.append(batch(Message(b"four", keys=("k",)), queue_id=1))
    assert await queries.search(first.store_unix_ms) == 0
    assert await queries.search(first.store_unix_ms + 60_000) == 3
    assert await queries.search(0, queue_id=5) == 0
    matches = await queries.find(key="k")
    assert [body(one) for one in matches.messages] == [b"four", b"3", b"one"]
    assert not matches.more
    limited = await queries.find(key="k", messages_max=1)
    assert ([body(one) for one in limited.messages], limited.more) == ([b"four"], True)
    assert not (await queries.find(key="k", to_unix_ms=first.store_unix_ms)).messages
    assert len((await queries.find(key="k", from_unix_ms=first.store_unix_ms)).messages) == 3
    assert not (await queries.find(key="missing")).messages
    await queries.node.append(batch(Message(b"odd", keys=("a\u00a0b",))))
    assert [body(one) for one in (await queries.find(key="a\u00a0b")).messages] == [b"odd"]
    assert await queries.get(f"{BROKER}-{first.position:x}-2") == b"3"
    assert await queries.get(f"{BROKER}-{second.position:x}-0") == b"four"


async def test_read_returns_stored_batches_without_recording_a_delivery(queries: QueryNode) -> None:
    await queries.node.append(tagged("a", "b", "a"), tagged("c"))
    everything = await queries.read()
    assert len(everything.batches) == 2
    assert (everything.next_offset, everything.queue_next_offset) == (4, 4)
    filtered = await queries.read(expression="c")
    assert (len(filtered.batches), filtered.next_offset) == (1, 4)
    one = await queries.read(offset=1, messages_max=1)
    assert (one.next_offset, one.queue_first_offset) == (2, 0)
    end = await queries.read(offset=4)
    assert (len(end.batches), end.next_offset) == (0, 4)
    assert queries.node.offsets.recorded == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"offset": 5}, "OFFSET_OUT_OF_RANGE"),
        ({"offset": -1}, "INVALID_ARGUMENT"),
        ({"queue": None}, "INVALID_ARGUMENT"),
        ({"queue": queue(topic="missing")}, "TOPIC_NOT_FOUND"),
        ({"queue": queue(queue_id=8)}, "QUEUE_NOT_FOUND"),
        ({"queue": queue(broker="broker-b")}, "WRONG_BROKER"),
        ({"expression": "a || "}, "BAD_EXPRESSION"),
        ({"bytes_max": (4 << 20) + 1}, "LIMIT_EXCEEDED"),
        ({"messages_max": 65_536}, "LIMIT_EXCEEDED"),
    ],
)
async def test_read_rejects_invalid_requests(
    queries: QueryNode, fields: dict[str, object], reason: str
) -> None:
    assert await rejection_of(queries.read(**fields)) == reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "INVALID_ARGUMENT"),
        ({"key": "a b"}, "INVALID_ARGUMENT"),
        ({"key": " a"}, "INVALID_ARGUMENT"),
        ({"key": "k" * 1_025}, "LIMIT_EXCEEDED"),
        ({"key": "k", "messages_max": 1_001}, "LIMIT_EXCEEDED"),
        ({"key": "k", "topic": "missing"}, "TOPIC_NOT_FOUND"),
        ({"key": "k", "topic": "a/b"}, "INVALID_NAME"),
    ],
)
async def test_find_by_key_rejects_invalid_requests(
    queries: QueryNode, fields: dict[str, object], reason: str
) -> None:
    assert await rejection_of(queries.find(**fields)) == reason


@pytest.mark.parametrize(
    ("message_id", "reason"),
    [
        ("", "INVALID_NAME"),
        ("broker-a", "INVALID_ARGUMENT"),
        ("broker-a-0", "WRONG_BROKER"),
        ("broker-a-0-x", "INVALID_ARGUMENT"),
        ("broker-a-0x1-0", "INVALID_ARGUMENT"),
        ("broker-a-01-0", "INVALID_ARGUMENT"),
        ("broker-a-8000000000000000-0", "INVALID_ARGUMENT"),
        ("broker-a-1_0-0", "INVALID_ARGUMENT"),
        ("Broker-0-0", "INVALID_NAME"),
        ("broker-b-0-0", "WRONG_BROKER"),
        ("broker-a-0-1", "MESSAGE_NOT_FOUND"),
        ("broker-a-1-0", "MESSAGE_NOT_FOUND"),
        ("broker-a-7fffffffffffffff-ffffffffff", "MESSAGE_NOT_FOUND"),
    ],
)
async def test_ids_without_a_message_are_rejected(
    queries: QueryNode, message_id: str, reason: str
) -> None:
    await queries.node.append(batch(b"here"))
    assert await rejection_of(queries.get(message_id)) == reason


async def test_messages_of_a_deleted_topic_are_not_found(queries: QueryNode) -> None:
    (receipt,) = await queries.node.append(batch(Message(b"old", keys=("k",))))
    await queries.node.put_topic(topic_id=TOPIC_ID + 1)

    async def deleted() -> bool:
        return not (await queries.find(key="k")).messages

    await until(deleted)
    with pytest.raises(BatonError, match="deleted"):
        await queries.get(f"{BROKER}-{receipt.position:x}-0")


async def test_write_only_topic_is_not_read(queries: QueryNode) -> None:
    await queries.node.append(batch(b"a"))
    spread = [nameserver_pb.QueueSpread(broker=BROKER, queue_count=8)]
    topic = StoredTopic(name=TOPIC, topic_id=TOPIC_ID, spread=spread)
    topic.permission = nameserver_pb.TOPIC_PERMISSION_WRITE
    await queries.node.write_topic(topic)

    async def refused() -> bool:
        try:
            await queries.read()
        except NotReadable:
            return True
        return False

    await until(refused)


async def test_damage_is_reported_counted_once_and_not_served(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with query_node(etcd_endpoint, tmp_path, scrub_bytes_per_s=0) as queries:
        (receipt,) = await queries.node.append(batch(Message(b"precious", keys=("k",))))
        with (tmp_path / "log" / f"{0:020d}").open("r+b") as file:
            file.seek(len(batch(Message(b"precious", keys=("k",)))) - 1)
            file.write(b"?")
        for _ in range(2):
            with pytest.raises(DataLoss):
                await queries.read()
            with pytest.raises(DataLoss):
                await queries.find(key="k")
            with pytest.raises(DataLoss):
                await queries.get(f"{BROKER}-{receipt.position:x}-0")
        assert (await queries.node.describe()).damaged_batch_count == 1


async def test_queue_of_another_broker_is_wrong_broker(etcd_endpoint: str, tmp_path: Path) -> None:
    async with query_node(etcd_endpoint, tmp_path, node_id="broker-x") as queries:
        with pytest.raises(WrongBroker):
            await queries.search(0)
