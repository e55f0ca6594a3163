"""Goal: a leader gives way only to who has everything, is up, and says that it can go on.

Method: the real keeper and its books; in place of etcd a set that stands as it is.
"""

from __future__ import annotations

from typing import cast

from batonmq._common.clock import Clock
from batonmq_server.runtime.election import Election
from batonmq_server.runtime.replication.in_sync_set import InSyncSet, ReplicaPolicy, Won
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord, ReplicaSetStore

POLICY = ReplicaPolicy(min_in_sync=1, lag_ms_max=60_000, hold_ms=100)


class SetTwin:
    """A set of four that does not change."""

    members = frozenset("abcd")


def keeper(up: str) -> InSyncSet:
    """Of leader a, with b and c in sync."""
    standing = ReplicaSetRecord(7, "a", frozenset("abc"), served_epoch=6, mod_revision=1)
    won = Won(cast(Election, None), cast(ReplicaSetStore, SetTwin()), standing)
    return InSyncSet(won, 5, POLICY, Clock(), lambda: frozenset(up))


async def test_who_was_not_heard_of_is_no_successor() -> None:
    found = keeper(up="abcd")
    assert found.successors() == set()
    found.told("b", "")
    assert found.successors() == {"b"}


async def test_who_says_that_it_can_not_follow_is_no_successor_until_it_says_that_it_can() -> None:
    found = keeper(up="abcd")
    found.told("b", "DISK_FULL: nothing is free")
    found.told("c", "")
    assert found.successors() == {"c"}
    found.told("b", "")
    assert found.successors() == {"b", "c"}


async def test_who_is_out_of_sync_or_away_is_no_successor() -> None:
    found = keeper(up="abd")
    for name in "abcd":
        found.told(name, "")
    assert found.successors() == {"b"}
