"""Goal: the properties that a fence gives a token last as long as the token: no holder, taken by
force, subscription of its deliveries. Groups without ownership commit without a token.

Method: one queue, one call at a time. Names follow the protocol: s4 the fence, s14 subscriptions,
s15 groups without ownership.
"""

from __future__ import annotations

from copy import copy

import pytest

from batonmq.errors import (
    BatonError,
    BeyondDelivered,
    Fenced,
    NotHolder,
    TokenMismatch,
    Unacked,
    UnknownQueue,
)
from batonmq_server.offsets.core.ranges import EMPTY
from batonmq_server.offsets.core.values import Acks, ProgressSource, QueueLimits
from tests.offsets.rules_scene import FORCED, IDLE, KEY, SAME_HOLDER, A, B, Scene, offsets


def held(limits: QueueLimits | None = None) -> Scene:
    """Return a queue with token 1 of A and [0, 10) in flight."""
    scene = Scene(limits)
    scene.fence(A, 0)
    scene.record(1, 0, 10)
    return scene


def why(scene: Scene, call: str, *args: object) -> str:
    """Return the cause for which the call is fenced; assert that it changed nothing."""
    before = copy(scene.queue)
    with pytest.raises(Fenced) as raised:
        getattr(scene, call)(*args)
    assert scene.queue == before
    return raised.value.facts["why"]


# ---- without a holder


@pytest.mark.parametrize("condition", [IDLE, FORCED])
def test_s4_fence_without_holder_is_closed_from_the_start(condition: object) -> None:
    scene = held()
    scene.commit(1, 2, offsets((4, 5)))
    scene.now_ms += 30_000
    grant = scene.fence(None, 1, condition)  # type: ignore[arg-type]
    queue = scene.queue
    assert (queue.token, queue.holder, queue.closed) == (2, None, True)
    assert (queue.committed_offset, queue.delivered_offset) == (2, 2)
    assert grant.maybe_seen == offsets((2, 4), (5, 10))


def test_s4_any_client_can_get_a_queue_after_a_fence_without_holder() -> None:
    scene = held()
    scene.fence(None, 1, FORCED)
    scene.restart()
    with pytest.raises(NotHolder):
        scene.fence(A, 2, SAME_HOLDER)
    assert scene.fence(B, 2).maybe_seen == offsets((0, 10))


def test_s4_holder_without_a_known_owner_is_the_same_holder_and_gets_its_owner() -> None:
    """Access control was switched on since the fence; one node may not have it yet."""
    scene, holder = held(), A._replace(owner=11)
    scene.fence(holder, 1, SAME_HOLDER)
    assert scene.queue.holder == holder
    with pytest.raises(NotHolder):
        scene.fence(A._replace(owner=12), 2, SAME_HOLDER)
    scene.fence(A, 2, SAME_HOLDER)
    assert scene.queue.holder == holder


def test_s4_calls_under_a_token_without_holder_are_fenced() -> None:
    scene = held()
    scene.now_ms += 30_000
    scene.fence(None, 1, IDLE)
    for token, reason in ((1, "TAKEN"), (2, "CLOSED")):
        assert why(scene, "record", token, 0, 1) == reason
        assert why(scene, "commit", token, 1) == reason
        assert why(scene, "touch", token) == reason
    assert why(scene, "close", 1) == "TAKEN"


def test_s4_fence_without_holder_needs_its_condition() -> None:
    scene = held()
    with pytest.raises(Unacked):
        scene.fence(None, 1)
    with pytest.raises(NotHolder):
        scene.fence(None, 1, SAME_HOLDER)
    with pytest.raises(TokenMismatch):
        scene.fence(None, 7, FORCED)
    assert scene.queue.holder == A


def test_s4_repeated_fence_without_holder_gets_the_stored_answer() -> None:
    scene = held()
    grant = scene.fence(None, 1, FORCED, attempt="x")
    scene.restart()
    assert scene.fence(None, 1, FORCED, attempt="x") == grant._replace(changed=False)


def test_s4_fence_without_holder_of_a_queue_without_progress_is_rejected() -> None:
    scene = Scene()
    with pytest.raises(UnknownQueue):
        scene.fence(None, 0, FORCED)
    assert KEY not in scene.table, "no caller chose its start offset"


# ---- by force


def test_s4_forced_fence_is_recorded_and_survives_a_restart() -> None:
    scene = held()
    scene.fence(B, 1, FORCED)
    scene.restart()
    assert (scene.queue.forced_by, scene.queue.forced_reason) == ("operator", "stuck")
    assert why(scene, "commit", 1, 5) == "FORCED"


def test_s4_next_fence_clears_the_record_of_a_forced_one() -> None:
    scene = held()
    scene.fence(None, 1, FORCED)
    scene.fence(B, 2)
    assert (scene.queue.forced_by, scene.queue.forced_reason) == ("", "")
    assert why(scene, "commit", 1, 5) == "TAKEN"


# ---- bound to a subscription


def test_s14_delivery_of_another_subscription_is_fenced() -> None:
    scene = Scene()
    scene.fence(A, 0, generation=5)
    scene.restart()
    for generation in (0, 4, 6):
        assert why(scene, "record", 1, 0, 1, generation) == "SUBSCRIPTION"
    scene.record(1, 0, 1, 5)
    assert scene.queue.delivered_offset == 1


def test_s14_token_without_subscription_accepts_any_delivery() -> None:
    scene = held()
    scene.record(1, 10, 11, 7)
    assert scene.queue.delivered_offset == 11


def test_s14_token_is_checked_before_subscription() -> None:
    scene = Scene()
    scene.fence(A, 0, generation=5)
    scene.fence(B, 1, generation=6)
    assert why(scene, "record", 1, 0, 1, 5) == "TAKEN"


def test_s14_acks_and_closes_need_no_subscription() -> None:
    scene = Scene()
    scene.fence(A, 0, generation=5)
    scene.record(1, 0, 4, 5)
    assert scene.commit(1, 2).changed
    assert scene.close(1, 4).changed


# ---- what changed the progress last


def test_s2_progress_has_the_source_of_its_last_change() -> None:
    scene = held()
    sources = [scene.queue.source]
    scene.table.commit(KEY, 1, Acks(0, 1, EMPTY), scene.now, ProgressSource.PULL)
    sources.append(scene.queue.source)
    scene.commit(1, 2)
    sources.append(scene.queue.source)
    scene.commit(1, 2)
    sources.append(scene.queue.source)
    assert sources == [
        ProgressSource.FENCE,
        ProgressSource.PULL,
        ProgressSource.COMMIT,
        ProgressSource.COMMIT,
    ]
    scene.restart()
    assert scene.queue.source is ProgressSource.COMMIT


# ---- without a token


def test_s15_first_commit_without_token_creates_the_progress() -> None:
    scene = Scene()
    assert scene.commit_unowned(1_000, offsets((1_004, 1_006))) == (1_000, True)
    queue = scene.queue
    assert (queue.token, queue.holder, queue.closed) == (0, None, True)
    assert (queue.acked, queue.drained) == (offsets((1_004, 1_006)), True)
    assert queue.source is ProgressSource.COMMIT


def test_s15_first_commit_without_token_creates_progress_without_acks() -> None:
    scene = Scene()
    assert scene.commit_unowned() == (0, True)
    scene.restart()
    assert scene.commit_unowned() == (0, False)
    assert scene.queue.source is ProgressSource.COMMIT, "the start of the group is stored"


def test_s15_commits_without_token_are_united_and_never_go_back() -> None:
    scene = Scene()
    scene.commit_unowned(10)
    scene.restart()
    assert scene.commit_unowned(4, offsets((12, 14))) == (10, True)
    assert scene.commit_unowned(9) == (10, False)
    assert scene.commit_unowned(12) == (14, True)


def test_s15_commit_without_token_of_another_reset_epoch_is_fenced() -> None:
    scene = Scene()
    scene.commit_unowned(10)
    scene.reset(3)
    assert why(scene, "commit_unowned", 10) == "RESET"
    assert scene.commit_unowned(4, EMPTY, 1).committed_offset == 4


def test_s15_late_commit_without_token_does_not_revive_a_deleted_queue() -> None:
    scene = Scene()
    scene.commit_unowned(10)
    scene.delete_group()
    with pytest.raises(Fenced):
        scene.commit_unowned(10)
    assert KEY not in scene.table
    with pytest.raises(UnknownQueue) as raised:
        scene.table.query(KEY)
    epoch = int(raised.value.facts["reset_epoch"])
    assert scene.commit_unowned(2, EMPTY, epoch).committed_offset == 2
    assert scene.queue.token == 1, "the token of the tombstone, which the next fence continues"


def test_s15_first_owner_starts_at_the_progress_committed_without_token() -> None:
    scene = Scene()
    scene.commit_unowned(10, offsets((12, 13)))
    grant = scene.fence(A, 0, initial_offset=99)
    assert (grant.token, grant.committed_offset, grant.acked) == (1, 10, offsets((12, 13)))


def test_s15_progress_made_under_a_token_continues_without_one() -> None:
    scene = held()
    assert scene.commit_unowned(15).committed_offset == 15
    assert scene.queue.delivered_offset == 15
    with pytest.raises(BeyondDelivered):
        scene.commit(1, 16)


def test_s8_commit_without_token_does_not_restart_the_idle_time() -> None:
    scene = held()
    scene.now_ms += 30_000
    scene.commit_unowned(5)
    assert scene.fence(B, 1, IDLE).maybe_seen == offsets((5, 10))


# ---- the ack cap


@pytest.mark.parametrize(
    "limits",
    [QueueLimits(ack_ranges_max=100), QueueLimits(ack_bytes_max=250)],
    ids=["ranges", "bytes"],
)
def test_s16_deliveries_stop_at_the_cap_and_acks_are_accepted(limits: QueueLimits) -> None:
    scene = held(limits)
    scene.record(1, 10, 1_000)
    acked = offsets(*((offset, offset + 1) for offset in range(1, 1_000, 2)))
    scene.commit(1, 0, acked)
    assert scene.table.capped == {KEY}
    with pytest.raises(BatonError) as raised:
        scene.record(1, 1_000, 1_001)
    assert raised.value.reason == "ACK_CAP"
    scene.restart()
    assert (scene.queue.acked, scene.table.capped) == (acked, {KEY})
    scene.commit(1, 1_000)
    assert (scene.queue.committed_offset, scene.table.capped) == (1_000, set())
    scene.record(1, 1_000, 1_001)


def test_s16_default_cap_is_100_000_ranges_or_1_mib() -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 300_000)
    scene.commit(1, 0, offsets(*((at, at + 1) for at in range(1, 199_999, 2))))
    scene.record(1, 300_000, 300_001)
    scene.commit(1, 0, offsets((199_999, 200_000)))
    assert len(scene.queue.acked.runs) == 100_000
    assert scene.queue.ack_window_full(scene.limits)
    assert QueueLimits().ack_bytes_max == 1 << 20
