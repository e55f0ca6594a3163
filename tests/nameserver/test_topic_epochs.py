"""Goal: no attempt that was sent before a queue was opened again passes for a newer one.

Method: single changes of a topic, then arbitrary sequences of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.errors import BatonError
from batonmq_server.nameserver.core.queue_moves import moved_spread
from batonmq_server.nameserver.core.topic_epochs import with_epochs
from batonmq_server.nameserver.core.topic_resize import resized_spread, without_retiring_queues
from batonmq_server.nameserver.core.topics import QueueSpread, Topic
from tests.nameserver.test_topic_resize import topic

BROKERS = ("a", "b", "c")
Change = Callable[[Topic], Topic]


def resized(queue_count: int) -> Change:
    return lambda before: replace(before, spread=resized_spread(before, queue_count, BROKERS))


def moved(source: str, target: str, count: int = 0) -> Change:
    return lambda before: replace(before, spread=moved_spread(before, source, target, count))


def permitted(permission: str) -> Change:
    return lambda before: replace(before, permission=permission)


def closed_before_epochs(before: Topic) -> Topic:
    """Close queues as an earlier version did, without epochs; see `states`."""
    return replace(resized(6)(before), epoch=-1)


def states(first: Topic, *changes: Change) -> list[Topic]:
    """Return the topic before and after each change; one that is refused changes nothing."""
    found = [first]
    for change in changes:
        try:
            after = change(found[-1])
            unknown = after.epoch < 0
            found.append(replace(after, epoch=0) if unknown else with_epochs(found[-1], after))
        except BatonError:
            continue
    return found


def epochs(state: Topic) -> tuple[int, dict[str, int]]:
    return state.epoch, {part.broker: part.opened_epoch for part in state.spread}


def queue_count(state: Topic, broker: str) -> int:
    return {part.broker: part.queue_count for part in state.spread}.get(broker, 0)


def takes(state: Topic, queue: tuple[str, int]) -> bool:
    broker, queue_id = queue
    return state.permission != "READ" and any(
        part.broker == broker and queue_id < part.writable_count for part in state.spread
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([resized(12)], (0, {"a": 0, "b": 0, "c": 0})),
        ([resized(4)], (1, {"a": 0, "b": 0})),
        ([resized(4), resized(8)], (2, {"a": 2, "b": 2, "c": 2})),
        ([moved("a", "b")], (1, {"a": 0, "b": 0})),
        ([moved("a", "b"), moved("b", "a", 1)], (2, {"a": 2, "b": 0})),
        ([moved("a", "b"), without_retiring_queues, resized(9)], (2, {"a": 2, "b": 0})),
        ([permitted("READ"), permitted("READ_WRITE")], (2, {"a": 2, "b": 2})),
        ([permitted("WRITE"), permitted("READ_WRITE")], (0, {"a": 0, "b": 0})),
        ([closed_before_epochs, resized(12)], (1, {"a": 1, "b": 1, "c": 1})),
    ],
    ids=[
        "grown", "shrunk", "shrunk and grown", "moved", "moved back", "removed and added",
        "read only for a time", "write only for a time", "closed by an earlier version",
    ],
)  # fmt: skip
def test_epoch_rises_when_queues_stop_and_begin_again(
    changes: Sequence[Change], expected: tuple[int, dict[str, int]]
) -> None:
    last = states(topic(QueueSpread("a", 4), QueueSpread("b", 4)), *changes)[-1]
    assert epochs(last) == expected


def test_change_that_says_another_epoch_does_not_set_it() -> None:
    before = replace(topic(QueueSpread("a", 4)), epoch=3)
    assert with_epochs(before, replace(before, epoch=0)) == before


CHANGES = st.one_of(
    st.integers(1, 9).map(resized),
    st.tuples(st.sampled_from(BROKERS), st.sampled_from(BROKERS), st.integers(0, 2)).map(
        lambda drawn: moved(*drawn)
    ),
    st.sampled_from(("READ", "READ_WRITE", "WRITE")).map(permitted),
    st.just(without_retiring_queues),
)


@settings(max_examples=200)
@given(st.lists(CHANGES, max_size=8))
def test_late_attempt_has_an_earlier_epoch_than_the_queue_that_was_opened_again(
    changes: list[Change],
) -> None:
    found = states(topic(QueueSpread("a", 2), QueueSpread("b", 2)), *changes)
    for state in found:
        assert all(part.opened_epoch <= state.epoch for part in state.spread)
    # The route of the producer may be newer than what the broker knows. The broker looks the topic
    # up then, unless the epochs are equal. A queue that it does not know proves nothing.
    for sent, (stopped, now) in product(found, combinations(found, 2)):
        if sent.epoch > stopped.epoch:
            continue
        for part in now.spread:
            for number in range(
                min(queue_count(sent, part.broker), queue_count(stopped, part.broker))
            ):
                queue = part.broker, number
                if takes(now, queue) and not takes(stopped, queue):
                    assert sent.epoch < part.opened_epoch
