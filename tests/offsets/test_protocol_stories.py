"""Goal: the failures of protocol section 17 that offsets alone prevents can't happen.

Method: each story with real calls, up to the point at which the naive version failed.
"""

from __future__ import annotations

import pytest

from batonmq._core.queues import Incarnation
from batonmq.errors import Fenced, NotIdle, TokenMismatch, Unacked
from batonmq_server.offsets.core.ranges import EMPTY
from tests.offsets.rules_scene import FORCED, IDLE, SAME_HOLDER, A, B, Scene, offsets


def test_story_1_messages_of_a_silent_holder_are_flagged() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 1)
    scene.now_ms += 30_000
    assert scene.fence(B, 1, IDLE).maybe_seen == offsets((0, 1))
    assert scene.record(2, 0, 1).maybe_seen == offsets((0, 1))
    with pytest.raises(Fenced):
        scene.commit(1, 1)


def test_story_2_pull_between_drained_check_and_fence_is_detected() -> None:
    scene = Scene()
    scene.fence(A, 0)
    assert scene.queue.drained, "the state that the lock manager saw before the fence"
    scene.record(1, 0, 1)
    with pytest.raises(Unacked):
        scene.fence(B, 1)
    assert scene.commit(1, 1).committed_offset == 1


def test_story_5_renewal_is_a_fence_and_flags_messages_of_the_dead_process() -> None:
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


def test_story_9_messages_dropped_by_the_same_holder_are_flagged() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 1)
    scene.fence(A, 1, SAME_HOLDER, resume=EMPTY)
    assert scene.record(2, 0, 1).maybe_seen == offsets((0, 1))


def test_story_10_delivery_answered_before_a_crash_blocks_a_hand_over() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 1)
    scene.restart()
    with pytest.raises(Unacked):
        scene.fence(B, 1)


def test_story_10_delivery_answered_from_memory_is_flagged_after_a_crash() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 1)
    assert not scene.record(1, 1, 17).changed, "covered by the durable reservation"
    scene.restart()
    with pytest.raises(NotIdle):
        scene.fence(B, 1, IDLE)
    scene.now_ms += 30_000
    assert not offsets((0, 17)).difference(scene.fence(B, 1, IDLE).maybe_seen)


def test_story_11_retried_close_without_unfinished_offsets_has_no_effect() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 1)
    scene.close(1, 0, EMPTY, offsets((0, 1)))
    scene.close(1, 0, EMPTY, EMPTY)
    assert scene.fence(B, 1).maybe_seen == offsets((0, 1))


def test_story_13_late_commit_does_not_undo_a_reset() -> None:
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


def test_story_14_resume_from_before_a_reset_does_not_count_after_it() -> None:
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


def test_story_15_late_commit_of_a_former_owner_changes_nothing() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 5)
    scene.fence(B, 1, FORCED)
    scene.record(2, 0, 5)
    with pytest.raises(Fenced):
        scene.commit(1, 5)
    assert scene.queue.committed_offset == 0


def test_story_21_reacquire_with_too_small_a_resume_is_not_drained() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 2)
    scene.fence(A, 1, SAME_HOLDER, resume=EMPTY)
    with pytest.raises(Unacked):
        scene.fence(B, 2)


def test_story_7_applied_fence_makes_the_old_expected_token_fail() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.fence(B, 1, attempt="taken")
    with pytest.raises(TokenMismatch) as raised:
        scene.fence(A, 1)
    assert raised.value.facts["attempt"] == "taken"
