"""Goal: the stories of the protocol (section 17) that offsets alone decides can't happen again.

Method: each is told with real calls to the end at which the naive version went wrong.
"""

from __future__ import annotations

import pytest

from batonmq._core.queues import Incarnation
from batonmq.errors import Fenced, NotIdle, TokenMismatch, Unacked
from batonmq_server.offsets.core.ranges import EMPTY
from tests.offsets.rules_scene import FORCED, IDLE, SAME_HOLDER, A, B, Scene, offsets


def test_story_1_no_fence_what_a_silent_holder_had_is_flagged() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 1)
    scene.now_ms += 30_000
    assert scene.fence(B, 1, IDLE).maybe_seen == offsets((0, 1))
    assert scene.record(2, 0, 1).maybe_seen == offsets((0, 1))
    with pytest.raises(Fenced):
        scene.commit(1, 1)


def test_story_2_test_drained_then_fence_a_pull_in_between_is_seen() -> None:
    scene = Scene()
    scene.fence(A, 0)
    assert scene.queue.drained, "what the lock manager saw before it sent the fence"
    scene.record(1, 0, 1)
    with pytest.raises(Unacked):
        scene.fence(B, 1)
    assert scene.commit(1, 1).committed_offset == 1


def test_story_5_renewal_is_a_fence_and_flags_what_the_dead_process_had() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 1)
    reborn = Incarnation(A.client_id, A.incarnation_id + 100)
    with pytest.raises(Unacked):
        scene.fence(reborn, 1)
    scene.now_ms += 30_000
    grant = scene.fence(reborn, 1, IDLE)
    assert (grant.token, grant.maybe_seen) == (2, offsets((0, 1)))
    with pytest.raises(Fenced):
        scene.commit(1, 1)


def test_story_9_same_holder_that_dropped_its_work_gets_it_flagged() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 1)
    scene.fence(A, 1, SAME_HOLDER, resume=EMPTY)
    assert scene.record(2, 0, 1).maybe_seen == offsets((0, 1))


def test_story_10_a_delivery_answered_before_a_crash_still_blocks_a_hand_over() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 1)
    scene.restart()
    with pytest.raises(Unacked):
        scene.fence(B, 1)


def test_story_10_a_delivery_answered_from_memory_is_flagged_after_a_crash() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 1)
    assert not scene.record(1, 1, 50).changed, "covered by the durable reservation"
    scene.restart()
    with pytest.raises(NotIdle):
        scene.fence(B, 1, IDLE)
    scene.now_ms += 30_000
    assert not offsets((0, 50)).difference(scene.fence(B, 1, IDLE).maybe_seen)


def test_story_11_a_retried_close_that_forgot_the_drain_timeout_has_no_effect() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 1)
    scene.close(1, 0, EMPTY, offsets((0, 1)))
    scene.close(1, 0, EMPTY, EMPTY)
    assert scene.fence(B, 1).maybe_seen == offsets((0, 1))


def test_story_13_a_commit_on_its_way_does_not_undo_a_reset() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 10)
    scene.commit(1, 5)
    scene.reset(0)
    with pytest.raises(Fenced) as raised:
        scene.commit(1, 10)
    assert raised.value.facts["why"] == "RESET"
    grant = scene.fence(A, 2)
    with pytest.raises(Fenced):
        scene.commit(grant.token, 10, reset_epoch=0)
    assert scene.queue.committed_offset == 0


def test_story_14_work_finished_before_a_reset_does_not_count_after_it() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 1)
    scene.reset(0)
    grant = scene.fence(A, 2, resume=offsets((0, 1)), reset_epoch=0)
    assert (grant.reset_epoch, scene.queue.delivered_offset) == (1, 0)
    with pytest.raises(Fenced) as raised:
        scene.commit(grant.token, 1, reset_epoch=0)
    assert raised.value.facts["why"] == "RESET"
    assert scene.record(grant.token, 0, 1).maybe_seen == offsets((0, 1)), "replayed and flagged"


def test_story_15_a_late_commit_of_a_lost_queue_moves_nothing() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 5)
    scene.fence(B, 1, FORCED)
    scene.record(2, 0, 5)
    with pytest.raises(Fenced):
        scene.commit(1, 5)
    assert scene.queue.committed_offset == 0


def test_story_21_a_re_acquire_that_claims_too_little_does_not_look_drained() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 2)
    scene.fence(A, 1, SAME_HOLDER, resume=EMPTY)
    with pytest.raises(Unacked):
        scene.fence(B, 2)


def test_story_7_a_fence_that_was_applied_makes_the_old_expectation_fail() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.fence(B, 1, attempt="taken")
    with pytest.raises(TokenMismatch) as raised:
        scene.fence(A, 1)
    assert raised.value.facts["attempt"] == "taken"
