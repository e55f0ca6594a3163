"""Allocation of queues to members.

Goal: all members together get every queue once, whatever order they know things in.
Method: RocketMQ's vectors, then properties over arbitrary groups.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.core.rebalance import Strategy, allocate
from batonmq.core.route import QueueId

MEMBERS = st.sets(st.text(st.characters(codec="ascii"), min_size=1, max_size=8), max_size=12)
QUEUES = st.sets(
    st.builds(
        QueueId,
        topic=st.sampled_from(["flights", "orders", "t"]),
        broker=st.sampled_from(["a", "b"]),
        queue_id=st.integers(0, 40),
    ),
    max_size=60,
)
STRATEGIES = st.sampled_from(Strategy)


def queues(count: int) -> list[QueueId]:
    return [QueueId("t", "broker-a", queue_id) for queue_id in range(count)]


@pytest.mark.parametrize(
    ("strategy", "count", "expected"),
    [
        (Strategy.AVERAGE, 8, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (Strategy.CIRCLE, 8, [[0, 3, 6], [1, 4, 7], [2, 5]]),
        (Strategy.AVERAGE, 2, [[0], [1], []]),
        (Strategy.CIRCLE, 2, [[0], [1], []]),
    ],
)
def test_known_vectors_are_met(strategy: Strategy, count: int, expected: list[list[int]]) -> None:
    members = ["c1", "c2", "c3"]
    found = [
        [queue.queue_id for queue in allocate(strategy, members, queues(count), me)]
        for me in members
    ]
    assert found == expected


@pytest.mark.parametrize("strategy", Strategy)
def test_who_is_no_member_gets_nothing(strategy: Strategy) -> None:
    assert allocate(strategy, ["c1"], queues(8), "c2") == ()
    assert allocate(strategy, [], queues(8), "c2") == ()


@given(STRATEGIES, MEMBERS.filter(bool), QUEUES)
def test_every_queue_goes_to_exactly_one_member(
    strategy: Strategy, members: set[str], all_queues: set[QueueId]
) -> None:
    shares = [allocate(strategy, sorted(members), sorted(all_queues), me) for me in members]
    dealt = [queue for share in shares for queue in share]
    assert sorted(dealt) == sorted(all_queues)


@given(STRATEGIES, MEMBERS.filter(bool), QUEUES)
def test_shares_differ_by_one_at_most(
    strategy: Strategy, members: set[str], all_queues: set[QueueId]
) -> None:
    sizes = [len(allocate(strategy, sorted(members), sorted(all_queues), me)) for me in members]
    assert max(sizes) - min(sizes) <= 1


@given(STRATEGIES, MEMBERS.filter(bool), QUEUES, st.randoms(use_true_random=False))
def test_order_and_repetition_of_the_input_do_not_matter(
    strategy: Strategy, members: set[str], all_queues: set[QueueId], random: Random
) -> None:
    shuffled, repeated = list(all_queues), [*members, *members]
    random.shuffle(shuffled)
    random.shuffle(repeated)
    for me in members:
        expected = allocate(strategy, sorted(members), sorted(all_queues), me)
        assert allocate(strategy, repeated, shuffled, me) == expected
