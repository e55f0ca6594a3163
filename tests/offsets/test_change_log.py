"""The change log: the epoch of each change, the changes after a position, diverged histories.

Goal: a follower continues only from a position of the leader's own history, and gets every change
after it once and in order; otherwise it must read everything.
Method: assertions on the change log alone; hypothesis builds histories of several leaders.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.errors import DataLoss
from batonmq_server.offsets.core.change_log import (
    HISTORY,
    POSITION,
    ChangeLog,
    StoreChange,
    decode_change_log,
)
from batonmq_server.runtime.replication.position import NO_POSITION, ReplicaPosition

BIG = 1 << 30


def write(log: ChangeLog, epoch: int, count: int = 1, size: int = 1) -> None:
    for _ in range(count):
        at, log_entries = log.next(epoch)
        entries = [(b"key", b"x" * size), *log_entries]
        log.append(StoreChange(at, entries))


def positions(changes: list[StoreChange] | None) -> list[tuple[int, int]]:
    assert changes is not None
    return [(change.position.epoch, change.position.version) for change in changes]


def test_empty_node_gets_no_changes_and_must_read_everything() -> None:
    log = ChangeLog((), 0)
    assert log.position == NO_POSITION
    assert log.since(NO_POSITION, BIG) == []
    write(log, 3, 2)
    assert log.since(NO_POSITION, BIG) is None, "a node with only the first change is no replica"


def test_versions_have_no_gaps_across_epochs() -> None:
    log = ChangeLog((), 0)
    write(log, 1, 2)
    write(log, 4, 2)
    assert positions(log.since(ReplicaPosition(1, 1), BIG)) == [(1, 2), (4, 3), (4, 4)]


def test_change_that_is_not_the_next_one_is_rejected() -> None:
    log = ChangeLog((), 0)
    write(log, 2)
    for at in (ReplicaPosition(2, 3), ReplicaPosition(2, 1), ReplicaPosition(1, 2)):
        with pytest.raises(DataLoss):
            log.append(StoreChange(at, ()))
    assert log.position == ReplicaPosition(2, 1)


def test_node_with_a_diverged_history_must_read_everything() -> None:
    log = ChangeLog((), 0)
    write(log, 1, 3)
    write(log, 2, 2)
    assert log.contains(ReplicaPosition(1, 3))
    assert not log.contains(ReplicaPosition(1, 4)), "the old leader wrote it after epoch 2 began"
    assert not log.contains(ReplicaPosition(2, 6)), "no node has had this position"
    assert log.since(ReplicaPosition(1, 4), BIG) is None


def test_dropped_changes_are_not_sent() -> None:
    log = ChangeLog((), 0, kept_bytes_max=1_000)
    write(log, 1, 20, size=100)
    assert log.since(ReplicaPosition(1, 2), BIG) is None
    remaining = positions(log.since(ReplicaPosition(1, 17), BIG))
    assert remaining == [(1, 18), (1, 19), (1, 20)]
    assert log.since(log.position, BIG) == []


def test_answer_is_bounded_in_size_but_has_at_least_one_change() -> None:
    log = ChangeLog((), 0)
    write(log, 1, 5, size=1_000)
    assert positions(log.since(ReplicaPosition(1, 1), 10)) == [(1, 2)]
    assert positions(log.since(ReplicaPosition(1, 1), 2_500)) == [(1, 2), (1, 3)]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=6))
def test_log_is_restored_from_its_stored_form(steps: list[tuple[int, int]]) -> None:
    stored: dict[bytes, bytes] = {}
    log, epoch = ChangeLog((), 0), 0
    for rise, count in steps:
        epoch += rise
        for _ in range(count):
            at, entries = log.next(epoch)
            stored.update(entries)
            log.append(StoreChange(at, ()))
    again = decode_change_log(stored)
    assert again.position == log.position
    for version in range(log.position.version + 2):
        for writer in range(epoch + 2):
            assert again.contains(ReplicaPosition(writer, version)) == log.contains(
                ReplicaPosition(writer, version)
            )


@pytest.mark.parametrize(
    "stored",
    [
        {POSITION: b"x"},
        {POSITION: b"3"},
        {HISTORY: b"1:1"},
        {POSITION: b"3", HISTORY: b"2:1 1:3"},
        {POSITION: b"3", HISTORY: b"1:1 2:1"},
        {POSITION: b"3", HISTORY: b"1:4"},
        {POSITION: b"3", HISTORY: b"1"},
    ],
)
def test_contradicting_position_and_history_are_data_loss(stored: dict[bytes, bytes]) -> None:
    with pytest.raises(DataLoss):
        decode_change_log(stored)
