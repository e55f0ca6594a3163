"""Spread of queues and routes, without a server.

Goal: queues are spread evenly, and a route never has a broker that is down.
Method: single cases, then a property over arbitrary brokers.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.errors import NoBroker
from batonmq_server.nameserver.core.topics import (
    QueueSpread,
    Topic,
    build_route,
    spread_queues,
    with_rooms,
)


def test_queues_are_spread_evenly_from_the_given_broker() -> None:
    assert spread_queues(8, ["b", "a", "c"]) == (
        QueueSpread("a", 3),
        QueueSpread("b", 3),
        QueueSpread("c", 2),
    )
    assert spread_queues(1, ["b", "a", "c"], first=4) == (QueueSpread("b", 1),)
    assert spread_queues(2, ["b", "a", "c"], first=2) == (QueueSpread("a", 1), QueueSpread("c", 1))


def test_spread_has_the_present_rooms_and_keeps_those_of_brokers_that_are_down() -> None:
    spread = (QueueSpread("a", 1, room="north"), QueueSpread("b", 2, 1, room="south"))
    assert with_rooms(spread, {"b": "east", "c": "west"}) == (
        QueueSpread("a", 1, room="north"),
        QueueSpread("b", 2, 1, room="east"),
    )


def test_spread_without_brokers_is_refused() -> None:
    with pytest.raises(NoBroker):
        spread_queues(8, [])


@given(st.integers(1, 1024), st.sets(st.text("abc-", min_size=1), min_size=1), st.integers(0, 99))
def test_spread_is_complete_and_even(queue_count: int, brokers: set[str], first: int) -> None:
    spread = spread_queues(queue_count, brokers, first=first)
    counts = [part.queue_count for part in spread]
    assert sum(counts) == queue_count
    assert max(counts) - min(counts) <= 1
    assert len(spread) == min(queue_count, len(brokers))
    assert [part.broker for part in spread] == sorted({part.broker for part in spread})
    assert spread == spread_queues(queue_count, sorted(brokers), first=first)


def test_route_omits_brokers_that_are_down() -> None:
    topic = Topic(
        name="t",
        topic_id=1,
        spread=(QueueSpread("a", 1), QueueSpread("b", 1)),
        create_unix_ms=5,
    )
    route = build_route(topic, {"b": "host:1", "c": "host:2"}, 7)
    assert [(b.name, b.address) for b in route.brokers] == [("b", "host:1")]
    assert route.generation == 7
    assert route.same_targets(build_route(topic, {"b": "host:1"}, 8))
    assert not route.same_targets(build_route(topic, {"b": "host:3"}, 8))
    assert not route.same_targets(None)
