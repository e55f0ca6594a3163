"""How far the in-sync set of a leader shrinks, and when the leader is cut off.

Goal: the set never shrinks below `min_in_sync`, so a node that holds everything acknowledged can be
elected whichever other node is lost; a leader that a majority can't reach removes no follower.
Method: the real set and its real tracker; in place of etcd a record that takes every change, and a
clock that the test moves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from batonmq.errors import NotEnoughReplicas
from batonmq_server.runtime.replication.in_sync_set import (
    FIRST_CONTACT_MS,
    InSyncSet,
    ReplicaPolicy,
)
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord, ReplicaSetStore
from tests.support.clock import MovableClock

LAG_MS = 3_000


class StillClock(MovableClock):
    """A clock that only the test moves."""

    def monotonic_ms(self) -> int:
        return 1_000_000 + self.ahead_ms


class StoreTwin:
    """Takes every change."""

    def __init__(self, node_ids: str) -> None:
        self.node_ids, self.sizes = frozenset(node_ids), [len(node_ids)]

    async def change(self, before: ReplicaSetRecord, record: ReplicaSetRecord) -> ReplicaSetRecord:
        self.sizes.append(len(record.in_sync))
        return replace(record, mod_revision=before.mod_revision + 1)


class Scene:
    """Leader a of a set whose members are all in sync and up."""

    def __init__(self, node_ids: str, min_in_sync: int) -> None:
        self.store, self.clock = StoreTwin(node_ids), StillClock()
        self.registered = frozenset(node_ids)
        policy = ReplicaPolicy(min_in_sync=min_in_sync, lag_ms_max=LAG_MS, hold_ms=100)
        record = ReplicaSetRecord(7, "a", frozenset(node_ids), served_epoch=6, mod_revision=1)
        self.in_sync_set = InSyncSet(
            cast(ReplicaSetStore, self.store),
            record,
            5,
            policy,
            self.clock,
            lambda: self.registered,
        )
        self.tracker = self.in_sync_set.tracker
        self.report(node_ids.replace("a", ""))

    def report(self, names: str, position: int | None = None) -> None:
        """Let followers report a position; by default that of the leader."""
        for name in names:
            self.in_sync_set.set_problem(name, "")
            at = self.tracker.position if position is None else position
            self.tracker.acknowledge(name, at, self.clock.monotonic_ms())

    async def later(self, ms: int, reporting: str = "") -> frozenset[str]:
        """Let time pass in which some followers report; return the in-sync set afterwards."""
        for _ in range(0, ms, 500):
            self.clock.ahead_ms += 500
            self.report(reporting)
            await self.in_sync_set._update()
        return self.tracker.in_sync

    def die(self, names: str) -> None:
        """Let the node entries of followers expire."""
        self.registered -= frozenset(names)


@pytest.mark.parametrize(
    ("node_ids", "min_in_sync", "dead", "remaining"),
    [
        ("abc", 1, "c", "ab"),
        ("abc", 1, "bc", "a"),
        ("abc", 2, "c", "ab"),
        ("abc", 2, "bc", "abc"),
        ("abcde", 3, "de", "abc"),
        ("abcde", 3, "cde", "abcde"),
        ("abcde", 3, "bcde", "abcde"),
        ("ab", 2, "b", "ab"),
        ("ab", 1, "b", "a"),
    ],
)
async def test_late_members_leave_only_if_min_in_sync_members_remain(
    node_ids: str, min_in_sync: int, dead: str, remaining: str
) -> None:
    scene = Scene(node_ids, min_in_sync)
    scene.die(dead)
    living = node_ids.strip("a" + dead)
    assert await scene.later(LAG_MS + 1_000, reporting=living) == frozenset(remaining)


@pytest.mark.parametrize(("node_ids", "min_in_sync"), [("abc", 2), ("abcde", 3)])
async def test_set_whose_members_die_one_by_one_keeps_min_in_sync_members(
    node_ids: str, min_in_sync: int
) -> None:
    scene = Scene(node_ids, min_in_sync)
    for number in range(1, len(node_ids)):
        scene.die(node_ids[-number])
        await scene.later(LAG_MS + 1_000, reporting=node_ids[1:-number])
    assert min(scene.store.sizes) == min_in_sync


async def test_nothing_is_confirmed_without_a_member_that_stays_although_it_is_late() -> None:
    scene = Scene("abc", min_in_sync=2)
    scene.die("bc")
    await scene.later(LAG_MS + 1_000)
    scene.tracker.advance_leader(9)
    assert (scene.tracker.confirmed, scene.in_sync_set.safe) == (5, 5)
    scene.registered |= {"b"}
    await scene.later(500, reporting="b")
    assert scene.tracker.in_sync == {"a", "b"}, "with b the set is large enough without c"
    assert (scene.tracker.confirmed, scene.in_sync_set.safe) == (9, 9)


async def test_member_that_stays_although_it_is_late_does_not_count_for_writes() -> None:
    scene = Scene("abc", min_in_sync=2)
    scene.die("bc")
    await scene.later(LAG_MS + 1_000)
    assert scene.in_sync_set.current == {"a"}
    with pytest.raises(NotEnoughReplicas) as raised:
        scene.in_sync_set.check_size()
    assert raised.value.facts == {"in_sync": "1", "limit": "2"}
    assert [one.node_id for one in scene.in_sync_set.replicas() if one.in_sync] == ["a"]
    scene.registered |= {"b"}
    await scene.later(500, reporting="b")
    scene.in_sync_set.check_size()


async def test_member_outside_replaces_a_late_one_in_one_change() -> None:
    scene = Scene("abc", min_in_sync=2)
    scene.die("c")
    assert await scene.later(LAG_MS + 1_000, reporting="b") == {"a", "b"}
    scene.die("b")
    scene.registered |= {"c"}
    assert await scene.later(2 * LAG_MS, reporting="c") == {"a", "c"}
    assert min(scene.store.sizes) == 2


# ---- cut off


async def test_leader_that_a_majority_can_not_reach_is_cut_off_and_removes_none() -> None:
    scene = Scene("abc", min_in_sync=1)
    assert await scene.later(LAG_MS + 1_000) == {"a", "b", "c"}
    assert scene.in_sync_set.cut_off().keys() == {"b", "c"}
    assert min(scene.in_sync_set.cut_off().values()) > LAG_MS


@pytest.mark.parametrize(
    ("node_ids", "reporting", "dead"),
    [("abc", "b", ""), ("abc", "", "c"), ("abc", "", "bc"), ("ab", "", ""), ("abcde", "bc", "")],
)
async def test_leader_that_only_a_minority_can_not_reach_is_not_cut_off(
    node_ids: str, reporting: str, dead: str
) -> None:
    scene = Scene(node_ids, min_in_sync=1)
    scene.die(dead)
    await scene.later(LAG_MS + 1_000, reporting=reporting)
    assert scene.in_sync_set.cut_off() == {}


async def test_follower_that_never_gets_an_answer_is_cut_off_although_its_calls_arrive() -> None:
    scene = Scene("abc", min_in_sync=2)
    scene.tracker.advance_leader(9)
    for _ in range(8):
        scene.report("bc", position=5)
        await scene.later(500)
    assert scene.in_sync_set.cut_off().keys() == {"b", "c"}


async def test_follower_that_makes_progress_or_reports_a_problem_is_not_cut_off() -> None:
    scene = Scene("abc", min_in_sync=2)
    scene.tracker.advance_leader(99)
    for position in range(5, 20):
        scene.report("b", position)
        await scene.later(500)
    assert scene.in_sync_set.current == {"a"}, "both lag"
    assert scene.in_sync_set.cut_off() == {}, "b is reached"
    await scene.later(LAG_MS + 500)
    assert scene.in_sync_set.cut_off().keys() == {"b", "c"}
    scene.in_sync_set.set_problem("c", "DISK_FULL: nothing is free")
    assert scene.in_sync_set.cut_off() == {}


async def test_leader_is_not_cut_off_if_no_follower_could_be_elected() -> None:
    scene = Scene("abc", min_in_sync=1)
    scene.die("bc")
    assert await scene.later(LAG_MS + 1_000) == {"a"}
    scene.registered = frozenset("abc")
    await scene.later(LAG_MS + 1_000)
    assert scene.in_sync_set.cut_off() == {}


async def test_leader_that_resigned_recently_is_not_cut_off_and_the_set_shrinks() -> None:
    scene = Scene("abc", min_in_sync=1)
    scene.in_sync_set.resigns_from_ms = scene.clock.monotonic_ms() + 60_000
    assert await scene.later(LAG_MS + 1_000) == {"a"}


async def test_follower_has_more_time_for_its_first_contact_with_a_new_leader() -> None:
    scene = Scene("abc", min_in_sync=2)
    scene.in_sync_set._problems.clear()  # none has contacted this leader
    await scene.later(FIRST_CONTACT_MS)
    assert scene.in_sync_set.cut_off() == {}
    await scene.later(500)
    assert scene.in_sync_set.cut_off().keys() == {"b", "c"}
