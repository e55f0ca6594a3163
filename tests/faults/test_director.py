"""Goal: the director draws the same from a seed, everything in time, and never too much.

Method: many faults of some seeds.
"""

from __future__ import annotations

from itertools import product
from random import Random

from tools.faults.director import (
    BYTES,
    CLOCK,
    CUTS,
    CUTS_OF_MEMBER,
    DISK,
    ETCD,
    MEMBER,
    NETWORK,
    OF_MEMBER,
    PROCESS,
    SPLITS,
    Director,
    Fault,
    is_cut,
)
from tools.faults.selection import selection

SETS = ("storage broker-0", "storage broker-1", "offsets", "lockmgr", "nameserver")


def drawn(seed: int, count: int = 600, *, cuts: bool = True) -> list[Fault]:
    director = Director(Random(seed), SETS, cuts=cuts)
    return [director.draw() for _ in range(count)]


def test_a_seed_draws_the_same_again_and_another_one_something_else() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


WITH_DISK = [part for part in SETS if part.split()[0] in ("storage", "offsets")]
EVERYWHERE = {
    *product((*PROCESS, *CUTS, *CLOCK), SETS),
    *product((*DISK, *BYTES), WITH_DISK),
    *product((*OF_MEMBER, *CUTS_OF_MEMBER), [MEMBER]),
    *product(SPLITS, [NETWORK]),
    *product(PROCESS, [ETCD]),
}


def test_every_kind_of_fault_is_drawn_at_every_part() -> None:
    struck = {(one.kind, one.part) for fault in drawn(1, 3_000) for one in fault.strikes}
    assert struck >= EVERYWHERE


def test_every_kind_is_in_the_selection() -> None:
    struck = {one.kind for fault in selection(cuts=True) for one in fault.strikes}
    assert struck == {kind for kind, _ in EVERYWHERE}


def test_without_a_network_of_its_own_nothing_is_cut() -> None:
    faults = [*drawn(1, cuts=False), *selection(cuts=False)]
    assert all(fault.strikes for fault in faults)
    assert not any(is_cut(one) for fault in faults for one in fault.strikes)


def test_damaged_bytes_come_back_when_another_node_leads() -> None:
    held = [one.hold_ms for fault in drawn(5) for one in fault.strikes if one.kind in BYTES]
    assert min(held) >= 8_000


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
