"""Goal: a leader resigns only in favour of a follower that could lead.

Such a follower is in sync, registered, and reports no problem.
Method: the real in-sync set and its tracker; in place of etcd a record that does not change.
"""

from __future__ import annotations

from typing import cast

from batonmq._common.clock import Clock
from batonmq_server.runtime.replication.in_sync_set import InSyncSet, ReplicaPolicy
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord, ReplicaSetStore

POLICY = ReplicaPolicy(min_in_sync=1, lag_ms_max=60_000, hold_ms=100)


class StoreTwin:
    """The record of a set of four nodes, which does not change."""

    node_ids = frozenset("abcd")


def in_sync_set(registered: str) -> InSyncSet:
    """Leader a, with b and c in sync."""
    store = cast(ReplicaSetStore, StoreTwin())
    record = ReplicaSetRecord(7, "a", frozenset("abc"), served_epoch=6, mod_revision=1)
    return InSyncSet(store, record, 5, POLICY, Clock(), lambda: frozenset(registered))


async def test_replica_that_never_reported_is_not_a_successor() -> None:
    replicas = in_sync_set(registered="abcd")
    assert replicas.successors() == set()
    replicas.set_problem("b", "")
    assert replicas.successors() == {"b"}


async def test_replica_that_reports_a_problem_is_not_a_successor_until_it_recovers() -> None:
    replicas = in_sync_set(registered="abcd")
    replicas.set_problem("b", "DISK_FULL: nothing is free")
    replicas.set_problem("c", "")
    assert replicas.successors() == {"c"}
    replicas.set_problem("b", "")
    assert replicas.successors() == {"b", "c"}


async def test_replica_out_of_sync_or_not_registered_is_not_a_successor() -> None:
    replicas = in_sync_set(registered="abd")
    for name in "abcd":
        replicas.set_problem(name, "")
    assert replicas.successors() == {"b"}
