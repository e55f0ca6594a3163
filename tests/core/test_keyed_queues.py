"""Goal: an ordering key stays on its queue, keys spread over all queues, few move with a change.

Method: fixed vectors, so that every version of the library agrees; then many keys.
"""

from __future__ import annotations

import zlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq._core.keyed_queues import KeyedQueues
from batonmq._core.queues import QueueRef

QUEUES = tuple(
    QueueRef("orders", broker, queue_id)
    for broker in ("broker-a", "broker-b")
    for queue_id in range(4)
)
KEYS = [f"order-{number}" for number in range(8_000)]


def score(key: str, queue: QueueRef) -> int:
    """Return the score as the documentation defines it."""
    value = zlib.crc32(key.encode()) << 32 | zlib.crc32(f"{queue.broker}/{queue.queue_id}".encode())
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    value = (value ^ value >> 27) * 0x94D049BB133111EB % (1 << 64)
    return value ^ value >> 31


@pytest.mark.parametrize(
    ("key", "broker", "queue_id"),
    [
        ("", "broker-b", 2),
        ("a", "broker-b", 1),
        ("abc", "broker-b", 3),
        ("123456789", "broker-b", 3),
        ("订单", "broker-a", 2),
    ],
)
def test_queue_of_a_key_is_the_same_in_every_version(key: str, broker: str, queue_id: int) -> None:
    assert KeyedQueues(QUEUES).of(key) == QueueRef("orders", broker, queue_id)


@given(st.text(), st.integers(1, 8))
def test_ordering_key_goes_to_the_queue_with_the_highest_score(key: str, count: int) -> None:
    queues = QUEUES[:count]
    keyed = KeyedQueues(queues)
    assert keyed.of(key) == max(queues, key=lambda queue: score(key, queue))
    assert keyed.of(key) == keyed.of(key)


def test_the_highest_score_of_many_queues_counts() -> None:
    queues = tuple(QueueRef("orders", "broker-a", number) for number in range(300))
    keyed = KeyedQueues(queues)
    for key in KEYS[:100]:
        assert keyed.of(key) == max(queues, key=lambda queue: score(key, queue))


def test_ordering_keys_spread_over_all_queues() -> None:
    counts = Counter(map(KeyedQueues(QUEUES).of, KEYS))
    assert len(counts) == len(QUEUES)
    assert all(800 < count < 1_200 for count in counts.values())


@pytest.mark.parametrize("added", [QueueRef("orders", "broker-a", 4), QueueRef("orders", "new", 0)])
def test_keys_move_only_to_an_added_queue(added: QueueRef) -> None:
    before, after = KeyedQueues(QUEUES), KeyedQueues(tuple(sorted((*QUEUES, added))))
    moved = [key for key in KEYS if before.of(key) != after.of(key)]
    assert {after.of(key) for key in moved} == {added}
    assert len(KEYS) / 12 < len(moved) < len(KEYS) / 7, "about a ninth of the keys moves"


def test_only_keys_of_a_removed_queue_move() -> None:
    before, after = KeyedQueues(QUEUES), KeyedQueues(QUEUES[1:])
    assert all(before.of(key) == QUEUES[0] or after.of(key) == before.of(key) for key in KEYS)


def test_cache_of_keys_is_bounded() -> None:
    keyed = KeyedQueues(QUEUES)
    first = [keyed.of(key) for key in KEYS]
    for number in range(20_000):
        keyed.of(f"other-{number}")
    assert [keyed.of(key) for key in KEYS] == first


def test_queues_sort_by_topic_then_broker_then_number() -> None:
    mixed = [
        QueueRef("b", "a", 0),
        QueueRef("a", "b", 0),
        QueueRef("a", "a", 10),
        QueueRef("a", "a", 9),
    ]
    assert [str(queue) for queue in sorted(mixed)] == ["a/a/9", "a/a/10", "a/b/0", "b/a/0"]
