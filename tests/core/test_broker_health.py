"""Goal: a slow or failed broker is avoided for a time, then probed with one batch.

Avoidance never keeps a message from being sent.
Method: written scenarios over a clock of integers.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from batonmq._core.broker_health import FAILED_MS, BrokerHealth
from batonmq._core.queues import QueueRef

QUEUES = tuple(QueueRef("orders", broker, queue) for broker in "abc" for queue in range(2))


def chosen(brokers: BrokerHealth, now_ms: int, count: int = 12) -> Counter[str]:
    """Return the number of the next batches that go to each broker."""
    return Counter(brokers.choose(QUEUES, turn, now_ms).broker for turn in range(count))


def test_queues_are_chosen_in_turn() -> None:
    brokers = BrokerHealth()
    assert [brokers.choose(QUEUES, turn, 0) for turn in range(8)] == [*QUEUES, *QUEUES[:2]]


@pytest.mark.parametrize(
    ("latency_ms", "avoided_ms"),
    [
        (0, 0), (549, 0), (550, 2_000), (1_799, 2_000), (1_800, 5_000), (3_000, 6_000),
        (5_000, 10_000), (14_999, 10_000), (15_000, 30_000), (100_000, 30_000),
    ],
)  # fmt: skip
def test_slow_broker_is_avoided_for_the_time_of_its_latency(
    latency_ms: int, avoided_ms: int
) -> None:
    brokers = BrokerHealth()
    brokers.answered("a", latency_ms, 1_000)
    if avoided_ms:
        assert chosen(brokers, 1_000 + avoided_ms - 1)["a"] == 0
    assert chosen(brokers, 1_000 + avoided_ms)["a"] > 0


def test_other_brokers_share_the_batches_of_an_avoided_one_evenly() -> None:
    brokers = BrokerHealth()
    brokers.failed("b", 0)
    assert chosen(brokers, 1) == {"a": 6, "c": 6}


def test_failed_broker_gets_one_batch_as_a_probe_after_its_time() -> None:
    brokers = BrokerHealth()
    brokers.failed("a", 0)
    assert chosen(brokers, FAILED_MS - 1)["a"] == 0
    assert chosen(brokers, FAILED_MS)["a"] == 1
    assert chosen(brokers, 2 * FAILED_MS - 1)["a"] == 0
    assert chosen(brokers, 2 * FAILED_MS)["a"] == 1


def test_fast_response_ends_the_avoidance() -> None:
    brokers = BrokerHealth()
    brokers.failed("a", 0)
    brokers.answered("a", 20, 5)
    assert chosen(brokers, 6) == {"a": 4, "b": 4, "c": 4}


def test_failed_probe_restarts_the_avoidance() -> None:
    brokers = BrokerHealth()
    brokers.failed("a", 0)
    assert chosen(brokers, FAILED_MS)["a"] == 1
    brokers.failed("a", FAILED_MS + 500)
    assert chosen(brokers, 2 * FAILED_MS + 499)["a"] == 0
    assert chosen(brokers, 2 * FAILED_MS + 500)["a"] == 1


def test_broker_with_the_shortest_remaining_time_is_used_if_all_are_avoided() -> None:
    brokers = BrokerHealth()
    for now_ms, broker in enumerate("bac"):
        brokers.failed(broker, now_ms)
    assert chosen(brokers, 5) == {"b": 12}


def test_all_batches_move_to_a_healthy_broker_and_one_to_a_broker_due_for_a_probe() -> None:
    brokers = BrokerHealth()
    brokers.failed("a", 0)
    assert brokers.takes_count(QUEUES, "a", 0) == sys.maxsize
    assert brokers.takes_count(QUEUES[:2], "a", 0) == 0, "the topic has no queue at another broker"
    brokers.failed("b", 10)
    assert brokers.takes_count(QUEUES, "a", 10) == sys.maxsize
    brokers.failed("c", 20)
    assert brokers.takes_count(QUEUES, "a", FAILED_MS + 9) == 0
    assert brokers.takes_count(QUEUES, "a", FAILED_MS + 10) == 1
    assert brokers.takes_count(QUEUES, "b", FAILED_MS + 10) == 1, "broker a is due for a probe too"


def test_avoided_broker_does_not_affect_topics_without_queues_on_it() -> None:
    brokers = BrokerHealth()
    brokers.failed("d", 0)
    assert chosen(brokers, 1) == {"a": 4, "b": 4, "c": 4}
