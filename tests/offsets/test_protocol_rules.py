"""Goal: every row of the protocol's tables for offsets. Method: one queue, one call at a time.

Names follow the protocol: s1 the tombstone of a deleted topic, s3 the calls, s4 the fence, s6
delivery, s8 clocks, s9 closing, s12 restart.
"""

from __future__ import annotations

from copy import copy
from itertools import pairwise

import pytest

from batonmq._core.queues import Incarnation
from batonmq.errors import (
    AckCap,
    BatonError,
    BeyondDelivered,
    DeliveryGap,
    Fenced,
    NotHolder,
    NotIdle,
    OldEpoch,
    Superseded,
    TokenMismatch,
    Unacked,
    UnknownQueue,
)
from batonmq_server.offsets.codec import encode_progress
from batonmq_server.offsets.core.ranges import EMPTY
from batonmq_server.offsets.core.values import FenceAttempt, QueueLimits
from tests.offsets.rules_scene import (
    CLOSED_OR_DRAINED,
    FORCED,
    IDLE,
    KEY,
    SAME_HOLDER,
    A,
    B,
    C,
    Scene,
    offsets,
)

FIRST = FenceAttempt(attempt="first", expected_token=0, condition=CLOSED_OR_DRAINED, holder=A)


def held(*, delivered: int = 10, limits: QueueLimits | None = None) -> Scene:
    """Return a queue with token 1 of A and [0, delivered) in flight."""
    scene = Scene(limits)
    scene.fence(A, 0)
    if delivered:
        scene.record(1, 0, delivered)
    return scene


def rejected(scene: Scene, kind: type[BatonError], call: str, *args: object) -> dict[str, str]:
    """Return the facts of the error; assert that the call changed nothing."""
    before = encode_progress(scene.state), copy(scene.state)
    with pytest.raises(kind) as raised:
        getattr(scene, call)(*args)
    assert (encode_progress(scene.state), scene.state) == before
    return raised.value.facts


# ---- announce


def test_s3_announce_accepts_a_newer_term() -> None:
    scene = Scene()
    assert scene.table.announce(8)
    assert scene.table.term == 8


def test_s3_repeated_announce_changes_nothing() -> None:
    assert not Scene().table.announce(7)


def test_s3_announce_of_an_older_term_is_rejected() -> None:
    scene = Scene()
    with pytest.raises(OldEpoch) as raised:
        scene.table.announce(6)
    assert raised.value.facts == {"epoch": "6", "current": "7"}
    assert scene.table.term == 7


@pytest.mark.parametrize("term", [6, 8])
def test_s3_fence_of_another_term_than_the_announced_is_rejected(term: int) -> None:
    scene = Scene()
    with pytest.raises(OldEpoch):
        scene.fence(A, 0, term=term)
    assert KEY not in scene.table


def test_s3_caller_that_has_seen_a_newer_epoch_is_rejected() -> None:
    table = Scene().table
    table.check_epoch(0)
    table.check_epoch(1)
    with pytest.raises(OldEpoch) as raised:
        table.check_epoch(2)
    assert raised.value.facts == {"epoch": "1", "current": "2"}


# ---- fence


def test_s4_first_fence_gives_token_1_from_the_initial_offset() -> None:
    grant = Scene().fence(A, 0, initial_offset=50)
    assert (grant.token, grant.committed_offset, grant.reset_epoch) == (1, 50, 0)
    assert (grant.acked, grant.maybe_seen) == (EMPTY, EMPTY)


def test_s4_initial_offset_of_a_known_queue_is_ignored() -> None:
    scene = held(delivered=0)
    assert scene.fence(B, 1, initial_offset=50).committed_offset == 0


def test_s4_rejected_fence_of_an_unknown_queue_leaves_it_unknown() -> None:
    scene = Scene()
    with pytest.raises(TokenMismatch) as raised:
        scene.fence(A, 3)
    assert raised.value.facts == {"expected": "3", "token": "0", "attempt": ""}
    with pytest.raises(NotHolder):
        scene.fence(A, 0, SAME_HOLDER)
    assert KEY not in scene.table


def test_s4_token_is_expected_plus_one() -> None:
    scene = held(delivered=0)
    assert [scene.fence(B, 1).token, scene.fence(C, 2).token] == [2, 3]


def test_s4_token_exceeds_token_min() -> None:
    assert Scene().fence(A, 0, token_min=41).token == 42


def test_s4_token_min_below_the_token_has_no_effect() -> None:
    scene = Scene()
    scene.fence(A, 0, token_min=41)
    assert scene.fence(B, 42, token_min=5).token == 43


@pytest.mark.parametrize("expected", [0, 2])
def test_s4_unexpected_token_is_a_mismatch(expected: int) -> None:
    scene = Scene()
    scene.fence(A, 0, attempt="first")
    facts = rejected(scene, TokenMismatch, "fence", B, expected)
    assert facts == {"expected": str(expected), "token": "1", "attempt": "first"}


def test_s4_repeated_attempt_gets_the_stored_answer_after_other_calls() -> None:
    scene = Scene()
    first = scene.fence(A, 0, attempt="x")
    scene.record(1, 0, 10)
    scene.commit(1, 5, offsets((7, 8)))
    again = scene.fence(A, 0, attempt="x")
    assert again == first._replace(changed=False)
    assert scene.queue.delivered_offset == 10


def test_s4_repeated_attempt_after_a_newer_fence_is_a_mismatch() -> None:
    scene = Scene()
    scene.fence(A, 0, attempt="x")
    scene.fence(B, 1, attempt="y")
    facts = refused_attempt(scene, "x")
    assert facts == {"expected": "0", "token": "2", "attempt": "y"}


def refused_attempt(scene: Scene, attempt: str) -> dict[str, str]:
    with pytest.raises(TokenMismatch) as raised:
        scene.fence(A, 0, attempt=attempt)
    return raised.value.facts


def test_s4_repeated_attempt_after_a_reset_is_superseded() -> None:
    scene = Scene()
    scene.fence(A, 0, attempt="x")
    scene.reset(0)
    for _ in range(2):
        with pytest.raises(Superseded) as raised:
            scene.fence(A, 0, attempt="x")
        assert raised.value.facts == {"token": "2"}
        scene.restart()


def test_s4_closed_or_drained_passes_when_drained() -> None:
    scene = held()
    scene.commit(1, 10)
    assert scene.fence(B, 1).token == 2


def test_s4_closed_or_drained_passes_when_closed() -> None:
    scene = held()
    scene.close(1, 4)
    grant = scene.fence(B, 1)
    assert (grant.token, grant.committed_offset, grant.maybe_seen) == (2, 4, EMPTY)


def test_s4_closed_or_drained_error_has_the_unacked_offsets() -> None:
    scene = held()
    scene.commit(1, 3, offsets((5, 7)))
    assert rejected(scene, Unacked, "fence", B, 1) == {"unacked": "5", "lowest_offset": "3"}


def test_s4_drained_queue_keeps_its_holder_if_it_has_worked_since_the_decision() -> None:
    scene = held()
    scene.commit(1, 10)
    scene.record(1, 10, 12)
    scene.commit(1, 12)
    facts = rejected(scene, NotIdle, "fence_observed", B, 1, (10, 0))
    assert facts == {"observed": "10", "delivered": "12"}
    assert scene.fence(B, 1, observed=(12, 0)).committed_offset == 12


@pytest.mark.parametrize("observed", [(9, 0), (11, 0), (10, 1), (0, 0)])
def test_s4_fence_of_a_drained_queue_compares_delivered_offset_and_reset_epoch(
    observed: tuple[int, int],
) -> None:
    scene = held()
    scene.commit(1, 10)
    rejected(scene, NotIdle, "fence_observed", B, 1, observed)


def test_s4_acks_since_the_decision_do_not_matter() -> None:
    scene = held()
    observed = scene.queue.delivered_offset, 0
    scene.commit(1, 10)
    assert scene.fence(B, 1, observed=observed).committed_offset == 10


def test_s4_closed_token_and_idle_holder_need_no_observed_offset() -> None:
    scene = held()
    scene.now_ms += 30_000
    assert scene.fence(B, 1, IDLE, observed=(0, 9)).token == 2
    scene.close(2)
    assert scene.fence(C, 2, observed=(0, 9)).token == 3


def test_s4_same_holder_passes_for_the_holder_only() -> None:
    scene = held()
    rejected(scene, NotHolder, "fence", B, 1, SAME_HOLDER)
    rejected(scene, NotHolder, "fence", Incarnation(A.client_id, 99), 1, SAME_HOLDER)
    assert scene.fence(A, 1, SAME_HOLDER).token == 2


def test_s4_same_holder_does_not_pass_once_closed() -> None:
    scene = held()
    scene.close(1)
    rejected(scene, NotHolder, "fence", A, 1, SAME_HOLDER)


def test_s4_idle_passes_exactly_at_the_bound() -> None:
    scene = held()
    scene.now_ms += 29_999
    with pytest.raises(NotIdle) as raised:
        scene.fence(B, 1, IDLE)
    assert raised.value.facts == {"idle_ms": "29999"}
    assert raised.value.retry_after_ms == 1
    scene.now_ms += 1
    assert scene.fence(B, 1, IDLE).token == 2


@pytest.mark.parametrize("access", ["record", "touch", "commit"])
def test_s8_every_accepted_call_restarts_the_idle_time(access: str) -> None:
    scene = held()
    scene.now_ms += 29_000
    args: dict[str, tuple[int, ...]] = {"record": (1, 0, 5), "touch": (1,), "commit": (1, 0)}
    getattr(scene, access)(*args[access])
    scene.now_ms += 1_000
    assert rejected(scene, NotIdle, "fence", B, 1, IDLE) == {"idle_ms": "1000"}


def test_s8_rejected_calls_do_not_restart_the_idle_time() -> None:
    scene = held()
    scene.now_ms += 30_000
    rejected(scene, Fenced, "touch", 9)
    rejected(scene, Fenced, "commit", 9)
    rejected(scene, DeliveryGap, "record", 1, 50, 60)
    rejected(scene, BeyondDelivered, "commit", 1, 50)
    assert scene.fence(B, 1, IDLE).token == 2


def test_s8_fence_restarts_the_idle_time() -> None:
    scene = held()
    scene.now_ms += 30_000
    scene.fence(B, 1, IDLE)
    assert rejected(scene, NotIdle, "fence", C, 2, IDLE) == {"idle_ms": "0"}


def test_s4_forced_fence_always_passes() -> None:
    scene = held()
    grant = scene.fence(B, 1, FORCED)
    assert (grant.token, grant.maybe_seen) == (2, offsets((0, 10)))


@pytest.mark.parametrize("condition", [IDLE, FORCED])
def test_s4_messages_in_flight_become_maybe_seen(condition: object) -> None:
    scene = held()
    scene.commit(1, 2, offsets((4, 6)))
    scene.now_ms += 30_000
    grant = scene.fence(B, 1, condition)  # type: ignore[arg-type]
    assert grant.committed_offset == 2
    assert grant.acked == offsets((4, 6))
    assert grant.maybe_seen == offsets((2, 4), (6, 10))
    assert (scene.queue.delivered_offset, scene.queue.delivered_reserved) == (2, 2)


def test_s4_resumed_offsets_count_as_delivered_to_the_new_holder() -> None:
    scene = held()
    scene.commit(1, 2)
    scene.fence(B, 1, FORCED)
    grant = scene.fence(A, 2, resume=offsets((1, 7)))
    assert grant.maybe_seen == offsets((2, 10))
    assert scene.queue.delivered_offset == 7
    scene.commit(3, 7)
    assert scene.queue.maybe_seen == offsets((7, 10))


def test_s4_resume_of_another_reset_epoch_counts_as_empty() -> None:
    scene = held()
    scene.fence(B, 1, FORCED)
    scene.fence(A, 2, resume=offsets((0, 7)), reset_epoch=1)
    assert scene.queue.delivered_offset == 0


def test_s4_resume_that_is_acked_counts_as_empty() -> None:
    scene = held()
    scene.commit(1, 3, offsets((5, 10)))
    scene.fence(B, 1, FORCED)
    scene.fence(A, 2, resume=offsets((0, 3), (5, 10)))
    assert scene.queue.delivered_offset == 3


def test_s4_resumed_offsets_of_the_same_holder_are_not_flagged() -> None:
    scene = held()
    grant = scene.fence(A, 1, SAME_HOLDER, resume=offsets((0, 4)))
    assert grant.maybe_seen == offsets((4, 10))


@pytest.mark.parametrize("condition", [SAME_HOLDER, IDLE, FORCED])
def test_s4_delivered_never_goes_back_for_the_same_holder(condition: object) -> None:
    scene = held()
    scene.now_ms += 30_000
    scene.fence(A, 1, condition, resume=offsets((0, 4)))  # type: ignore[arg-type]
    assert scene.queue.delivered_offset == 10


def test_s4_delivered_rises_to_the_resumed_offsets_of_the_same_holder() -> None:
    scene = held(delivered=4)
    scene.fence(A, 1, SAME_HOLDER, resume=offsets((0, 9)))
    assert (scene.queue.delivered_offset, scene.queue.delivered_reserved) == (9, 9)


def test_s4_maybe_seen_grows_over_holders() -> None:
    scene = held()
    scene.fence(B, 1, FORCED)
    scene.record(2, 0, 3)
    scene.commit(2, 3)
    scene.record(2, 3, 15)
    assert scene.fence(C, 2, FORCED).maybe_seen == offsets((3, 15))


# ---- delivery


def test_s3_delivery_answers_maybe_seen_within_the_range() -> None:
    scene = held()
    scene.fence(B, 1, FORCED)
    assert scene.record(2, 0, 4).maybe_seen == offsets((0, 4))
    assert scene.record(2, 4, 15).maybe_seen == offsets((4, 10))
    assert scene.record(2, 15, 20).maybe_seen == EMPTY


def test_s3_delivered_never_goes_back_by_a_repeated_or_late_delivery() -> None:
    scene = held()
    scene.record(1, 0, 10)
    scene.record(1, 2, 3)
    assert scene.queue.delivered_offset == 10


def test_s3_delivery_that_skips_offsets_is_a_gap() -> None:
    scene = held()
    assert rejected(scene, DeliveryGap, "record", 1, 11, 12) == {
        "first_offset": "11",
        "expected": "10",
    }


def test_s3_delivery_may_start_after_acked_offsets() -> None:
    scene = held()
    scene.commit(1, 0, offsets((4, 10)))
    scene.close(1)
    scene.fence(B, 1)
    scene.record(2, 0, 4)
    rejected(scene, DeliveryGap, "record", 2, 11, 12)
    scene.record(2, 10, 12)
    assert scene.queue.delivered_offset == 12


@pytest.mark.parametrize("token", [0, 2])
def test_s3_delivery_under_another_token_is_fenced(token: int) -> None:
    facts = rejected(held(), Fenced, "record", token, 10, 11)
    assert facts == {"token": str(token), "current": "1", "reset_epoch": "0", "why": "TAKEN"}


def test_s3_delivery_stops_at_the_cap_of_ranges_and_continues_below_it() -> None:
    scene = held(delivered=20, limits=QueueLimits(ack_ranges_max=3))
    scene.commit(1, 0, offsets((1, 2), (3, 4), (5, 6)))
    assert rejected(scene, AckCap, "record", 1, 20, 21) == {"ranges": "3", "limit": "3"}
    scene.commit(1, 2)
    scene.record(1, 20, 21)


def test_s16_acks_at_the_cap_are_accepted_and_no_ack_is_lost() -> None:
    scene = held(delivered=20, limits=QueueLimits(ack_ranges_max=3))
    acked = offsets(*((offset, offset + 1) for offset in range(1, 20, 2)))
    scene.commit(1, 0, acked)
    assert scene.queue.acked == acked


def test_s16_delivery_stops_at_the_cap_of_bytes() -> None:
    scene = held(delivered=200, limits=QueueLimits(ack_bytes_max=80))
    scene.commit(1, 0, offsets(*((offset, offset + 1) for offset in range(1, 70, 2))))
    assert len(scene.queue.acked.encoded) == 78
    scene.record(1, 200, 201)
    scene.commit(1, 0, offsets((71, 72)))
    rejected(scene, AckCap, "record", 1, 201, 202)


def test_s16_new_holder_can_fill_the_gaps_at_the_cap() -> None:
    scene = held(delivered=6, limits=QueueLimits(ack_ranges_max=3))
    scene.commit(1, 0, offsets((1, 2), (3, 4), (5, 6)))
    scene.fence(B, 1, FORCED)
    rejected(scene, AckCap, "record", 2, 0, 7)
    scene.record(2, 0, 5)
    assert scene.commit(2, 5).committed_offset == 6


def test_s16_repeated_delivery_is_answered_at_the_cap() -> None:
    scene = held(delivered=20, limits=QueueLimits(ack_ranges_max=1))
    scene.commit(1, 0, offsets((1, 2)))
    assert not scene.record(1, 10, 20).changed


def reserved(scene: Scene) -> int:
    """Return by how much the durable bound is ahead of D."""
    return scene.queue.delivered_reserved - scene.queue.delivered_offset


def test_s6_delivered_of_a_slow_queue_is_reserved_a_few_messages_ahead() -> None:
    scene = held(delivered=0)
    answers = []
    for at in range(0, 60):
        scene.now_ms += 100
        answers.append(scene.record(1, at, at + 1).changed)
    assert [at for at, changed in enumerate(answers) if changed] == [0, 17, 34, 51]
    assert scene.queue.delivered_reserved == 68


def test_s6_reserve_of_a_busy_queue_doubles_up_to_the_limit() -> None:
    scene = held(delivered=0, limits=QueueLimits(span_max=500))
    reserves = []
    for at in range(0, 20_000, 100):
        scene.now_ms += 1
        if scene.record(1, at, at + 100).changed:
            reserves.append(reserved(scene))
    assert reserves[:6] == [16, 32, 64, 128, 256, 500]
    assert len(reserves) < 50, "a pull seldom waits for the disk"


def test_s6_queue_stores_its_bound_five_times_a_second_at_most_after_a_while() -> None:
    scene = held(delivered=0, limits=QueueLimits(span_max=100_000))
    written = []
    for at in range(0, 30_000, 10):  # 10,000 messages a second
        scene.now_ms += 1
        if scene.record(1, at, at + 10).changed:
            written.append(scene.now_ms)
    assert all(after - before >= 150 for before, after in pairwise(written[-5:]))


def test_s6_reserve_shrinks_when_a_busy_queue_becomes_slow() -> None:
    scene = held(delivered=0)
    for at in range(0, 10_000, 100):
        scene.now_ms += 1
        scene.record(1, at, at + 100)
    assert reserved(scene) > 500
    for at in range(10_000, 10_020):
        scene.now_ms += 1_000
        scene.record(1, at, at + 1)
        scene.commit(1, at + 1)
    assert reserved(scene) == 16


def test_s6_acks_are_stored_with_a_bound_close_to_delivered() -> None:
    scene = held(delivered=10)
    scene.record(1, 10, 20)
    assert reserved(scene) == 6
    scene.commit(1, 20)
    assert scene.queue.delivered_reserved == 36
    scene.restart()
    assert scene.queue.in_flight() == offsets((20, 36))


def test_s6_acks_after_a_restart_do_not_move_an_unproven_bound() -> None:
    scene = held(delivered=10)
    scene.restart()
    assert scene.queue.delivered_offset == 26
    scene.commit(1, 10)
    assert (scene.queue.delivered_offset, scene.queue.delivered_reserved) == (26, 26)
    scene.commit(1, 26)
    assert scene.queue.exact


def test_s6_close_and_fence_store_delivered_without_reserve() -> None:
    scene = held()
    assert scene.queue.delivered_reserved == 26
    scene.commit(1, 3)
    scene.close(1)
    assert (scene.queue.delivered_offset, scene.queue.delivered_reserved) == (3, 3)
    scene.fence(B, 1)
    scene.record(2, 3, 5)
    scene.fence(C, 2, FORCED)
    assert (scene.queue.delivered_offset, scene.queue.delivered_reserved) == (3, 3)


def test_s6_reservation_covers_acks_up_to_the_committed_offset() -> None:
    scene = held(delivered=20, limits=QueueLimits(span_max=1))
    scene.close(1, 0, offsets((5, 20)))
    scene.fence(B, 1)
    scene.record(2, 0, 5)
    assert scene.commit(2, 5).committed_offset == 20
    assert (scene.queue.delivered_offset, scene.queue.delivered_reserved) == (20, 21)
    scene.restart()
    assert scene.queue.in_flight() == offsets((20, 21))


# ---- acks


def test_s3_committed_offset_absorbs_contiguous_acks() -> None:
    scene = held()
    assert scene.commit(1, 0, offsets((2, 4), (6, 8))).committed_offset == 0
    assert scene.commit(1, 2).committed_offset == 4
    assert scene.queue.acked == offsets((6, 8))


def test_s3_commit_without_new_acks_is_a_noop() -> None:
    scene = held()
    scene.commit(1, 4, offsets((6, 8)))
    for committed, acked in ((4, EMPTY), (2, EMPTY), (0, offsets((1, 3), (6, 7))), (0, EMPTY)):
        assert scene.commit(1, committed, acked) == (4, False)


def test_s3_commit_removes_offsets_from_maybe_seen() -> None:
    scene = held()
    scene.fence(B, 1, FORCED)
    scene.record(2, 0, 10)
    scene.commit(2, 2, offsets((5, 6)))
    assert scene.queue.maybe_seen == offsets((2, 5), (6, 10))


@pytest.mark.parametrize(("committed", "acked"), [(11, EMPTY), (0, offsets((3, 4), (9, 12)))])
def test_s3_commit_of_undelivered_offsets_is_rejected(committed: int, acked: object) -> None:
    facts = rejected(held(), BeyondDelivered, "commit", 1, committed, acked)
    assert facts == {"offset": "10", "delivered": "10"}


def test_s3_commit_may_repeat_acks_above_delivered() -> None:
    scene = held()
    scene.commit(1, 0, offsets((4, 10)))
    scene.close(1)
    scene.fence(B, 1)
    scene.record(2, 0, 4)
    assert scene.commit(2, 10).committed_offset == 10
    assert scene.queue.delivered_offset == 10


def test_s3_commit_under_another_token_is_fenced() -> None:
    scene = held()
    scene.fence(B, 1, FORCED)
    facts = rejected(scene, Fenced, "commit", 1, 5)
    assert facts == {"token": "1", "current": "2", "reset_epoch": "0", "why": "FORCED"}


def test_s3_commit_of_another_reset_epoch_is_fenced() -> None:
    assert rejected(held(), Fenced, "commit", 1, 5, EMPTY, 1)["why"] == "RESET"


@pytest.mark.parametrize(("call", "args"), [("commit", (1, 5)), ("record", (1, 0, 9))])
def test_s3_calls_under_a_closed_token_are_fenced(call: str, args: tuple[int, ...]) -> None:
    scene = held()
    scene.close(1)
    assert rejected(scene, Fenced, call, *args)["why"] == "CLOSED"
    assert rejected(scene, Fenced, "touch", 1)["why"] == "CLOSED"


def test_s3_calls_after_a_reset_are_fenced_with_its_cause() -> None:
    scene = held()
    scene.reset(4)
    assert rejected(scene, Fenced, "touch", 1) == {
        "token": "1",
        "current": "2",
        "reset_epoch": "1",
        "why": "RESET",
    }


@pytest.mark.parametrize(
    ("call", "args"),
    [("record", (1, 0, 1)), ("touch", (1,)), ("commit", (1, 0)), ("close", (1, 0))],
)
def test_s3_calls_for_a_queue_without_progress_are_unknown(
    call: str, args: tuple[int, ...]
) -> None:
    scene = Scene()
    with pytest.raises(UnknownQueue) as raised:
        getattr(scene, call)(*args)
    assert raised.value.facts == {
        "queue": "readers/news/broker-a/3",
        "token": "0",
        "reset_epoch": "0",
        "floor_token": "0",
    }
    assert KEY not in scene.table


# ---- close


def test_s9_messages_never_started_are_redelivered_unflagged_after_a_close() -> None:
    scene = held()
    scene.close(1, 2, offsets((4, 5)))
    grant = scene.fence(B, 1)
    assert (grant.committed_offset, grant.acked, grant.maybe_seen) == (2, offsets((4, 5)), EMPTY)
    assert scene.queue.delivered_offset == 2


def test_s9_unfinished_messages_are_redelivered_flagged_after_a_close() -> None:
    scene = held()
    scene.close(1, 2, offsets((4, 5)), offsets((0, 1), (3, 6)))
    assert scene.fence(B, 1).maybe_seen == offsets((3, 4), (5, 6))


def test_s9_repeated_close_has_no_effect() -> None:
    scene = held()
    assert scene.close(1, 2) == (2, True)
    assert scene.close(1, 9, offsets((9, 10)), offsets((3, 4))) == (2, False)
    assert scene.queue.maybe_seen == EMPTY


def test_s9_close_under_another_token_is_fenced() -> None:
    scene = held()
    scene.close(1)
    scene.fence(B, 1)
    assert rejected(scene, Fenced, "close", 1)["why"] == "TAKEN"


@pytest.mark.parametrize(
    ("committed", "acked", "unfinished"),
    [(11, EMPTY, EMPTY), (0, offsets((10, 11)), EMPTY), (10, EMPTY, offsets((9, 11)))],
)
def test_s9_close_with_undelivered_offsets_is_rejected(
    committed: int, acked: object, unfinished: object
) -> None:
    rejected(held(), BeyondDelivered, "close", 1, committed, acked, unfinished)


def test_s9_close_of_another_reset_epoch_is_fenced() -> None:
    assert rejected(held(), Fenced, "close", 1, 5, EMPTY, EMPTY, 1)["why"] == "RESET"


# ---- restart


def test_s12_restart_sets_delivered_to_reserved_and_idle_time_to_zero() -> None:
    scene = held()
    scene.now_ms += 60_000
    scene.restart()
    assert scene.table.epoch == 2
    assert scene.queue.delivered_offset == 26
    assert rejected(scene, Unacked, "fence", B, 1) == {"unacked": "26", "lowest_offset": "0"}
    assert rejected(scene, NotIdle, "fence", B, 1, IDLE) == {"idle_ms": "0"}


def test_s12_holder_continues_after_a_restart() -> None:
    scene = held()
    scene.restart()
    scene.record(1, 10, 20)
    assert scene.commit(1, 20).committed_offset == 20


def test_s12_repeated_attempt_is_recognised_after_a_restart() -> None:
    scene = held()
    scene.commit(1, 2, offsets((4, 5)))
    grant = scene.fence(B, 1, FORCED, attempt="x")
    scene.record(2, 2, 4)
    scene.commit(2, 4)
    scene.restart()
    assert scene.fence(B, 1, FORCED, attempt="x") == grant._replace(changed=False)


def test_s12_closed_token_stays_closed_after_a_restart() -> None:
    scene = held()
    scene.close(1, 4, EMPTY, offsets((6, 7)))
    scene.restart()
    grant = scene.fence(B, 1, CLOSED_OR_DRAINED)
    assert (grant.committed_offset, grant.maybe_seen) == (4, offsets((6, 7)))


# ---- topics that are deleted and created again


def test_s1_deleted_queue_starts_over_and_its_token_continues() -> None:
    scene = held()
    scene.commit(1, 4, offsets((6, 8)))
    scene.close(1, unfinished=offsets((4, 5)))
    assert scene.delete(1) == [KEY]
    assert KEY not in scene.table
    assert scene.table.queues_of(KEY.group) == []
    assert scene.table.acked == {}
    with pytest.raises(UnknownQueue) as raised:
        scene.table.query(KEY)
    assert raised.value.facts["token"] == "2"
    grant = scene.fence(B, 2, resume=offsets((0, 3)), initial_offset=3)
    assert (grant.token, grant.committed_offset, grant.reset_epoch) == (3, 3, 1)
    assert (grant.acked, grant.maybe_seen) == (EMPTY, EMPTY)
    assert scene.queue.delivered_offset == scene.queue.delivered_reserved == 3


@pytest.mark.parametrize("expected", [0, 1, 3])
def test_s1_fence_on_a_tombstone_expects_its_token(expected: int) -> None:
    scene = held()
    scene.delete(1)
    assert rejected(scene, TokenMismatch, "fence", B, expected)["token"] == "2"
    assert KEY not in scene.table


def test_s1_holder_of_a_deleted_topic_is_not_the_same_holder() -> None:
    scene = held()
    scene.delete(1)
    rejected(scene, NotHolder, "fence", A, 2, SAME_HOLDER)


def test_s1_attempt_for_a_deleted_topic_is_not_answered_again() -> None:
    scene = Scene()
    scene.fence(A, 0, attempt="x")
    scene.delete(1)
    with pytest.raises(TokenMismatch) as raised:
        scene.fence(A, 0, attempt="x")
    assert raised.value.facts["attempt"] == ""


def test_s1_token_min_applies_to_a_tombstone() -> None:
    scene = held()
    scene.delete(1)
    assert scene.fence(B, 2, token_min=40).token == 41


@pytest.mark.parametrize("token", [1, 2])
@pytest.mark.parametrize(
    ("call", "args"), [("record", (0, 1)), ("touch", ()), ("commit", (0,)), ("close", (0,))]
)
def test_s1_calls_for_a_deleted_topic_are_fenced(
    call: str, args: tuple[int, ...], token: int
) -> None:
    scene = held()
    scene.delete(1)
    assert rejected(scene, Fenced, call, token, *args) == {
        "token": str(token),
        "current": "2",
        "reset_epoch": "1",
        "why": "RESET",
    }


def test_s1_calls_of_the_deleted_topic_are_fenced_in_the_new_topic() -> None:
    scene = held()
    scene.delete(1)
    scene.fence(A, 2)
    for call, args in (("record", (1, 0, 1)), ("commit", (1, 4)), ("close", (1, 4))):
        rejected(scene, Fenced, call, *args)
    scene.record(3, 0, 5)
    assert rejected(scene, Fenced, "commit", 3, 5, EMPTY, 0)["why"] == "RESET"
    assert scene.commit(3, 5, EMPTY, 1).committed_offset == 5


@pytest.mark.parametrize("topic_id", [6, 7])
def test_s1_late_delete_does_not_change_the_new_topic(topic_id: int) -> None:
    scene = held()
    scene.delete(7)
    scene.fence(B, 2)
    scene.restart()
    assert scene.delete(topic_id) is None
    assert scene.queue.holder == B
    assert scene.delete(8) == [KEY]


def test_s1_delete_for_a_newer_topic_does_not_change_a_tombstone() -> None:
    scene = held()
    scene.delete(1)
    before = scene.state
    scene.now_ms += 1_000
    assert scene.delete(2) == []
    assert scene.state == before


def test_s1_delete_affects_all_groups_of_the_topic_and_no_other_topic() -> None:
    scene = held()
    others = [KEY._replace(group="others", queue_id=q) for q in (0, 1)]
    other_key = KEY._replace(topic="newsflash")
    for key in (*others, other_key):
        scene.table.fence(key, 7, FIRST, scene.now)
    assert sorted(scene.delete(1) or ()) == sorted([KEY, *others])
    assert scene.table.query(other_key).token == 1
    assert (scene.table.queues_of("others"), scene.table.queues_of("readers")) == ([], [other_key])
    assert {key for key, _ in scene.table.items()} == {KEY, *others, other_key}


def test_s12_tombstone_survives_a_restart() -> None:
    scene = held()
    scene.delete(1)
    scene.restart()
    assert KEY not in scene.table
    assert rejected(scene, Fenced, "touch", 1)["why"] == "RESET"
    assert scene.fence(B, 2).token == 3
