"""Goal: a busy delivery makes far fewer calls than frames, and the next token gets exactly the
flags of what was sent.

Method: a whole node over gRPC; offsets is the real table of one queue behind the twin.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq_server.offsets.core.ranges import EMPTY
from batonmq_server.storage import advance_settler
from tests.offsets.rules_scene import IDLE, A, B, Scene, offsets
from tests.storage.batches import batch
from tests.storage.running_node import RunningNode, running_node
from tests.storage.test_delivery_streams import Stream, streaming
from tests.support.conditions import until

FRAMES = 60


class Table(Scene):
    """The table of the queue, and the calls of storage to it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.settlements = 0

    def deliver(self, item: pb.DeliveryItem) -> pb.DeliveryOutcome:
        self.calls += 1
        delivered = self.record(
            item.token,
            item.first_offset,
            item.next_offset,
            advance=(item.advance_id, item.advance_to),
        )
        flags = [
            queue_pb2.OffsetRange(first_offset=first, next_offset=next_)
            for first, next_ in delivered.maybe_seen.runs
        ]
        answer = pb.Delivered(maybe_seen=flags, advance_to=delivered.advance_to)
        return pb.DeliveryOutcome(delivered=answer)

    def settled(self, item: pb.AdvanceSettlement) -> None:
        self.settlements += 1
        self.settle(item.token, item.advance_id, item.sent_offset)


@asynccontextmanager
async def busy_node(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[RunningNode, Table]]:
    """Start a node whose queue belongs to A under token 1."""
    monkeypatch.setattr(advance_settler, "INTERVAL_S", 0.01)
    table = Table()
    table.fence(A, 0)
    async with running_node(etcd_endpoint, tmp_path) as node:
        monkeypatch.setattr(node.offsets, "_record", table.deliver)
        node.offsets.on_settlement = table.settled
        yield node, table


async def send_frames(node: RunningNode, stream: Stream, count: int = FRAMES) -> list[int]:
    """Append messages one by one as they are received; return the flagged offsets."""
    flagged = list[int]()
    for number in range(count):
        await node.append(batch(b"%d" % number))
        frame = await stream.frame()
        for run in frame.messages.redelivered:
            flagged += range(run.first_offset, run.next_offset)
    return flagged


async def send_until_ahead(node: RunningNode, stream: Stream, table: Table) -> int:
    """Send frames until more is recorded than is sent; return the number of messages sent."""
    await send_frames(node, stream)
    sent = FRAMES
    while table.queue.delivered_offset == sent:  # the advance has just been used up
        await send_frames(node, stream, 1)
        sent += 1
    assert table.queue.delivered_offset > sent
    return sent


async def test_takeover_after_a_busy_delivery_flags_exactly_what_was_sent(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy_node(etcd_endpoint, tmp_path, monkeypatch) as (node, table):
        async with streaming(node) as stream:
            await stream.start()
            sent = await send_until_ahead(node, stream, table)
            assert table.calls <= sent // 3
            table.commit(1, 50)
        await until(lambda: table.settlements == 1)
        assert table.queue.in_flight() == offsets((50, sent))
        table.now_ms += 30_000
        assert table.fence(B, 1, IDLE).maybe_seen == offsets((50, sent))
        node.offsets.tokens.clear()
        async with streaming(node) as stream:
            await stream.start(token=2, offset=50, bytes_limit=1 << 20)
            first = await stream.frame()
            flags = [(r.first_offset, r.next_offset) for r in first.messages.redelivered]
            assert flags == [(50, sent)]
            assert await send_frames(node, stream, 20) == [], "nothing else is flagged"


async def test_close_of_a_busy_delivery_flags_nothing(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy_node(etcd_endpoint, tmp_path, monkeypatch) as (node, table):
        async with streaming(node) as stream:
            await stream.start()
            await send_until_ahead(node, stream, table)
            table.close(1, 50)
            assert table.fence(B, 1).maybe_seen == EMPTY
        await until(lambda: table.settlements == 1)
        assert table.queue.delivered_offset == 50


async def test_queue_is_drained_soon_after_a_busy_delivery_ends(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        busy_node(etcd_endpoint, tmp_path, monkeypatch) as (node, table),
        streaming(node) as stream,
    ):
        await stream.start()
        table.commit(1, await send_until_ahead(node, stream, table))
        assert not table.queue.drained
        await stream.stop()
        await until(lambda: table.queue.drained)
        assert table.fence(B, 1).maybe_seen == EMPTY
