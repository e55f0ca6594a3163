"""Where a message goes.

Goal: an ordering key stays on its queue, and keys spread over all queues.
Method: fixed vectors, so that another version of the library agrees; then many keys.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.core.route import QueueId, queue_of_key

QUEUES = tuple(QueueId("orders", "broker-a", queue_id) for queue_id in range(8))


@pytest.mark.parametrize(
    ("key", "queue_id"),
    # CRC-32 of the UTF-8 bytes, modulo the number of queues.
    [("", 0), ("123456789", 0xCBF43926 % 8), ("a", 0xE8B7BE43 % 8), ("abc", 0x352441C2 % 8)],
)
def test_ordering_key_goes_where_its_crc32_says(key: str, queue_id: int) -> None:
    assert queue_of_key(QUEUES, key) == QUEUES[queue_id]


@given(st.text(), st.integers(1, 8))
def test_ordering_key_goes_to_one_of_the_queues_and_always_the_same(key: str, count: int) -> None:
    first = queue_of_key(QUEUES[:count], key)
    assert first in QUEUES[:count]
    assert queue_of_key(QUEUES[:count], key) == first


def test_ordering_keys_spread_over_all_queues() -> None:
    counts = Counter(queue_of_key(QUEUES, f"order-{number}") for number in range(8_000))
    assert len(counts) == len(QUEUES)
    assert all(800 < count < 1_200 for count in counts.values())


def test_queues_sort_by_topic_then_broker_then_number() -> None:
    mixed = [
        QueueId("b", "a", 0),
        QueueId("a", "b", 0),
        QueueId("a", "a", 10),
        QueueId("a", "a", 9),
    ]
    assert [str(queue) for queue in sorted(mixed)] == ["a/a/9", "a/a/10", "a/b/0", "b/a/0"]
