"""Goal: a busy delivery sends frames without a call only as far and as long as offsets permits, and
offsets learns what was sent (protocol 6.8).

Method: the advance of one delivery on times that the test chooses; the settler and the recorder
with an offsets twin that loses answers; and a whole node.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._common.clock import Clock
from batonmq.errors import BatonError, DeliveryUnrecorded, Fenced
from batonmq_server.storage import advance_settler, delivery_advance
from batonmq_server.storage.advance_settler import AdvanceSettler
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.delivery_advance import ADVANCE_MS, OFFSETS_MIN, DeliveryAdvance
from batonmq_server.storage.delivery_recorder import (
    AdvanceWish,
    PendingDelivery,
    RecordedDelivery,
    Settlement,
)
from tests.storage.batches import batch
from tests.storage.running_node import RunningNode, running_node
from tests.storage.test_delivery_recorder import HOLDER, recording
from tests.storage.test_delivery_streams import Stream, streaming
from tests.storage.test_pull_gates import gate_seen
from tests.support.clock import MovableClock
from tests.support.conditions import until

KEY, OTHER_KEY = (7, 0), (8, 0)
SEEN = ("offsets", 3)


class Scene:
    """An advance, its settler, and the time."""

    def __init__(self) -> None:
        self.ids = iter(range(101, 200))
        self.begun: list[DeliveryAdvance] = []
        self.advance = DeliveryAdvance(HOLDER, lambda: next(self.ids), self.begun.append)
        self.now_ms = 50_000

    def record(self, first: int, next_: int, advance_to: int | None = None) -> AdvanceWish:
        """Record a range; offsets permits what is asked for, or up to `advance_to`."""
        wish = self.advance.wish((first, next_), self.now_ms)
        end = wish.advance_to if advance_to is None else advance_to
        record = RecordedDelivery((), SEEN[1], self.now_ms, SEEN[0], end)
        self.advance.recorded(KEY, (first, next_), record, wish.advance_id)
        return wish

    def covers(
        self, first: int, next_: int, key: QueueKey = KEY, seen: tuple[str, int] = SEEN
    ) -> bool:
        return self.advance.covering(key, (first, next_), seen, self.now_ms) is not None


def busy() -> Scene:
    """Return a delivery that has sent [0, 2), and has an advance up to 50."""
    scene = Scene()
    scene.record(0, 1)
    scene.now_ms += 10
    scene.record(1, 2, 50)
    return scene


def test_first_frame_asks_for_no_advance() -> None:
    scene = Scene()
    assert scene.record(0, 1) == AdvanceWish()
    assert not scene.covers(1, 2)
    assert scene.begun == []


def test_frame_soon_after_another_asks_for_an_advance_by_the_rate() -> None:
    scene = Scene()
    scene.record(0, 10)
    scene.now_ms += 500
    assert scene.record(10, 60) == AdvanceWish(101, 60 + 2 * 50 * ADVANCE_MS // 500)
    assert scene.begun == [scene.advance]


def test_slow_delivery_asks_for_the_smallest_advance() -> None:
    scene = Scene()
    scene.record(0, 1)
    scene.now_ms += ADVANCE_MS
    assert scene.record(1, 2) == AdvanceWish(101, 2 + OFFSETS_MIN)


def test_delivery_that_was_idle_asks_for_no_advance() -> None:
    scene = Scene()
    scene.record(0, 1)
    scene.now_ms += ADVANCE_MS + 1
    assert scene.record(1, 2) == AdvanceWish()


def test_next_record_of_a_busy_delivery_extends_its_advance() -> None:
    scene = busy()
    scene.now_ms += 900
    assert scene.covers(2, 40)
    scene.now_ms += 200
    assert not scene.covers(40, 41)
    wish = scene.record(40, 41)
    assert (wish.advance_id, wish.advance_to) == (101, 41 + 2 * 39 * ADVANCE_MS // 1_100)


def test_frame_inside_the_advance_needs_no_call() -> None:
    assert busy().covers(2, 50)


def test_frame_beyond_the_advance_needs_a_call() -> None:
    assert not busy().covers(49, 51)


def test_advance_is_used_for_one_second_after_its_request() -> None:
    scene = busy()
    scene.now_ms += ADVANCE_MS
    assert scene.covers(2, 3)
    scene.now_ms += 1
    assert not scene.covers(3, 4)


def test_advance_is_not_used_for_a_topic_that_was_created_again() -> None:
    assert not busy().covers(2, 3, key=OTHER_KEY)


@pytest.mark.parametrize("seen", [("offsets", 4), ("offsets-b", 3)])
def test_advance_is_not_used_after_a_new_epoch_or_set_was_seen(seen: tuple[str, int]) -> None:
    assert not busy().covers(2, 3, seen=seen)


def test_frame_of_an_advance_has_the_flags_of_its_range() -> None:
    scene = Scene()
    runs = [(0, 3), (5, 8), (20, 30)]
    redelivered = [queue_pb2.OffsetRange(first_offset=a, next_offset=b) for a, b in runs]
    _, wish = (scene.advance.wish(range_, scene.now_ms) for range_ in [(0, 1), (0, 2)])
    record = RecordedDelivery(redelivered, SEEN[1], scene.now_ms, SEEN[0], 40)
    own = scene.advance.recorded(KEY, (0, 2), record, wish.advance_id)
    assert [(r.first_offset, r.next_offset) for r in own.redelivered] == [(0, 2)]
    flags = []
    for range_ in [(2, 6), (6, 7), (8, 20), (20, 40)]:
        covering = scene.advance.covering(KEY, range_, SEEN, scene.now_ms)
        assert covering is not None
        flags.append([(r.first_offset, r.next_offset) for r in covering.redelivered])
    assert flags == [[(2, 3), (5, 6)], [(6, 7)], [], [(20, 30)]]


# ---- settlement


def test_settlement_names_what_was_sent_without_a_call() -> None:
    scene = busy()
    scene.covers(2, 14)
    scene.advance.ended = True
    assert scene.advance.is_due(scene.now_ms)
    assert scene.advance.settle() == Settlement(HOLDER, 101, 14)


def test_settled_advance_is_not_used_again() -> None:
    scene = busy()
    scene.advance.settle()
    assert not scene.covers(2, 3)
    assert scene.record(2, 3).advance_id == 102, "an id is used for one advance"


def test_record_that_is_answered_after_the_settlement_is_no_advance() -> None:
    """The call waited behind another one for 2 s; the settlement leaves right after it."""
    scene = Scene()
    scene.record(0, 1)
    scene.now_ms += 10
    wish = scene.advance.wish((1, 2), scene.now_ms)
    assert wish.advance_id
    scene.now_ms += 2 * ADVANCE_MS + 1
    assert scene.advance.is_due(scene.now_ms)
    assert scene.advance.settle().advance_id == wish.advance_id
    record = RecordedDelivery((), SEEN[1], scene.now_ms, SEEN[0], wish.advance_to)
    scene.advance.recorded(KEY, (1, 2), record, wish.advance_id)
    assert not scene.covers(2, 3)


def test_record_of_a_settled_advance_is_none_of_the_next_one() -> None:
    scene = busy()
    old = scene.advance.wish((2, 50), scene.now_ms)
    scene.advance.settle()
    new = scene.advance.wish((50, 51), scene.now_ms)
    assert old.advance_id != new.advance_id
    late = RecordedDelivery((), SEEN[1], scene.now_ms, SEEN[0], 1_000)
    scene.advance.recorded(KEY, (2, 50), late, old.advance_id)
    assert not scene.covers(51, 52)


def test_advance_is_due_two_seconds_after_its_last_record() -> None:
    scene = busy()
    scene.now_ms += 2 * ADVANCE_MS
    assert not scene.advance.is_due(scene.now_ms)
    scene.now_ms += 1
    assert scene.advance.is_due(scene.now_ms)


def test_record_without_an_answer_is_settled_too() -> None:
    scene = Scene()
    scene.record(0, 1)
    scene.advance.wish((1, 2), scene.now_ms)
    scene.advance.ended = True
    assert scene.advance.settle() == Settlement(HOLDER, 101, 1)


class Offsets:
    """Takes settlements; loses the answers of the first `lost`."""

    def __init__(self, lost: int = 0) -> None:
        self.lost, self.settlements = lost, list[Settlement]()

    async def settle(self, settlement: Settlement) -> None:
        self.settlements.append(settlement)
        if len(self.settlements) <= self.lost:
            raise DeliveryUnrecorded("no answer")


async def test_settler_settles_an_advance_once() -> None:
    scene, offsets, clock = busy(), Offsets(), MovableClock()
    settler = AdvanceSettler(offsets.settle, clock)
    settler.watch(scene.advance)
    scene.advance.ended = True
    await settler.settle_due()
    await settler.settle_due()
    assert offsets.settlements == [Settlement(HOLDER, 101, 2)]


async def test_settlement_without_an_answer_is_repeated_as_it_was() -> None:
    scene, offsets = busy(), Offsets(lost=2)
    settler = AdvanceSettler(offsets.settle, MovableClock())
    settler.watch(scene.advance)
    scene.advance.ended = True
    for _ in range(5):
        await settler.settle_due()
    assert offsets.settlements == [Settlement(HOLDER, 101, 2)] * 3


async def test_settlement_is_given_up_after_some_attempts() -> None:
    scene, offsets = busy(), Offsets(lost=1_000)
    settler = AdvanceSettler(offsets.settle, MovableClock())
    settler.watch(scene.advance)
    scene.advance.ended = True
    for _ in range(2 * advance_settler.ATTEMPTS_MAX):
        await settler.settle_due()
    assert len(offsets.settlements) == advance_settler.ATTEMPTS_MAX


async def test_settlement_goes_after_the_records_before_it() -> None:
    async with recording(Clock()) as (deliveries, twin), asyncio.TaskGroup() as tasks:
        twin.answering.clear()
        first = tasks.create_task(deliveries.record(PendingDelivery(HOLDER, 0, 1, 0)))
        await until(lambda: twin.calls == [1])
        wish = AdvanceWish(101, 60)
        later = tasks.create_task(deliveries.record(PendingDelivery(HOLDER, 1, 2, 0, advance=wish)))
        await asyncio.sleep(0)
        settling = tasks.create_task(deliveries.settle(Settlement(HOLDER, 101, 2)))
        await asyncio.sleep(0)
        twin.advances = True
        twin.answering.set()
        await first
        assert (await later).advance_to == 60
        await settling
        assert (twin.calls, twin.settlements) == ([1, 1], [(101, 2)])


async def test_settlement_alone_makes_a_call_without_items() -> None:
    async with recording(Clock()) as (deliveries, twin):
        await deliveries.settle(Settlement(HOLDER, 101, 2))
        assert (twin.calls, twin.settlements) == ([0], [(101, 2)])


async def test_settlement_that_an_older_epoch_answers_fails() -> None:
    async with recording(Clock()) as (deliveries, twin):
        twin.epoch = 4
        await deliveries.record(PendingDelivery(HOLDER, 0, 1, 0))
        twin.claimed_epoch = 3
        with pytest.raises(BatonError):
            await deliveries.settle(Settlement(HOLDER, 101, 2))


# ---- a whole node


async def test_busy_delivery_makes_far_fewer_calls_than_frames(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advance_settler, "INTERVAL_S", 0.01)
    async with running_node(etcd_endpoint, tmp_path) as node:
        node.offsets.advances, node.offsets.maybe_seen = True, [(30, 35)]
        flagged, frames = list[tuple[int, int]](), 60
        async with streaming(node) as stream:
            await stream.start()
            await node.wait_long_polls(1)
            for number in range(frames):
                await node.append(batch(b"%d" % number))
                frame = await stream.frame()
                assert (frame.messages.next_offset, frame.credit_number) == (number + 1, 1)
                assert frame.messages.offsets_epoch == node.offsets.epoch
                flagged += [(r.first_offset, r.next_offset) for r in frame.messages.redelivered]
            assert len(node.offsets.recorded) <= frames // 3
            assert flagged == [(offset, offset + 1) for offset in range(30, 35)]
            (advance_id,) = {item.advance_id for item in node.offsets.items} - {0}
        await until(lambda: node.offsets.settlements == [(advance_id, frames)])


@asynccontextmanager
async def busy_delivery(
    etcd_endpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[RunningNode, Stream]]:
    """Run a node with a delivery that has sent six frames and has an advance.

    The advance lasts for the test, so that a slow machine does not end it.
    """
    monkeypatch.setattr(delivery_advance, "ADVANCE_MS", 1_000_000)
    async with running_node(etcd_endpoint, folder) as node, streaming(node) as stream:
        node.offsets.advances = True
        await stream.start()
        for number in range(6):
            await node.wait_long_polls(1)
            await node.append(batch(b"%d" % number))
            await stream.frame()
        await node.wait_long_polls(1)
        yield node, stream


async def state_acks(node: RunningNode, stream: Stream, committed_offset: int) -> None:
    """State acks with a credit; return when the node has it. The delivery waits for messages."""
    await stream.raise_credit(messages=1_000, progress={"committed_offset": committed_offset})
    number = 10 + committed_offset
    await stream.start(number, queue_id=1)  # arrives after the credit
    await node.wait_long_polls(2)
    await stream.stop(number)
    await node.wait_long_polls(1)


def acked(node: RunningNode) -> list[int]:
    """Return the acks that offsets has taken."""
    return [
        item.progress.committed_offset for item in node.offsets.items if item.HasField("progress")
    ]


async def test_acks_go_to_offsets_with_the_next_frame_of_an_advance(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy_delivery(etcd_endpoint, tmp_path, monkeypatch) as (node, stream):
        calls = len(node.offsets.items)
        await state_acks(node, stream, 4)
        assert (acked(node), len(node.offsets.items)) == ([], calls)
        await node.append(batch(b"6"))
        frame = await stream.frame()
        assert (frame.messages.progress_taken, frame.credit_number) == (True, 2)
        assert (acked(node), len(node.offsets.items)) == ([4], calls + 1)
        await node.append(batch(b"7"))
        frame = await stream.frame()
        assert (frame.messages.progress_taken, frame.credit_number) == (False, 2)
        assert len(node.offsets.items) == calls + 1


async def test_refused_acks_refuse_the_frame_and_end_the_delivery(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy_delivery(etcd_endpoint, tmp_path, monkeypatch) as (node, stream):
        node.offsets.rejection = Fenced("taken")
        await state_acks(node, stream, 4)
        await node.append(batch(b"6"))
        assert isinstance(await stream.error(), Fenced)
        await node.wait_long_polls(0)
        node.offsets.rejection = None
        await stream.start(2, offset=6)
        assert await stream.bodies(2) == [b"6"]


async def test_acks_without_a_token_are_ignored(etcd_endpoint: str, tmp_path: Path) -> None:
    acks = offsets_pb.Acks(committed_offset=1)
    async with running_node(etcd_endpoint, tmp_path) as node, streaming(node) as stream:
        await node.put_gate(ownership=nameserver_pb.OWNERSHIP_OFF)
        await gate_seen(node, None, token=0)
        await node.append(batch(b"a"))
        await stream.start(token=0, progress=acks)
        assert await stream.bodies() == [b"a"]
        await node.append(batch(b"b"))
        frame = await stream.frame()
        assert (len(frame.messages.batches), frame.messages.progress_taken) == (1, False)
        assert node.offsets.items == []
