"""Goal: Append has one outcome per batch, and never acknowledges a batch that is not safe.

Method: the whole node over gRPC with a real etcd; after each rejection the log is checked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.common.v1 import error_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.aio import STEP_ITEMS
from batonmq._common.rpc import error_from_pb
from batonmq._core.records import HEADER_BYTES, BatchBuilder, Message, encode_record
from batonmq.errors import (
    BadBatch,
    BadChecksum,
    BatonError,
    InvalidArgument,
    InvalidName,
    LimitExceeded,
    TopicNotFound,
)
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.storage import server
from batonmq_server.storage.core.checks import CheckedBatch, check
from tests.storage.batches import TOPIC, TOPIC_ID, batch
from tests.storage.running_node import TIMEOUT_S, running_node


def reasons(outcomes: list[pb.AppendOutcome]) -> list[str]:
    return [
        error_pb2.Reason.Name(one.error.reason).removeprefix("REASON_")
        if one.HasField("error")
        else "stored"
        for one in outcomes
    ]


async def test_receipt_has_position_offset_and_durability(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        first, second = await node.append(batch(b"a", b"b"), batch(b"c"))
        assert (first.first_offset, second.first_offset) == (0, 2)
        assert first.position == 0
        assert second.position == len(batch(b"a", b"b"))
        assert first.durability == second.durability == pb.DURABILITY_FSYNCED
        assert first.store_unix_ms > 1_700_000_000_000
        state = await node.describe()
        assert state.synced_position == state.next_position > second.position
        assert (state.broker, state.queue_count, state.appended_count) == ("broker-a", 1, 3)


async def test_other_calls_go_on_while_many_batches_are_checked(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, checked = 0, Counter[int]()

    def counted(*arguments: Any) -> CheckedBatch:
        checked[turn] += 1
        return check(*arguments)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    async with running_node(etcd_endpoint, tmp_path) as node, asyncio.TaskGroup() as tasks:
        monkeypatch.setattr(server, "check", counted)
        counting = tasks.create_task(count_turns())
        receipts = await node.append(*(batch(b"%d" % number) for number in range(200)))
        counting.cancel()
    assert [receipt.first_offset for receipt in receipts] == list(range(200))
    assert max(checked.values()) <= STEP_ITEMS


async def test_receipt_of_memory_durability_says_memory(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(
        etcd_endpoint, tmp_path, flush="async", flush_interval_ms=60_000
    ) as node:
        (receipt,) = await node.append(batch(b"a"))
        assert receipt.durability == pb.DURABILITY_MEMORY
        assert (await node.pull()).batches == []
        (receipt,) = await node.append(batch(b"b"), durability=pb.DURABILITY_FSYNCED)
        assert receipt.durability == pb.DURABILITY_FSYNCED
        assert (await node.pull()).next_offset == 2


async def test_retry_gets_the_first_receipt_even_after_a_restart(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    raw = batch(b"a", producer=(5, 1), sequence=0)
    async with running_node(etcd_endpoint, tmp_path) as node:
        (first,) = await node.append(raw)
        (again,) = await node.append(raw)
        assert again.duplicate
        assert not first.duplicate
    async with running_node(etcd_endpoint, tmp_path) as node:
        (after,) = await node.append(raw)
        assert after == again
        assert (await node.pull()).queue_next_offset == 1


async def test_empty_request_is_rejected(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        with pytest.raises(InvalidArgument) as refused:
            await node.append()
        assert refused.value.facts == {"field": "batches"}


async def test_request_beyond_a_limit_is_rejected_with_limit_and_size(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        with pytest.raises(LimitExceeded) as refused:
            await node.append(*[batch(b"a")] * 1_025)
        assert refused.value.facts == {"field": "batches", "limit": "1024", "actual": "1025"}
        with pytest.raises(LimitExceeded) as refused:
            await node.append(*[bytes(1 << 23)] * 4, b"x")
        assert refused.value.facts["actual"] == str((1 << 25) + 1)
        assert (await node.describe()).next_position == 0


async def test_durability_that_the_node_cannot_reach_is_rejected(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        with pytest.raises(InvalidArgument) as refused:
            await node.append(batch(b"a"), durability=pb.DURABILITY_REPLICATED)
        assert refused.value.facts == {"field": "durability"}
        assert (await node.describe()).next_position == 0


def changed(raw: bytes, at: int, to: bytes) -> bytes:
    return raw[:at] + to + raw[at + len(to) :]


GOOD = batch(b"hello")
BAD_BATCHES: list[tuple[bytes, type[BatonError], dict[str, str]]] = [
    (b"", BadBatch, {"field": "length"}),
    (GOOD[: HEADER_BYTES - 1], BadBatch, {"field": "length"}),
    (GOOD[:-1], BadBatch, {"field": "length"}),
    (GOOD + b"x", BadBatch, {"field": "length"}),
    (changed(GOOD, 0, b"XXXX"), BadBatch, {"field": "magic"}),
    (changed(GOOD, 4, b"\0\2"), BadBatch, {"field": "magic"}),
    (changed(GOOD, 84, bytes(4)), BadBatch, {"field": "count"}),
    (changed(GOOD, 94, b"\0\3"), BadBatch, {"field": "flags"}),
    (changed(GOOD, 94, b"\0\x10"), BadBatch, {"field": "flags"}),
    (changed(GOOD, 94, b"\0\1"), BadChecksum, {}),
    (bytes(8 * 1024 * 1024 + 1), LimitExceeded, {"field": "batch"}),
    (batch(b"a", topic="a/b"), InvalidName, {"field": "topic"}),
    (batch(b"a", topic="..\n"), InvalidName, {"field": "topic"}),
    (batch(b"a", topic=""), InvalidName, {"field": "topic"}),
    (batch(b"a", topic="x" * 128), InvalidName, {"field": "topic"}),
    (batch(b"a", topic="missing"), TopicNotFound, {"topic": "missing"}),
]


async def test_each_bad_batch_has_its_own_error_and_writes_nothing(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        outcomes = await node.outcomes(*(raw for raw, _, _ in BAD_BATCHES))
        for outcome, (raw, expected, facts) in zip(outcomes, BAD_BATCHES, strict=True):
            assert outcome.HasField("error"), raw[:100]
            rejection = error_from_pb(outcome.error)
            assert isinstance(rejection, expected), (raw[:100], rejection)
            assert facts.items() <= rejection.facts.items()
        assert (await node.describe()).next_position == 0


async def test_wrong_checksum_is_reported_with_expected_and_actual_value(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        (outcome,) = await node.outcomes(changed(GOOD, len(GOOD) - 1, b"!"))
        rejection = error_from_pb(outcome.error)
        assert isinstance(rejection, BadChecksum)
        assert rejection.facts.keys() == {"expected", "actual"}
        assert (await node.describe()).next_position == 0


async def test_queue_that_the_topic_does_not_have_on_this_broker_is_not_found(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.put_topic("elsewhere", 9, broker_b=4)
        outcomes = await node.outcomes(batch(b"a", queue_id=8), batch(b"a", topic="elsewhere"))
        assert reasons(outcomes) == ["QUEUE_NOT_FOUND"] * 2
        assert dict(outcomes[0].error.facts) == {
            "topic": TOPIC, "queue_id": "8", "queue_count": "8",
        }  # fmt: skip
        assert outcomes[1].error.facts["queue_count"] == "0"
        assert (await node.describe()).next_position == 0


async def test_bad_batch_does_not_stop_the_other_batches(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        outcomes = await node.outcomes(
            batch(b"a"), b"junk", batch(b"b", topic="missing"), batch(b"c")
        )
        assert reasons(outcomes) == ["stored", "BAD_BATCH", "TOPIC_NOT_FOUND", "stored"]
        assert outcomes[3].receipt.first_offset == 1


async def test_producer_errors_are_item_errors(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(*(batch(b"x", producer=(5, 2), sequence=n) for n in range(6)))
        end = (await node.describe()).next_position
        outcomes = await node.outcomes(
            batch(b"x", producer=(5, 2), sequence=7),
            batch(b"x", producer=(5, 1), sequence=6),
            batch(b"x", producer=(5, 2), sequence=0),
        )
        assert reasons(outcomes) == ["SEQUENCE_GAP", "PRODUCER_FENCED", "DUPLICATE_SEQUENCE"]
        assert (await node.describe()).next_position == end


async def test_topic_created_just_before_the_append_is_found(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        for number in range(20):
            await node.put_topic(f"fresh-{number}", 100 + number)
            (receipt,) = await node.append(batch(b"a", topic=f"fresh-{number}"))
            assert receipt.first_offset == 0


async def test_deleted_topic_is_not_found(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"))
        await node.etcd.delete(node.etcd.key("topics", TOPIC))
        await node.put_topic("marker", 50)
        await node.append(batch(b"a", topic="marker"))
        end = (await node.describe()).next_position
        with pytest.raises(TopicNotFound):
            while True:  # wait until the node has seen the deletion
                await node.append(batch(b"a"))
                end = (await node.describe()).next_position
        assert (await node.describe()).next_position == end


async def test_topic_created_again_starts_at_offset_zero(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"old"), batch(b"old"))
        await node.put_topic(TOPIC, 1_000)
        first_offsets = []
        while 0 not in first_offsets:  # wait until the node has seen the change
            (receipt,) = await node.append(batch(b"new"))
            first_offsets.append(receipt.first_offset)
        assert first_offsets == [*range(2, len(first_offsets) + 1), 0]


async def test_batch_that_names_an_earlier_epoch_is_rejected(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        spread = nameserver_pb.QueueSpread(broker="broker-a", queue_count=8, opened_epoch=2)
        await node.write_topic(StoredTopic(name=TOPIC, topic_id=TOPIC_ID, spread=[spread], epoch=2))
        request = pb.AppendRequest(batches=[batch(b"a"), batch(b"b")], topic_epochs=[2, 1])
        outcomes = (await node.stub.Append(request, timeout=TIMEOUT_S)).outcomes
        assert reasons(list(outcomes)) == ["stored", "NOT_WRITABLE"]


async def test_broker_that_is_behind_the_epoch_of_a_batch_looks_the_topic_up(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a", queue_id=5))
        monkeypatch.setattr(EtcdMirror, "_apply", lambda *_: None)  # it follows etcd no more
        spread = nameserver_pb.QueueSpread(broker="broker-a", queue_count=8, write_queue_count=4)
        await node.write_topic(StoredTopic(name=TOPIC, topic_id=TOPIC_ID, spread=[spread], epoch=1))
        for epoch, outcome in ((0, "stored"), (1, "NOT_WRITABLE"), (0, "NOT_WRITABLE")):
            request = pb.AppendRequest(
                batches=[batch(b"b", queue_id=5)],
                topic_epochs=[epoch],
                durability=pb.DURABILITY_MEMORY,
            )
            outcomes = (await node.stub.Append(request, timeout=TIMEOUT_S)).outcomes
            assert reasons(list(outcomes)) == [outcome]


async def test_call_without_a_deadline_is_rejected(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node.stub.Append(pb.AppendRequest(batches=[batch(b"a")]))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await node.describe()).next_position == 0


async def test_record_with_wrong_lengths_is_rejected(etcd_endpoint: str, tmp_path: Path) -> None:
    message = Message(b"hello", tag="T")
    record = bytearray(encode_record(message))
    record[4:8] = (1_000).to_bytes(4, "big")
    builder = BatchBuilder()
    builder.add(message, bytes(record))
    async with running_node(etcd_endpoint, tmp_path) as node:
        (outcome,) = await node.outcomes(builder.encode(topic=TOPIC, queue_id=0))
        assert reasons([outcome]) == ["BAD_BATCH"]
        assert outcome.error.facts["field"] == "record"


async def test_concurrent_appends_share_syncs(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        calls = [
            node.stub.Append(
                pb.AppendRequest(batches=[batch(f"{n}".encode(), queue_id=n % 8)]),
                timeout=TIMEOUT_S,
            )
            for n in range(300)
        ]
        receipts = [(await call).outcomes[0].receipt for call in calls]
        assert {one.durability for one in receipts} == {pb.DURABILITY_FSYNCED}
        assert len({one.position for one in receipts}) == 300
        syncs = node.runtime.registry.get_sample_value("baton_storage_fsync_seconds_count")
        assert syncs is not None
        assert syncs < 300
