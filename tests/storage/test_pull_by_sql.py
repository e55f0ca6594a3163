"""Goal: Pull and Read with a condition deliver, count and record as with tags; a scan without a
match advances in bounded steps; an invalid condition is rejected with the reason.

Method: the whole node over gRPC with a real etcd; offsets is a twin.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from baton.common.v1 import queue_pb2
from baton.storage.v1 import query_service_pb2 as query_pb
from batonmq._common.rpc import from_rpc_error
from batonmq._core.records import Message, check_batch, decode_records
from batonmq.errors import BadExpression, LimitExceeded
from batonmq_server.storage.core.property_filter import STEPS_MAX
from tests.storage.batches import TOPIC, batch
from tests.storage.running_node import BROKER, GROUP, TIMEOUT_S, RunningNode, running_node

QUEUE = queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=0)


def priced(*prices: int | None, tag: str = "") -> bytes:
    """Return a batch of messages with these prices; None for a message without properties."""
    return batch(
        *(Message(b"" if one is None else b"%d" % one, tag, (), _properties(one)) for one in prices)
    )


def _properties(price: int | None) -> dict[str, str]:
    return {} if price is None else {"currency": "EUR", "price": str(price)}


async def read(
    node: RunningNode, offset: int, expression: str, **limits: int
) -> query_pb.ReadResponse:
    request = query_pb.ReadRequest(queue=QUEUE, offset=offset, expression=expression, **limits)
    try:
        return await node.queries.Read(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def test_pull_with_a_condition_delivers_counts_and_records(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        original = priced(3, 30, None)
        await node.append(original, priced(4), priced(None, 40))
        answer = await node.pull(expression="sql: price > 10")
        assert [check_batch(raw, stamped=True).first_offset for raw in answer.batches] == [0, 4]
        assert answer.batches[0][56:] == original[56:]
        assert (answer.next_offset, answer.filtered_count) == (6, 4)
        nothing = await node.pull(expression="sql: price > 100")
        assert (list(nothing.batches), nothing.next_offset, nothing.filtered_count) == ([], 6, 6)
        assert node.offsets.recorded == [(GROUP, 0, 0, 6)] * 2


async def test_limits_of_a_pull_are_exact(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(priced(*[1, 50] * 20), priced(*[1, 50] * 20))
        answer = await node.pull(expression="sql: price = 50", messages_max=5)
        assert (len(answer.batches), answer.next_offset, answer.filtered_count) == (1, 11, 6)
        answer = await node.pull(expression="sql: price = 50", messages_max=5, offset=11)
        assert (len(answer.batches), answer.next_offset, answer.filtered_count) == (1, 21, 5)
        answer = await node.pull(expression="sql: price = 50", bytes_max=1)
        assert (len(answer.batches), answer.next_offset, answer.filtered_count) == (1, 41, 21)


async def test_read_with_a_condition_equals_a_pull(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(priced(3, 30), priced(4), priced(None, 40, tag="paid"))
        for expression in ("sql: price > 10", "sql: TAGS = 'paid'", "sql: price IS NULL"):
            pulled = await node.pull(expression=expression)
            answer = await read(node, 0, expression)
            assert list(answer.batches) == list(pulled.batches)
            assert answer.next_offset == pulled.next_offset == 5
        assert (await read(node, 5, "sql: price > 10")).next_offset == 5


async def test_long_scan_without_a_match_continues_until_it_finds_one(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        for _ in range(4):
            await node.append(*[priced(*range(1_000)) for _ in range(10)], priced(5_000))
        offset, requests, bodies = 0, 0, list[bytes]()
        while offset < 40_004:
            answer = await node.pull(expression="sql: price > 1000", offset=offset)
            assert offset < answer.next_offset <= offset + STEPS_MAX
            for raw in answer.batches:
                header = check_batch(raw, stamped=True)
                bodies += [r.body for r in decode_records(raw, header, range(header.count))]
            delivered = answer.next_offset - offset - answer.filtered_count
            assert delivered == len(answer.batches)
            offset, requests = answer.next_offset, requests + 1
        assert bodies == [b"5000"] * 4
        assert requests >= 40_004 // STEPS_MAX
        assert node.offsets.recorded[-1][3] == 40_004


async def test_long_poll_with_a_condition_is_answered_by_a_match(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, asyncio.TaskGroup() as tasks:
        long_poll = tasks.create_task(node.pull(expression="sql: price > 10", hold_ms=10_000))
        await node.wait_long_polls(1)
        await node.append(priced(1, 11))
        answer = await long_poll
        assert (len(answer.batches), answer.next_offset, answer.filtered_count) == (1, 2, 1)


@pytest.mark.parametrize("expression", ["sql: price >", "sql:price > 5", "price > 5", "sql: "])
async def test_bad_condition_is_rejected_and_nothing_recorded(
    etcd_endpoint: str, tmp_path: Path, expression: str
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(priced(1))
        with pytest.raises(BadExpression):
            await node.pull(expression=expression)
        with pytest.raises(BadExpression):
            await read(node, 0, expression)
        with pytest.raises(LimitExceeded):
            await node.pull(expression=f"sql: a = '{'x' * 2_048}'")
        assert node.offsets.recorded == []
