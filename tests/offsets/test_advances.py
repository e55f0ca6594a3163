"""Goal: an advance counts as delivered until it is settled, and no longer (protocol 6.8).

Method: one queue of a real table, with restarts; the calls over a channel.
"""

from __future__ import annotations

import asyncio

import pytest

from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq.errors import AckCap, BeyondDelivered, Fenced, InvalidArgument, Unacked
from batonmq_server.offsets import log_end_reader
from batonmq_server.offsets.core.ranges import EMPTY
from batonmq_server.offsets.core.values import HolderPosition, QueueLimits
from batonmq_server.offsets.log_end_reader import LogEndReader
from tests.offsets.rules_scene import FORCED, IDLE, KEY, SAME_HOLDER, A, B, Scene, offsets
from tests.offsets.service_calls import Service, call, queue, rejection
from tests.support.clock import MovableClock

ID, OTHER = 41, 42


def advanced(end: int = 50, limits: QueueLimits | None = None) -> Scene:
    """Return a queue of A under token 1: [0, 10) recorded, and an advance up to `end`."""
    scene = Scene(limits)
    scene.fence(A, 0)
    assert scene.record(1, 0, 10, advance=(ID, end)).advance_to == end
    return scene


# ---- begin


def test_advance_counts_as_delivered() -> None:
    scene = advanced()
    assert (scene.queue.delivered_offset, scene.queue.delivered_known) == (50, 10)
    assert scene.queue.in_flight() == offsets((0, 50))


def test_advance_is_durable_before_its_answer() -> None:
    scene = advanced()
    scene.restart()
    assert scene.queue.delivered_offset >= 50
    scene.table.note_received(KEY, 1, HolderPosition(10, 2))
    assert scene.record(1, 10, 20, advance=(OTHER, 400)).changed
    scene.restart()
    assert scene.queue.delivered_offset >= 400


def test_advance_does_not_exceed_the_span_above_the_committed_offset() -> None:
    scene = Scene(QueueLimits(span_max=100))
    scene.fence(A, 0)
    assert scene.record(1, 0, 10, advance=(ID, 5_000)).advance_to == 100
    scene.commit(1, 10)
    assert scene.record(1, 10, 20, advance=(ID, 5_000)).advance_to == 110


def test_record_that_asks_for_no_advance_has_none() -> None:
    scene = Scene()
    scene.fence(A, 0)
    assert scene.record(1, 0, 10).advance_to == 0
    assert scene.record(1, 10, 20, advance=(ID, 20)).advance_to == 0
    assert scene.record(1, 20, 30, advance=(0, 60)).advance_to == 0
    assert scene.queue.delivered_offset == 30


def test_maybe_seen_offsets_are_answered_up_to_the_end_of_the_advance() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 30)
    scene.now_ms += 30_000
    scene.fence(B, 1, IDLE)
    delivered = scene.record(2, 0, 5, advance=(ID, 60))
    assert delivered.maybe_seen == offsets((0, 30))


def test_no_advance_begins_while_the_delivered_offset_is_inexact() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 10)
    scene.restart()
    assert scene.record(1, 10, 12, advance=(ID, 60)).advance_to == 0
    scene.table.note_received(KEY, 1, HolderPosition(12, 2))
    assert scene.record(1, 12, 14, advance=(ID, 60)).advance_to == 60


def test_no_advance_begins_or_grows_while_the_ack_window_is_full() -> None:
    scene = advanced(20, QueueLimits(ack_ranges_max=2))
    scene.commit(1, 0, offsets((2, 3), (4, 5)))
    assert scene.record(1, 10, 12, advance=(ID, 60)).advance_to == 20
    with pytest.raises(AckCap):
        scene.record(1, 20, 21, advance=(ID, 60))
    scene.settle(1, ID, 12)
    assert scene.record(1, 3, 4, advance=(OTHER, 60)).advance_to == 0


def test_delivery_that_continues_keeps_or_extends_its_advance() -> None:
    scene = advanced()
    assert scene.record(1, 10, 20, advance=(ID, 0)).advance_to == 50
    assert scene.record(1, 20, 30, advance=(ID, 70)).advance_to == 70
    assert scene.queue.delivered_offset == 70


# ---- end


def test_settlement_replaces_the_advance_by_what_was_sent() -> None:
    scene = advanced()
    scene.settle(1, ID, 14)
    assert scene.queue.in_flight() == offsets((0, 14))
    assert scene.queue.exact
    scene.settle(1, ID, 3)
    assert scene.queue.delivered_offset == 14


def test_settlement_leaves_out_what_was_acked_under_an_earlier_token() -> None:
    """Offsets before it were not delivered again yet: acks of these are refused."""
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 30)
    scene.close(1, 5, offsets((23, 24)))
    scene.fence(B, 1)
    scene.record(2, 5, 10, advance=(ID, 50))
    assert scene.queue.delivered_without_advance == 10
    scene.settle(2, ID, 12)
    assert scene.queue.in_flight() == offsets((5, 12))
    with pytest.raises(BeyondDelivered):
        scene.commit(2, 0, offsets((14, 15)))
    scene.commit(2, 12)
    assert scene.queue.drained


def test_settled_queue_is_drained_when_all_is_acked() -> None:
    scene = advanced()
    scene.commit(1, 14)
    with pytest.raises(Unacked):
        scene.fence(B, 1)
    scene.settle(1, ID, 14)
    assert scene.fence(B, 1).maybe_seen == EMPTY


def test_story_28_settlement_does_not_lower_what_is_recorded_or_acked() -> None:
    scene = advanced()
    scene.commit(1, 0, offsets((12, 13)))
    scene.settle(1, ID, 0)
    assert scene.queue.delivered_offset == 13
    assert scene.queue.in_flight() == offsets((0, 12))


def test_story_29_position_does_not_lower_an_open_advance() -> None:
    scene = advanced()
    scene.table.note_received(KEY, 1, HolderPosition(10, 1))
    scene.table.note_log_end(KEY, 1, 10)
    assert scene.queue.delivered_offset == 50


@pytest.mark.parametrize(("token", "advance_id"), [(1, OTHER), (2, ID), (0, ID), (1, 0)])
def test_story_30_settlement_of_another_advance_or_token_has_no_effect(
    token: int, advance_id: int
) -> None:
    scene = advanced()
    scene.settle(token, advance_id, 10)
    assert scene.queue.delivered_offset == 50


async def test_story_31_end_of_the_log_waits_until_no_advance_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, slept = advanced(), list[float]()
    scene.restart()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await LogEndReader(scene.table, lambda _: None, MovableClock(), 0).run()  # type: ignore[arg-type, return-value]
    assert slept == [2.0]
    assert log_end_reader.ADVANCE_MS == 2_000


def test_delivery_of_another_node_waits_for_the_settlement_with_its_advance() -> None:
    scene = advanced()
    assert scene.record(1, 12, 20, advance=(OTHER, 90)).advance_to == 0
    assert scene.queue.delivered_offset == 50
    scene.settle(1, ID, 12)
    assert scene.queue.delivered_offset == 20
    assert scene.record(1, 20, 30, advance=(OTHER, 90)).advance_to == 90


def test_advance_that_is_delivered_to_its_end_is_over() -> None:
    scene = advanced()
    assert scene.record(1, 10, 55, advance=(OTHER, 90)).advance_to == 90
    scene.settle(1, ID, 10)
    assert scene.queue.delivered_offset == 90


def test_restart_forgets_the_advance_and_keeps_its_bound() -> None:
    scene = advanced()
    scene.restart()
    assert scene.queue.delivered_offset >= 50
    scene.settle(1, ID, 10)
    assert scene.queue.delivered_offset >= 50


def test_reset_flags_an_open_advance() -> None:
    scene = advanced()
    scene.reset(0)
    assert scene.queue.maybe_seen == offsets((0, 50))
    scene.settle(1, ID, 10)
    scene.settle(2, ID, 10)
    assert scene.queue.delivered_offset == 0


# ---- what a new holder sees


def test_close_during_an_advance_flags_nothing_but_the_unfinished() -> None:
    scene = advanced()
    scene.close(1, 12, unfinished=offsets((12, 14)))
    assert scene.fence(B, 1).maybe_seen == offsets((12, 14))
    scene.settle(1, ID, 14)
    assert scene.queue.drained


def test_takeover_after_a_settlement_flags_only_what_was_sent() -> None:
    scene = advanced()
    scene.commit(1, 8)
    scene.settle(1, ID, 14)
    scene.now_ms += 30_000
    assert scene.fence(B, 1, IDLE).maybe_seen == offsets((8, 14))


@pytest.mark.parametrize("condition", [IDLE, FORCED])
def test_takeover_during_an_advance_flags_all_of_it(condition: object) -> None:
    scene = advanced()
    scene.commit(1, 8)
    scene.now_ms += 30_000
    assert scene.fence(B, 1, condition).maybe_seen == offsets((8, 50))  # type: ignore[arg-type]
    scene.settle(1, ID, 10)
    assert scene.queue.maybe_seen == offsets((8, 50))
    with pytest.raises(Fenced):
        scene.record(1, 10, 20, advance=(ID, 90))


def test_holder_that_acquires_again_proves_by_its_position_what_it_has() -> None:
    scene = advanced()
    scene.fence(A, 1, SAME_HOLDER, resume=offsets((0, 12)))
    assert scene.queue.delivered_offset == 50
    scene.settle(1, ID, 10)
    assert scene.queue.delivered_offset == 50
    scene.table.note_received(KEY, 2, HolderPosition(12, 1))
    assert scene.queue.in_flight() == offsets((0, 12))


# ---- what people see


def test_open_advance_is_left_out_of_what_people_see() -> None:
    scene = advanced()
    scene.commit(1, 12)
    queue_ = scene.queue
    assert queue_.delivered_without_advance == 12
    assert queue_.in_flight_without_advance() == EMPTY
    assert queue_.lowest_unacked() is None
    assert not queue_.drained
    scene.commit(1, 0, offsets((15, 16)))
    assert scene.queue.in_flight_without_advance() == offsets((12, 15))


# ---- over a channel


def item(first: int, next_: int, advance_to: int = 0) -> pb.DeliveryItem:
    return pb.DeliveryItem(
        queue=queue(),
        token=1,
        first_offset=first,
        next_offset=next_,
        advance_id=ID,
        advance_to=advance_to,
    )


def settlement(sent: int, **fields: int) -> pb.AdvanceSettlement:
    return pb.AdvanceSettlement(
        **({"queue": queue(), "token": 1, "advance_id": ID, "sent_offset": sent} | fields)  # type: ignore[arg-type]
    )


async def progress_of(service: Service) -> pb.Progress:
    answer = await call(service, "Query", pb.QueryRequest(queues=[queue()]))
    found: pb.Progress = answer.outcomes[0].progress
    return found


async def test_settlements_are_applied_after_the_items_of_their_call(service: Service) -> None:
    await service.start_owner()
    both = pb.RecordDeliveredRequest(items=[item(10, 12, 60)], settlements=[settlement(12)])
    answer = await call(service, "RecordDelivered", both)
    assert answer.outcomes[0].delivered.advance_to == 60
    found = await progress_of(service)
    assert (found.delivered_offset, found.advance_to) == (12, 0)


async def test_query_names_the_advance_apart_from_the_counts(service: Service) -> None:
    await service.start_owner()
    await call(service, "RecordDelivered", pb.RecordDeliveredRequest(items=[item(10, 12, 60)]))
    found = await progress_of(service)
    assert (found.delivered_offset, found.advance_to) == (12, 60)
    assert (found.unacked_count, found.unacked_count_min) == (12, 12)
    alone = pb.RecordDeliveredRequest(settlements=[settlement(20)])
    assert list((await call(service, "RecordDelivered", alone)).outcomes) == []
    assert (await progress_of(service)).unacked_count == 20


async def test_call_without_items_and_settlements_is_rejected(service: Service) -> None:
    _, error = await rejection(service, "RecordDelivered", pb.RecordDeliveredRequest())
    assert isinstance(error, InvalidArgument)


@pytest.mark.parametrize("fields", [{"advance_id": -1}, {"sent_offset": -1}, {"token": 0}])
async def test_malformed_settlement_rejects_the_call(
    service: Service, fields: dict[str, int]
) -> None:
    await service.start_owner()
    request = pb.RecordDeliveredRequest(
        items=[item(10, 12, 60)], settlements=[settlement(12, **fields)]
    )
    _, error = await rejection(service, "RecordDelivered", request)
    assert isinstance(error, InvalidArgument)
    assert (await progress_of(service)).delivered_offset == 10
