"""Goal: the director draws the same from a seed, everything in time, and never too much.

Method: many faults of some seeds.
"""

from __future__ import annotations

from random import Random

from tests.faults.director import ETCD, MEMBER, Director, Fault

SETS = ("storage broker-0", "storage broker-1", "offsets", "lockmgr", "nameserver")


def drawn(seed: int, count: int = 300) -> list[Fault]:
    director = Director(Random(seed), SETS)
    return [director.draw() for _ in range(count)]


def test_a_seed_draws_the_same_again_and_another_one_something_else() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_every_kind_of_fault_is_drawn_at_every_part() -> None:
    struck = {(one.kind, one.part) for fault in drawn(1) for one in fault.strikes}
    assert struck >= {
        (kind, part) for kind in ("kill", "pause", "restart") for part in (*SETS, ETCD)
    }
    assert struck >= {("kill", MEMBER), ("pause", MEMBER)}


def test_leaders_are_struck_most() -> None:
    ranks = [one.rank for fault in drawn(2) for one in fault.strikes if one.part in SETS]
    assert ranks.count(0) > len(ranks) / 2
    assert {1, 2} <= set(ranks)


def test_no_set_loses_two_at_once_but_etcd_its_majority_for_seconds() -> None:
    quorum_lost = 0
    for fault in drawn(3):
        parts = [one.part for one in fault.strikes]
        if parts == [ETCD, ETCD]:
            quorum_lost += 1
            assert len({one.rank for one in fault.strikes}) == 2
            assert all(one.kind == "pause" and one.hold_ms < 10_000 for one in fault.strikes)
        else:
            assert len(parts) == len(set(parts))
    assert quorum_lost


def test_several_are_struck_at_once() -> None:
    assert {len(fault.strikes) for fault in drawn(4)} == {1, 2, 3}
