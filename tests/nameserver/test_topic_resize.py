"""Adding and removing queues of a topic, without a server.

Goal: queues keep their brokers, the spread stays even, and no queue is removed before it is read.
Method: single cases, then properties over arbitrary sequences of sizes.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.errors import LimitExceeded, NoBroker
from batonmq_server.nameserver.core.groups import Group, Member, Subscription, Terms
from batonmq_server.nameserver.core.topic_resize import (
    RetiringQueue,
    resized_spread,
    unread_count,
    without_retiring_queues,
)
from batonmq_server.nameserver.core.topics import QueueSpread, Topic
from batonmq_server.nameserver.topic_proto import topic_from_bytes, topic_to_pb


def topic(*spread: QueueSpread, topic_id: int = 0, permission: str = "READ_WRITE") -> Topic:
    return Topic(
        name="t", topic_id=topic_id, spread=spread, create_unix_ms=1, permission=permission
    )


def changed(before: Topic, queue_count: int, *brokers: str) -> Topic:
    spread = resized_spread(before, queue_count, brokers)
    return topic(*spread, topic_id=before.topic_id)


def test_growing_evens_the_spread_and_keeps_present_queues() -> None:
    before = topic(QueueSpread("a", 5), QueueSpread("b", 1))
    assert changed(before, 8, "a", "b", "c").spread == (
        QueueSpread("a", 5),
        QueueSpread("b", 2),
        QueueSpread("c", 1),
    ), "broker c is the first of equal brokers"


def test_broker_that_is_down_gains_no_queue() -> None:
    before = topic(QueueSpread("a", 1), QueueSpread("gone", 1))
    assert changed(before, 5, "a").spread == (QueueSpread("a", 4), QueueSpread("gone", 1))
    with pytest.raises(NoBroker):
        resized_spread(before, 5, ())


def test_shrinking_makes_queues_retiring_first() -> None:
    before = topic(QueueSpread("a", 4), QueueSpread("b", 4))
    after = changed(before, 5, "a", "b")
    assert after.spread == (QueueSpread("a", 4, 3), QueueSpread("b", 4, 2))
    assert (after.queue_count, after.shrinking) == (5, True)
    shrunk = without_retiring_queues(after)
    assert shrunk.spread == (QueueSpread("a", 3), QueueSpread("b", 2))
    assert (shrunk.queue_count, shrunk.shrinking) == (5, False)


def test_growing_back_makes_retiring_queues_writable() -> None:
    before = topic(QueueSpread("a", 4), QueueSpread("b", 4))
    assert changed(changed(before, 2, "a", "b"), 8, "a", "b") == before


def test_growing_back_in_part_makes_some_retiring_queues_writable() -> None:
    before = topic(QueueSpread("a", 4), QueueSpread("b", 4))
    after = changed(changed(before, 2, "a", "b"), 6, "a", "b")
    assert after.spread == (QueueSpread("a", 4, 3), QueueSpread("b", 4, 3))


def test_rooms_stay_when_the_number_of_queues_changes() -> None:
    before = topic(QueueSpread("a", 4, room="north"), QueueSpread("b", 4, room="south"))
    shrunk = changed(before, 4, "a", "b")
    assert [part.room for part in shrunk.spread] == ["north", "south"]
    assert [part.room for part in without_retiring_queues(shrunk).spread] == ["north", "south"]


def test_shrinking_below_one_queue_per_broker_is_refused() -> None:
    before = topic(QueueSpread("a", 4), QueueSpread("b", 1), QueueSpread("c", 1))
    assert changed(before, 3, "a").spread == (
        QueueSpread("a", 4, 1),
        QueueSpread("b", 1),
        QueueSpread("c", 1),
    )
    with pytest.raises(LimitExceeded) as refused:
        resized_spread(before, 2, ("a", "b", "c"))
    assert refused.value.facts == {"field": "queue_count", "limit": "3", "actual": "2"}


def test_permission_and_writable_queues_survive_storing() -> None:
    for permission in ("READ_WRITE", "READ", "WRITE"):
        before = topic(QueueSpread("a", 4, 2, "north"), QueueSpread("b", 3), permission=permission)
        assert topic_from_bytes(topic_to_pb(before).SerializeToString()) == before


@settings(deadline=None)
@given(st.lists(st.integers(3, 40), min_size=1, max_size=6), st.integers(0, 5))
def test_every_sequence_of_sizes_ends_even_with_all_queues_in_place(
    sizes: list[int], topic_id: int
) -> None:
    names = ("a", "b", "c")
    state = topic(*(QueueSpread(name, 1) for name in names), topic_id=topic_id)
    for size in sizes:
        before = {part.broker: part for part in state.spread}
        state = changed(state, size, *names)
        assert state.queue_count == size
        writable = [part.writable_count for part in state.spread]
        assert max(writable) - min(writable) <= 1
        for part in state.spread:
            assert part.queue_count == max(before[part.broker].queue_count, part.writable_count)
            assert 1 <= part.writable_count <= part.queue_count
            assert part.write_queue_count < part.queue_count
        assert changed(state, size, *names) == state


END = RetiringQueue("a", 3, 10, 25)


def group(
    *members: str, subscribes: str = "t", consume_from: str = "LAST", model: str = "CLUSTERING"
) -> Group:
    return Group(
        name="g",
        generation=1,
        members=tuple(Member(name, 1, "", 0) for name in members),
        terms=Terms(
            subscriptions=(Subscription(subscribes, "*"),), model=model, consume_from=consume_from
        ),
        subscription_generation=1,
    )


@pytest.mark.parametrize(
    ("record", "committed", "count"),
    [
        (group("c"), 20, 5),
        (group("c"), 25, 0),
        (group("c"), 3, 15),  # what retention has removed can't be read any more
        (group(subscribes="other"), 20, 5),  # has progress, so it is waited for
        (None, 20, 5),
        (group("c"), None, 15),  # will acquire the queue
        (group(consume_from="FIRST"), None, 15),
        (group(), None, 0),  # would start behind the messages
        (group("c", subscribes="other"), None, 0),
        (None, None, 0),
        (group("c", model="BROADCASTING"), None, 0),  # keeps its progress to itself
    ],
)
def test_unread_messages_are_counted_by_group(
    record: Group | None, committed: int | None, count: int
) -> None:
    assert unread_count(END, record, "t", committed) == count


def test_queue_without_messages_has_no_unread_ones() -> None:
    assert unread_count(RetiringQueue("a", 0, 7, 7), group("c"), "t", None) == 0
