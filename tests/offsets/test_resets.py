"""Goal: resets, undos and clones follow section 13 of the protocol, and are recorded.

Method: one queue, one call at a time; clones with a second group. Names begin with s13.
"""

from __future__ import annotations

import pytest

from batonmq._core.queues import GroupQueue
from batonmq.errors import (
    BatonError,
    Fenced,
    OperationExists,
    OperationNotFound,
    Superseded,
    UnknownQueue,
)
from batonmq_server.offsets.core.ranges import EMPTY
from batonmq_server.offsets.core.resets import (
    RECORDS_MAX,
    QueueReset,
    RecordedReset,
    ResetHistory,
    ResetOrder,
    ResetStep,
)
from batonmq_server.offsets.core.values import Acks, AckState, Instant, ProgressSource
from tests.offsets.rules_scene import FORCED, IDLE, KEY, A, B, Scene, offsets

OTHER = "cloners"


def held(*, committed: int = 10) -> Scene:
    """Return a queue with token 1 of A, [0, committed) and 12 acked, others up to 20 in flight."""
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 20)
    scene.commit(1, committed, offsets((12, 13)))
    return scene


def handled(committed: int) -> Acks:
    """Return acks of every offset below `committed`."""
    return Acks(0, committed, EMPTY)


def step(result: ResetStep | BatonError) -> ResetStep:
    assert isinstance(result, ResetStep), result
    return result


# ---- one step


def test_s13_reset_changes_token_epoch_offset_and_holder_in_one_step() -> None:
    scene = held()
    moved = step(scene.reset(4))
    queue = scene.queue
    assert (queue.token, queue.reset_epoch, queue.closed, queue.holder) == (2, 1, True, None)
    assert (queue.committed_offset, queue.delivered_offset, queue.acked) == (4, 4, EMPTY)
    assert queue.delivered_reserved == 4
    assert queue.source is ProgressSource.RESET
    assert (moved.effect.reset_epoch, moved.effect.token) == (1, 2)
    assert (moved.effect.before, moved.to_offset) == (AckState(10, offsets((12, 13))), 4)


def test_s13_offsets_started_before_a_reset_are_maybe_seen_after_it() -> None:
    scene = held()
    scene.reset(4)
    assert scene.queue.maybe_seen == offsets((4, 20)), "committed, in flight and acked offsets"
    assert scene.fence(B, 2).maybe_seen == offsets((4, 20))


@pytest.mark.parametrize("case", ["committed", "delivered", "acked", "maybe seen"])
def test_s13_maybe_seen_reaches_up_to_the_greatest_started_offset(case: str) -> None:
    scene = Scene()
    scene.fence(A, 0)
    scene.record(1, 0, 20)
    match case:
        case "committed":
            scene.commit(1, 20)
        case "acked":
            scene.commit(1, 0, offsets((19, 20)))
            scene.close(1)
        case "maybe seen":
            scene.fence(B, 1, FORCED)
            assert scene.queue.delivered_offset == 0
    scene.reset(5)
    assert scene.queue.maybe_seen == offsets((5, 20))


def test_s13_forward_reset_is_a_recorded_skip() -> None:
    scene = held()
    moved = step(scene.reset(50)).effect
    assert (moved.replayed_count, moved.skipped_count) == (0, 39)
    assert (scene.queue.committed_offset, scene.queue.maybe_seen) == (50, EMPTY)
    (recorded,) = scene.resets.history.newest_first(KEY.group)
    assert recorded.order == ResetOrder("op", ProgressSource.RESET, "admin", "replay")
    assert recorded.steps[0].effect == moved
    scene.reset(0, "back")
    assert scene.queue.maybe_seen == offsets((0, 50)), "no started offset is lost"


def test_s13_backward_reset_counts_the_replayed_offsets() -> None:
    moved = step(held().reset(4)).effect
    assert (moved.replayed_count, moved.skipped_count) == (7, 0)


def test_s13_forward_reset_counts_only_unacked_offsets_as_skipped() -> None:
    moved = step(held().reset(15)).effect
    assert (moved.replayed_count, moved.skipped_count) == (0, 4)


def test_s13_dry_run_returns_the_same_effect_and_changes_nothing() -> None:
    scene = held()
    before = scene.queue.committed_offset, scene.queue.token, scene.queue.maybe_seen
    expected = step(scene.reset(4, dry_run=True))
    assert (scene.queue.committed_offset, scene.queue.token, scene.queue.maybe_seen) == before
    assert scene.resets.history.newest_first(KEY.group) == []
    assert expected == step(scene.reset(4))


def test_s13_dry_run_leaves_a_queue_without_progress_unknown() -> None:
    scene = Scene()
    scene.reset(4, dry_run=True)
    assert KEY not in scene.table
    assert list(scene.table.items()) == []


def test_s13_reset_of_a_queue_without_progress_creates_it() -> None:
    scene = Scene()
    moved = step(scene.reset(4)).effect
    assert (moved.before, moved.replayed_count, moved.skipped_count) == (AckState(4), 0, 0)
    assert scene.fence(A, 1, initial_offset=90).committed_offset == 4


# ---- the owner


@pytest.mark.parametrize(
    ("call", "args"),
    [("record", (1, 20, 21)), ("touch", (1,)), ("commit", (1, 15)), ("close", (1, 15))],
)
def test_s13_owner_is_fenced_by_a_reset_with_its_cause(call: str, args: tuple[int, ...]) -> None:
    scene = held()
    scene.reset(4)
    with pytest.raises(Fenced) as raised:
        getattr(scene, call)(*args)
    facts = {"token": "1", "current": "2", "reset_epoch": "1", "why": "RESET"}
    assert raised.value.facts == facts


def test_s13_owner_continues_at_the_new_offset_after_a_reset() -> None:
    scene = held()
    scene.reset(4)
    grant = scene.fence(A, 2, resume=offsets((13, 20)), reset_epoch=0)
    assert (grant.committed_offset, grant.acked, grant.reset_epoch) == (4, EMPTY, 1)
    assert scene.queue.delivered_offset == 4, "the messages in flight are of another epoch"


def test_s13_attempt_before_a_reset_is_superseded() -> None:
    scene = Scene()
    scene.fence(A, 0, attempt="x")
    scene.reset(0)
    scene.restart()
    with pytest.raises(Superseded):
        scene.fence(A, 0, attempt="x")


def test_s13_reset_clears_force_and_subscription() -> None:
    scene = held()
    scene.fence(B, 1, FORCED, generation=7)
    scene.reset(4)
    queue = scene.queue
    assert (queue.forced_by, queue.forced_reason, queue.subscription_generation) == ("", "", 0)


# ---- operation ids


def test_s13_repeated_op_id_gets_the_same_answer_and_changes_nothing() -> None:
    scene = held()
    first = scene.reset(4)
    scene.fence(B, 2)
    scene.record(3, 4, 9)
    scene.commit(3, 9, reset_epoch=1)
    for _ in range(2):
        assert scene.reset(4) == first
        assert (scene.queue.committed_offset, scene.queue.token) == (9, 3)
        scene.restart()


def test_s13_op_id_that_moved_the_queue_elsewhere_is_rejected() -> None:
    scene = held()
    scene.reset(4)
    assert isinstance(scene.reset(5), OperationExists)
    assert scene.queue.token == 2


@pytest.mark.parametrize(
    "other",
    [
        ResetOrder("op", ProgressSource.RESET, "another admin", "replay"),
        ResetOrder("op", ProgressSource.RESET, "admin", "another reason"),
        ResetOrder("op", ProgressSource.RESET, "admin", "replay", undone_op_id="x"),
        ResetOrder("op", ProgressSource.CLONE, "admin", "replay", from_group=OTHER),
    ],
)
def test_s13_op_id_of_another_order_is_rejected(other: ResetOrder) -> None:
    scene = held()
    scene.reset(4)
    target = QueueReset(KEY._replace(queue_id=9), AckState(4))
    outcome = scene.resets.reset(KEY.group, other, [target], scene.now, dry_run=False)
    assert [type(result) for result in outcome.results] == [OperationExists]
    assert (outcome.applied, len(scene.table)) == ([], 1)


def test_s13_one_operation_may_take_several_calls() -> None:
    scene = Scene()
    order = ResetOrder("op", ProgressSource.RESET, "admin", "replay")
    keys = [KEY._replace(queue_id=queue_id) for queue_id in range(4)]
    targets = [QueueReset(key, AckState(7)) for key in keys]
    for part in (targets[2:], targets[:3]):
        scene.now_ms += 1
        scene.resets.reset(KEY.group, order, part, scene.now, dry_run=False)
    (operation,) = scene.resets.history.newest_first(KEY.group)
    assert [each.key for each in operation.steps] == keys
    assert operation.unix_ms == scene.now.unix_ms - 1
    assert [scene.table.query(key).token for key in keys] == [1, 1, 1, 1]


def test_s13_history_is_newest_first_and_drops_the_oldest() -> None:
    records = ResetHistory()
    for number in range(1, RECORDS_MAX + 3):
        assert records.next_number("g") == number
        order = ResetOrder(f"op-{number}", ProgressSource.RESET, "admin", "")
        key = records.put("g", RecordedReset(number=number, order=order, unix_ms=1, steps=()))
        kept = records.at(key)
        assert kept is not None
        assert kept.number == number
    numbers = [operation.number for operation in records.newest_first("g")]
    assert numbers == list(range(RECORDS_MAX + 2, 2, -1))
    assert records.find("g", "op-2") is None
    assert records.find("g", "op-3") is not None
    assert records.find("h", "op-3") is None
    assert records.newest_first("h") == []


# ---- undo


def test_s13_undo_restores_committed_and_acked_exactly() -> None:
    scene = held()
    scene.reset(0)
    scene.restart()
    scene.fence(B, 2)
    scene.record(3, 0, 5)
    scene.commit(3, 2, offsets((3, 4)), reset_epoch=1)
    (undone,) = scene.undo("op")
    queue = scene.queue
    assert (queue.committed_offset, queue.acked) == (10, offsets((12, 13)))
    assert (queue.token, queue.reset_epoch, queue.holder) == (4, 2, None)
    assert queue.maybe_seen == offsets((10, 12), (13, 20))
    assert (step(undone).effect.replayed_count, step(undone).effect.skipped_count) == (0, 8)
    assert [each.order.undone_op_id for each in scene.resets.history.newest_first(KEY.group)] == [
        "op",
        "",
    ]


def test_s13_undo_of_a_skip_replays_the_skipped_offsets() -> None:
    scene = held()
    scene.reset(50)
    (undone,) = scene.undo("op")
    assert step(undone).effect.replayed_count == 39
    assert scene.queue.maybe_seen == offsets((10, 12), (13, 50))


def test_s13_repeated_undo_gets_the_same_answer_and_changes_nothing() -> None:
    scene = held()
    scene.reset(4)
    first = scene.undo("op")
    assert scene.undo("op") == first
    assert scene.queue.token == 3


def test_s13_undo_can_be_undone() -> None:
    scene = held()
    scene.reset(4)
    scene.undo("op", "second")
    scene.undo("second", "third")
    assert (scene.queue.committed_offset, scene.queue.acked) == (4, EMPTY)


def test_s13_undo_of_an_unknown_operation_is_rejected() -> None:
    scene = held()
    with pytest.raises(OperationNotFound) as raised:
        scene.undo("nothing")
    assert raised.value.facts == {"op_id": "nothing"}


def test_s13_repeated_undo_is_answered_after_the_undone_operation_was_dropped() -> None:
    scene = held()
    scene.reset(4)
    first = scene.undo("op")
    undo = scene.resets.history.newest_first(KEY.group)[0]
    scene.resets.history = ResetHistory()
    scene.resets.history.put(KEY.group, undo)
    assert scene.undo("op") == first


@pytest.mark.parametrize("deletion", ["topic", "group"])
@pytest.mark.parametrize("anew", [False, True])
def test_s13_undo_does_not_change_progress_created_after_a_deletion(
    deletion: str, anew: bool
) -> None:
    scene = held()
    scene.reset(4)
    if deletion == "topic":
        scene.delete(1)
    else:
        scene.delete_group()
    if anew:
        scene.fence(A, 3)
    (result,) = scene.undo("op")
    assert isinstance(result, UnknownQueue)
    assert scene.state.token == (4 if anew else 3)
    assert scene.resets.history.find(KEY.group, "undo") is None


# ---- clone


def cloned(
    scene: Scene, *, topic: str = "", dry_run: bool = False, by: str = "admin"
) -> list[ResetStep]:
    order = ResetOrder("copy", ProgressSource.CLONE, by, "a new reader", from_group=KEY.group)
    outcome = scene.resets.clone(OTHER, order, topic, scene.now, dry_run=dry_run)
    return [step(result) for result in outcome.results]


def theirs(key: GroupQueue = KEY) -> GroupQueue:
    return key._replace(group=OTHER)


def test_s13_clone_copies_committed_and_acked() -> None:
    scene = held()
    (moved,) = cloned(scene)
    queue = scene.table.query(theirs())
    assert (queue.committed_offset, queue.acked) == (10, offsets((12, 13)))
    assert (queue.token, queue.reset_epoch, queue.source) == (1, 1, ProgressSource.CLONE)
    assert (moved.key, moved.to_offset) == (theirs(), 10)
    assert (scene.queue.token, scene.queue.holder) == (1, A), "the source is unchanged"


def test_s13_clone_flags_offsets_that_the_group_had_started() -> None:
    scene = held()
    scene.table.commit_unowned(theirs(), handled(40), scene.now)
    (moved,) = cloned(scene)
    assert scene.table.query(theirs()).maybe_seen == offsets((10, 12), (13, 40))
    assert (moved.effect.replayed_count, moved.effect.skipped_count) == (29, 0)


def test_s13_clone_of_one_topic_leaves_the_others() -> None:
    scene = held()
    other = KEY._replace(topic="weather")
    scene.table.commit_unowned(other, handled(3), scene.now)
    assert [each.key for each in cloned(scene, topic="weather")] == [theirs(other)]
    assert theirs() not in scene.table


def test_s13_clone_skips_the_retry_topic_of_the_source_unless_named() -> None:
    scene = held()
    retries = KEY._replace(topic=f"%RETRY%{KEY.group}")
    scene.table.commit_unowned(retries, handled(3), scene.now)
    assert [each.key for each in cloned(scene, dry_run=True)] == [theirs()]
    assert [each.key for each in cloned(scene, topic=retries.topic)] == [theirs(retries)]


def test_s13_clone_dry_run_changes_nothing() -> None:
    scene = held()
    expected = cloned(scene, dry_run=True)
    assert theirs() not in scene.table
    assert expected == cloned(scene)


def test_s13_repeated_clone_gets_the_same_answer_after_the_source_changed() -> None:
    scene = held()
    first = cloned(scene)
    scene.commit(1, 15)
    assert cloned(scene) == first
    assert scene.table.query(theirs()).committed_offset == 10
    with pytest.raises(OperationExists):
        cloned(scene, by="another admin")


def test_s13_clone_can_be_undone() -> None:
    scene = held()
    scene.table.commit_unowned(theirs(), handled(3), scene.now)
    cloned(scene)
    order = ResetOrder("undo", ProgressSource.RESET, "admin", "a mistake", undone_op_id="copy")
    scene.resets.undo(OTHER, order, scene.now, dry_run=False)
    queue = scene.table.query(theirs())
    assert (queue.committed_offset, queue.acked) == (3, EMPTY)


# ---- deleted groups


def test_s13_deleted_group_leaves_tombstones_as_a_deleted_topic_does() -> None:
    scene = held()
    scene.table.commit_unowned(theirs(), handled(3), scene.now)
    assert scene.delete_group() == [KEY]
    assert (KEY in scene.table, theirs() in scene.table) == (False, True)
    scene.restart()
    with pytest.raises(Fenced) as raised:
        scene.commit(1, 5)
    assert raised.value.facts["why"] == "RESET"
    grant = scene.fence(B, 2)
    assert (grant.token, grant.committed_offset, grant.reset_epoch) == (3, 0, 1)


def test_s13_group_can_be_deleted_on_one_topic() -> None:
    scene = held()
    other = KEY._replace(topic="weather")
    scene.table.commit_unowned(other, handled(3), scene.now)
    assert scene.table.delete_group(KEY.group, "weather", scene.now) == [other]
    assert KEY in scene.table
    assert scene.table.delete_group(KEY.group, "weather", Instant(0, 0)) == []


def test_s13_reset_of_a_deleted_queue_continues_its_token() -> None:
    scene = held()
    scene.delete_group()
    moved = step(scene.reset(4)).effect
    assert (moved.token, moved.reset_epoch) == (3, 2)
    scene.now_ms += 30_000
    assert scene.fence(A, 3, IDLE).token == 4
