"""Goal: a redriven dead letter is the same message with its history, sent once.

A copy that was sent back is found by the id of the original.
Method: the pure functions, by example.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonmq._core.dead_letters import (
    Criteria,
    DeadLetter,
    copy_of,
    dead_letter,
    destination,
    redrive_producer_id,
)
from batonmq._core.queues import QueueRef
from batonmq._core.records import KEYS_BYTES_MAX, Message
from batonmq._core.retries import (
    HandlingFailure,
    Origin,
    origin_of,
    properties_of,
    with_origin_key,
    without_origin_key,
)
from batonmq.errors import BadExpression

ORIGIN = Origin(QueueRef("orders", "broker-1", 3), 42, "broker-1-1f-0")
DLQ = QueueRef("%DLQ%shop", "broker-1", 0)


def letter(attempts: int = 17, **properties: str) -> DeadLetter:
    history = properties_of(
        ORIGIN, attempts, HandlingFailure("failed", "ValueError: x"), "worker-1"
    )
    message = Message(
        b"body", "paid", ("k1", ORIGIN.message_id), {**history, "a": "1", **properties}
    )
    return dead_letter(("broker-1-ff-0", DLQ, 7), (100, 200), message, redriven=False)


def test_dead_letter_separates_the_message_from_its_history() -> None:
    parsed = letter()
    assert (parsed.group, parsed.origin, parsed.attempts) == ("shop", ORIGIN, 17)
    assert (parsed.reason, parsed.error, parsed.client_id) == (
        "failed",
        "ValueError: x",
        "worker-1",
    )
    assert (parsed.keys, parsed.properties) == (("k1",), {"a": "1"})


def test_message_not_dead_lettered_by_batonmq_has_no_origin() -> None:
    parsed = dead_letter(("b-1-0", DLQ, 7), (1, 2), Message(b"x", keys=("k",)), redriven=True)
    assert (parsed.origin, parsed.attempts, parsed.keys, parsed.redriven) == (None, 0, ("k",), True)


def test_copy_for_the_group_restarts_at_the_same_origin() -> None:
    copy = copy_of(letter(), "r1", "tester", "two\nlines", to_topic=False)
    assert origin_of(copy.properties) == (ORIGIN, 0)
    assert copy.keys == ("k1", ORIGIN.message_id)
    assert (copy.body, copy.tag, copy.properties["a"]) == (b"body", "paid", "1")
    assert copy.properties["baton.former_attempts"] == "17"
    assert copy.properties["baton.redrive_reason"] == "two lines"


def test_copy_for_the_topic_is_a_new_message_with_its_history() -> None:
    copy = copy_of(letter(), "r1", "tester", "why", to_topic=True)
    assert origin_of(copy.properties) is None
    assert copy.properties == {
        "a": "1",
        "baton.redrive_id": "r1",
        "baton.redriven_from": "broker-1-ff-0",
        "baton.redriven_by": "tester",
        "baton.redrive_reason": "why",
        "baton.former_attempts": "17",
    }


def test_attempts_add_up_over_redrives() -> None:
    again = letter(5, **{"baton.former_attempts": "17", "baton.redrive_id": "r1"})
    assert (again.attempts, again.former_attempts, again.properties) == (5, 17, {"a": "1"})
    assert copy_of(again, "r2", "t", "w", to_topic=True).properties["baton.former_attempts"] == "22"


def test_producer_ids_differ_by_replay_and_by_letter() -> None:
    ids = {
        redrive_producer_id(replay, name) for replay in ("r1", "r2") for name in ("b-1-0", "b-2-0")
    }
    assert len(ids) == 4
    assert redrive_producer_id("r1", "b-1-0") in ids
    assert all(0 < each < 1 << 63 for each in ids)


def test_copy_goes_to_its_first_queue_or_to_the_broker_of_the_dead_letter() -> None:
    retry = [QueueRef("%RETRY%shop", f"broker-{n}", 0) for n in range(3)]
    assert destination(letter(), retry, 5) == retry[1]
    assert destination(letter(), retry[:1], 5) == retry[0]
    topic = [QueueRef("orders", "broker-1", n) for n in range(4)]
    assert destination(letter(), topic, 5) == ORIGIN.queue
    assert destination(letter(), topic[:3], 5) in topic[:3]


@pytest.mark.parametrize(
    ("criteria", "accepted"),
    [
        (Criteria(), True),
        (Criteria(cause="failed"), True),
        (Criteria(cause="timeout"), False),
        (Criteria(since_unix_ms=200), True),
        (Criteria(since_unix_ms=201), False),
        (Criteria(tag="paid"), True),
        (Criteria(tag="new"), False),
        (Criteria(key="k1"), True),
        (Criteria(key=ORIGIN.message_id), False),
        (Criteria(expression="sql: a = '1'"), True),
        (Criteria(expression="sql: a = '2'"), False),
        (Criteria(cause="failed", tag="new"), False),
    ],
)
def test_all_criteria_must_hold(criteria: Criteria, accepted: bool) -> None:
    assert criteria.accepts(letter()) is accepted


def test_criteria_with_an_invalid_condition_are_rejected() -> None:
    with pytest.raises(BadExpression):
        Criteria(expression="sql: a >")


def test_copy_has_the_id_of_the_original_as_a_key_once() -> None:
    keys = with_origin_key(("k1",), ORIGIN)
    assert keys == ("k1", ORIGIN.message_id)
    assert with_origin_key(keys, ORIGIN) == keys
    assert without_origin_key(keys, ORIGIN) == without_origin_key(("k1",), ORIGIN) == ("k1",)
    assert with_origin_key((), ORIGIN) == (ORIGIN.message_id,)


def test_keys_without_room_for_the_id_do_not_change() -> None:
    room = KEYS_BYTES_MAX - len(ORIGIN.message_id) - 1
    assert len(with_origin_key(("k" * room,), ORIGIN)) == 2
    assert with_origin_key(("k" * (room + 1),), ORIGIN) == ("k" * (room + 1),)
    umlauts = "ü" * (room // 2 + 1)
    assert with_origin_key((umlauts,), replace(ORIGIN)) == (umlauts,)
