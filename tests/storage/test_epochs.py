"""Epoch histories, and the common point of two logs.

Goal: the common point of two logs is never after the first byte in which they differ, and is the
best one that their histories allow; damage of the file is found.
Method: Hypothesis writes logs under changing leaders. A model log is a string of the epochs that
wrote its bytes, so that two logs can be compared directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.errors import DataLoss
from batonmq_server.runtime.replication.position import NO_POSITION, ReplicaPosition
from batonmq_server.storage.core.epochs import (
    CRC,
    EpochHistory,
    common_point,
    decode,
    encode,
    read_history,
)

NODES = 3


class Log:
    """A model log: each byte is the epoch that wrote it."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.history = EpochHistory()

    @property
    def end(self) -> int:
        return len(self.written)

    def lead(self, epoch: int, count: int) -> None:
        self.history = self.history.with_epoch(epoch, self.end)
        self.written += [epoch] * count

    def follow(self, leader: Log, count: int) -> None:
        """Follow the leader: cut, adopt the history up to the own end, then copy."""
        point = common_point(leader.history, leader.end, self.history, self.end)
        if point < self.end:
            del self.written[point:]
            self.history = self.history.truncated(point)
        for _ in range(count):
            self.history = leader.history.truncated(self.end)
            self.written += leader.written[self.end : self.end + 1]
        self.history = leader.history.truncated(self.end)


@st.composite
def logs(draw: st.DrawFn) -> list[Log]:
    """Return nodes after some leaderships; any node may be elected."""
    nodes = [Log() for _ in range(NODES)]
    for epoch in range(1, draw(st.integers(1, 6)) + 1):
        leader = nodes[draw(st.integers(0, NODES - 1))]
        leader.lead(epoch, draw(st.integers(0, 4)))
        for follower in nodes:
            if follower is not leader and draw(st.booleans()):
                follower.follow(leader, draw(st.integers(0, 9)))
    return nodes


def truth(one: Log, other: Log) -> int:
    pairs = zip(one.written, other.written, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


@given(logs())
def test_common_point_is_where_two_logs_differ(nodes: list[Log]) -> None:
    for one in nodes:
        for other in nodes:
            point = common_point(one.history, one.end, other.history, other.end)
            assert point == truth(one, other)


@given(logs())
def test_history_has_the_epoch_of_each_byte(nodes: list[Log]) -> None:
    for log in nodes:
        epochs = [log.history.epoch_at(position) for position in range(log.end)]
        assert epochs == log.written


@given(logs())
def test_history_is_decoded_as_it_was_encoded(nodes: list[Log]) -> None:
    for log in nodes:
        assert decode(encode(log.history)) == log.history
        assert read_history(log.history.starts) == log.history


@given(st.lists(st.tuples(st.integers(-5, 50), st.integers(-5, 50)), max_size=4))
def test_history_that_does_not_rise_is_rejected(starts: list[tuple[int, int]]) -> None:
    epochs, positions = [epoch for epoch, _ in starts], [position for _, position in starts]
    rises = all(sorted(set(column)) == column for column in (epochs, positions))
    if rises and all(epoch > 0 and position >= 0 for epoch, position in starts):
        assert read_history(starts).starts == tuple(starts)
    else:
        with pytest.raises(DataLoss):
            read_history(starts)


def test_epoch_that_wrote_nothing_is_dropped() -> None:
    history = EpochHistory().with_epoch(1, 0).with_epoch(4, 100).with_epoch(7, 100)
    assert history.starts == ((1, 0), (7, 100))


def test_log_that_ends_where_an_epoch_starts_has_the_epoch() -> None:
    history = EpochHistory(((1, 0), (7, 100)))
    assert history.truncated(99).position(99) == ReplicaPosition(1, 99)
    assert history.truncated(100).position(100) == ReplicaPosition(7, 100)


def test_damaged_history_has_no_position() -> None:
    assert decode(encode(EpochHistory(((1, 0),), damaged=True))).position(100) == NO_POSITION


def test_each_flipped_bit_of_the_file_is_found() -> None:
    raw = encode(EpochHistory(((1, 0), (7, 100))))
    for bit in range(8 * len(raw)):
        spoilt = bytearray(raw)
        spoilt[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DataLoss):
            decode(bytes(spoilt))
    with pytest.raises(DataLoss):
        decode(raw[: -CRC.size])


def test_missing_file_is_an_empty_history() -> None:
    assert decode(b"") == EpochHistory()


def test_long_histories_are_compared_in_few_steps() -> None:
    count, reads = 2_000, 0

    class CountedStarts(tuple[tuple[int, int], ...]):
        """The starts of a history; counts how many of them are read."""

        def __getitem__(self, index: Any) -> Any:
            nonlocal reads
            reads += 1
            return super().__getitem__(index)

        def __iter__(self) -> Iterator[tuple[int, int]]:
            nonlocal reads
            reads += len(self)
            return super().__iter__()

    starts = [(epoch, 100 * (epoch - 1)) for epoch in range(1, count + 1)]
    one = EpochHistory(CountedStarts(starts))
    other = EpochHistory(CountedStarts([*starts[:-1], (count + 1, starts[-1][1])]))
    assert common_point(one, 100 * count, other, 100 * count) == starts[-1][1]
    assert reads < 40 * count, "each start must be found by its order"
