"""Moving queues between brokers, without a server.

Goal: the number of writable queues stays, queues of the target exist at once, and queues of the
source are retiring until they are removed.
Method: single cases, then properties over arbitrary sequences of moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.errors import InvalidArgument, LimitExceeded, NoBroker
from batonmq_server.nameserver.core.queue_moves import (
    even_spread,
    gains,
    moved_spread,
    spread_off,
)
from batonmq_server.nameserver.core.topic_resize import resized_spread, without_retiring_queues
from batonmq_server.nameserver.core.topics import Compaction, QueueSpread, Topic
from batonmq_server.nameserver.topic_proto import topic_from_bytes, topic_to_bytes
from tests.nameserver.test_topic_resize import topic

BROKERS = ("a", "b", "c")


def writable(state: Topic) -> dict[str, int]:
    return {part.broker: part.writable_count for part in state.spread}


def test_some_queues_of_a_broker_move() -> None:
    before = topic(QueueSpread("a", 4), QueueSpread("b", 4))
    assert moved_spread(before, "a", "c", 1) == (
        QueueSpread("a", 4, 3),
        QueueSpread("b", 4),
        QueueSpread("c", 1),
    )


def test_broker_whose_queues_all_move_takes_no_message_until_they_are_removed() -> None:
    before = topic(QueueSpread("a", 4), QueueSpread("b", 4))
    moved = topic(*moved_spread(before, "a", "b", 0))
    assert moved.spread == (QueueSpread("a", 4, closed=True), QueueSpread("b", 8))
    assert (moved.queue_count, moved.shrinking, writable(moved)) == (8, True, {"a": 0, "b": 8})
    assert topic_from_bytes(topic_to_bytes(moved)) == moved
    assert without_retiring_queues(moved).spread == (QueueSpread("b", 8),)


def test_queues_that_move_back_take_messages_again() -> None:
    before = topic(QueueSpread("a", 4), QueueSpread("b", 4))
    moved = topic(*moved_spread(before, "a", "b", 0))
    back = topic(*moved_spread(moved, "b", "a", 2))
    assert back.spread == (QueueSpread("a", 4, 2), QueueSpread("b", 8, 6))


def test_topic_that_has_left_a_broker_can_be_resized() -> None:
    moved = topic(*moved_spread(topic(QueueSpread("a", 2), QueueSpread("b", 2)), "a", "b", 0))
    assert resized_spread(moved, 1, BROKERS) == (
        QueueSpread("a", 2, closed=True),
        QueueSpread("b", 4, 1),
    ), "a broker without writable queues keeps none"
    assert writable(topic(*resized_spread(moved, 6, ("b", "c")))) == {"a": 0, "b": 4, "c": 2}


@pytest.mark.parametrize(("source", "count"), [("b", 0), ("b", 1), ("a", 5)])
def test_broker_gives_no_queues_that_it_does_not_have(source: str, count: int) -> None:
    with pytest.raises(LimitExceeded):
        moved_spread(topic(QueueSpread("a", 4)), source, "c", count)


def test_queues_do_not_move_to_their_own_broker() -> None:
    with pytest.raises(InvalidArgument):
        moved_spread(topic(QueueSpread("a", 4)), "a", "a", 1)


def test_queues_of_a_compacted_topic_stay() -> None:
    compacted = replace(topic(QueueSpread("a", 4)), compaction=Compaction())
    moves: list[Callable[[], object]] = [
        lambda: moved_spread(compacted, "a", "b", 1),
        lambda: even_spread(compacted, BROKERS),
        lambda: spread_off(compacted, "a", BROKERS),
    ]
    for move in moves:
        with pytest.raises(InvalidArgument, match="compacted"):
            move()


def test_last_broker_keeps_its_queues() -> None:
    with pytest.raises(NoBroker):
        spread_off(topic(QueueSpread("a", 4)), "a", ("a",))


def test_even_spread_moves_no_more_than_needed() -> None:
    before = topic(QueueSpread("a", 4), QueueSpread("b", 4))
    after = even_spread(before, BROKERS)
    assert gains(before, after) == {"c": 2}
    assert sorted(writable(topic(*after)).values()) == [2, 3, 3]
    assert even_spread(topic(*after), BROKERS) == after


def test_queues_go_to_the_brokers_with_fewest() -> None:
    before = topic(QueueSpread("a", 3), QueueSpread("b", 1), QueueSpread("c", 3))
    assert writable(topic(*spread_off(before, "a", BROKERS))) == {"a": 0, "b": 4, "c": 3}


@given(
    st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any),
    st.lists(st.tuples(st.sampled_from(["even", "off", "drop"]), st.sampled_from(BROKERS))),
)
def test_moves_lose_no_queue(counts: list[int], steps: list[tuple[str, str]]) -> None:
    state = topic(*(QueueSpread(b, n) for b, n in zip(BROKERS, counts, strict=True) if n))
    for step, broker in steps:
        before = {part.broker: part.queue_count for part in state.spread}
        if step == "drop":
            state = without_retiring_queues(state)
            assert not state.shrinking
        else:
            spread = even_spread(state, BROKERS)
            if step == "off":
                spread = spread_off(state, broker, BROKERS)
            state = topic(*spread)
            assert all(part.queue_count >= before.get(part.broker, 0) for part in spread)
            assert step == "even" or not writable(state).get(broker)
        assert state.queue_count == sum(counts)
        assert [part.broker for part in state.spread] == sorted(p.broker for p in state.spread)
