"""Retry decisions, and the properties of a message that is sent back.

Goal: delays and limits are those promised; every client computes the same producer id and queue for
a message; the retry properties restore the message.
Method: the pure core with plain values; a table per decision.
"""

from __future__ import annotations

from typing import Any

import pytest

from batonmq._consumer.consumer_settings import ConsumerSettings, retry_policy
from batonmq._consumer.handler_results import SUCCESS, RetryLater, Suspend, failure_of
from batonmq._core.queues import QueueRef
from batonmq._core.retries import (
    RETRIES_MAX,
    RETRY_DELAYS_MS,
    FailureAction,
    HandlingFailure,
    Origin,
    RetryInPlace,
    SendBack,
    SendToDeadLetters,
    SkipMessage,
    StopConsumer,
    origin_of,
    properties_of,
    retry_producer_id,
    retry_queue,
)
from batonmq.errors import InvalidArgument

QUEUE = QueueRef("orders", "broker-a", 3)
SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000


def decide(attempts: int, asked_ms: int | None = None, **settings: Any) -> FailureAction:
    return retry_policy(ConsumerSettings(**settings)).decide(attempts, asked_ms)


def test_retry_delays_are_those_of_rocketmq() -> None:
    minutes = [minute * MINUTE for minute in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)]
    assert [10 * SECOND, 30 * SECOND, *minutes, HOUR, 2 * HOUR] == list(RETRY_DELAYS_MS)
    assert sum(RETRY_DELAYS_MS) == 17_140 * SECOND


def test_seventeenth_failure_is_the_last_by_default() -> None:
    made = [decide(attempts) for attempts in range(1, RETRIES_MAX + 2)]
    assert made == [*map(SendBack, RETRY_DELAYS_MS), SendToDeadLetters()]


@pytest.mark.parametrize(
    ("exhausted", "expected"),
    [("dead_letter", SendToDeadLetters()), ("skip", SkipMessage()), ("stop", StopConsumer())],
)
@pytest.mark.parametrize("order", ["none", "queue", "key"])
def test_final_failure_has_no_retry(order: str, exhausted: str, expected: FailureAction) -> None:
    settings: Any = {"order": order, "exhausted": exhausted, "retries_max": 5}
    assert retry_policy(ConsumerSettings(**settings)).decide(1, 5, final=True) == expected


@pytest.mark.parametrize(
    ("settings", "attempts", "asked_ms", "expected"),
    [
        ({}, 1, 5, SendBack(5)),
        ({}, 1, 0, SendBack(0)),
        ({}, 17, 5, SendToDeadLetters()),
        ({"retries_max": 0}, 1, None, SendToDeadLetters()),
        ({"retries_max": 20}, 20, None, SendBack(2 * HOUR)),
        ({"retries_max": 2, "exhausted": "stop"}, 3, None, StopConsumer()),
        ({"send_back": False}, 17, None, RetryInPlace(30 * SECOND)),
        ({"order": "queue"}, 1, None, RetryInPlace(SECOND)),
        ({"order": "queue"}, 5, None, RetryInPlace(16 * SECOND)),
        ({"order": "queue"}, 6, None, RetryInPlace(30 * SECOND)),
        ({"order": "queue"}, 10**6, None, RetryInPlace(30 * SECOND)),
        ({"order": "queue"}, 1, 7, RetryInPlace(7)),
        ({"order": "queue", "retries_max": 3}, 3, None, RetryInPlace(4 * SECOND)),
        ({"order": "queue", "retries_max": 3}, 4, None, SendToDeadLetters()),
        ({"order": "queue", "retries_max": 3, "exhausted": "stop"}, 4, 7, StopConsumer()),
    ],
)
def test_retry_decision_follows_attempts_and_settings(
    settings: dict[str, Any], attempts: int, asked_ms: int | None, expected: FailureAction
) -> None:
    assert decide(attempts, asked_ms, **settings) == expected


def test_send_back_with_an_order_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"order is 'key' and send_back is set"):
        ConsumerSettings(order="key", send_back=True)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (None, None),
        (SUCCESS, None),
        ("anything", None),
        (RetryLater(), HandlingFailure("asked")),
        (RetryLater(5, "no stock"), HandlingFailure("asked", "no stock", 5)),
        (Suspend(7), HandlingFailure("asked", "suspended", 7)),
    ],
)
def test_handler_result_means_success_or_a_failure(
    result: object, expected: HandlingFailure | None
) -> None:
    assert failure_of(result) == expected


def test_retry_properties_restore_the_message() -> None:
    origin = Origin(QUEUE, 42, "broker-a-ff-0")
    properties = properties_of(origin, 3, HandlingFailure("failed", "ValueError: bad"), "c")
    assert origin_of(properties) == (origin, 3)
    assert properties["baton.origin"] == "orders/broker-a/3/42"
    assert properties["baton.reason"] == "failed"
    assert properties["baton.client"] == "c"


def test_error_text_is_cut_and_made_printable() -> None:
    error = "a\x01b\x02c\ud800" + "x" * 2_000
    shown = properties_of(Origin(QUEUE, 0, "m"), 1, HandlingFailure("failed", error), "c")[
        "baton.error"
    ]
    assert shown.startswith("a b c x")
    assert len(shown.encode()) == 1_000


@pytest.mark.parametrize(
    "changed", [{"baton.origin": "orders/broker-a/3"}, {"baton.attempts": "many"}]
)
def test_invalid_retry_properties_name_no_origin(changed: dict[str, str]) -> None:
    properties = properties_of(Origin(QUEUE, 42, "m"), 3, HandlingFailure("asked"), "c")
    assert origin_of({**properties, **changed}) is None
    assert origin_of({}) is None


def test_producer_id_differs_by_message_topic_and_reset() -> None:
    once = retry_producer_id(QUEUE, 7, 42, 0)
    assert once == retry_producer_id(QUEUE, 7, 42, 0)
    others = {
        retry_producer_id(QUEUE, 7, 43, 0),
        retry_producer_id(QUEUE, 8, 42, 0),
        retry_producer_id(QUEUE, 7, 42, 1),
        retry_producer_id(QueueRef("orders", "broker-a", 4), 7, 42, 0),
        retry_producer_id(QueueRef("orders", "broker-b", 3), 7, 42, 0),
    }
    assert len(others | {once}) == 6
    assert all(0 < one < 1 << 63 for one in others | {once})


def test_message_is_sent_back_to_its_own_broker_if_that_has_a_queue() -> None:
    queues = [QueueRef("r", broker, 0) for broker in ("broker-a", "broker-b")]
    assert retry_queue(queues, "broker-b", 1) == queues[1]
    assert {retry_queue(queues, "broker-c", producer_id) for producer_id in range(9)} == set(queues)
