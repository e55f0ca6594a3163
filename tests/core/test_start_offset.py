"""The start offset of a group without progress.

Goal: the start is the one of the settings, whatever the size of the topic; messages that were sent
to an existing group are never skipped.
Method: the pure functions with plain values.
"""

from __future__ import annotations

import pytest

from batonmq._core.start_offset import ConsumeFrom, effective_start, start_offset

ALL: tuple[ConsumeFrom, ...] = ("first", "last", "timestamp")


@pytest.mark.parametrize("consume_from", ALL)
def test_existing_queue_starts_at_consume_from(consume_from: ConsumeFrom) -> None:
    assert effective_start(consume_from, retry=False, added=False) == consume_from


@pytest.mark.parametrize("consume_from", ALL)
def test_retry_topic_and_added_queues_are_read_from_their_first_message(
    consume_from: ConsumeFrom,
) -> None:
    assert effective_start(consume_from, retry=True, added=False) == "first"
    assert effective_start(consume_from, retry=False, added=True) == "first"


@pytest.mark.parametrize(("first", "end"), [(0, 0), (0, 3), (500, 100_000)])
def test_start_does_not_depend_on_the_size_of_a_queue(first: int, end: int) -> None:
    assert start_offset("first", first, end, found=0) == first
    assert start_offset("last", first, end, found=0) == end


@pytest.mark.parametrize(
    ("time_offset", "begins"), [(7, 10), (10, 10), (15, 15), (20, 20), (25, 20)]
)
def test_start_by_time_is_an_offset_that_the_queue_holds(time_offset: int, begins: int) -> None:
    assert start_offset("timestamp", 10, 20, time_offset) == begins
