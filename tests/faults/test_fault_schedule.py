"""Goal: the schedule is determined by its seed, draws every kind of fault, and never too much.

Method: many draws of some seeds.
"""

from __future__ import annotations

from itertools import product
from random import Random

from tools.faults.fault_schedule import (
    BYTES,
    CLOCK,
    CUTS,
    CUTS_OF_MEMBER,
    DISK,
    ETCD,
    GATEWAY,
    MEMBER,
    NETWORK,
    OF_MEMBER,
    PROCESS,
    SPLITS,
    FaultGroup,
    FaultSchedule,
    is_cut,
)
from tools.faults.selection import selection

SETS = ("storage broker-0", "storage broker-1", "offsets", "lockmgr", "nameserver")


def drawn(seed: int, count: int = 600, *, cuts: bool = True) -> list[FaultGroup]:
    schedule = FaultSchedule(Random(seed), SETS, cuts=cuts, gateways=True)
    return [schedule.draw() for _ in range(count)]


def test_seed_determines_the_faults() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


WITH_DISK = [part for part in SETS if part.split()[0] in ("storage", "offsets")]
EVERYWHERE = {
    *product((*PROCESS, *CUTS, *CLOCK), SETS),
    *product((*DISK, *BYTES), WITH_DISK),
    *product((*OF_MEMBER, *CUTS_OF_MEMBER), [MEMBER]),
    *product(SPLITS, [NETWORK]),
    *product(PROCESS, [ETCD, GATEWAY]),
}


def test_every_kind_of_fault_is_drawn_for_every_part() -> None:
    seen = {(one.kind, one.part) for group in drawn(1, 3_000) for one in group.faults}
    assert seen >= EVERYWHERE


def test_every_kind_is_in_the_selection() -> None:
    seen = {one.kind for group in selection(cuts=True) for one in group.faults}
    assert seen == {kind for kind, _ in EVERYWHERE}


def test_no_cut_is_drawn_without_a_private_network() -> None:
    groups = [*drawn(1, cuts=False), *selection(cuts=False)]
    assert all(group.faults for group in groups)
    assert not any(is_cut(one) for group in groups for one in group.faults)


def test_node_with_damaged_files_returns_after_another_node_leads() -> None:
    held = [one.hold_ms for group in drawn(5) for one in group.faults if one.kind in BYTES]
    assert min(held) >= 8_000


def test_leaders_get_most_faults() -> None:
    ranks = [one.rank for group in drawn(2) for one in group.faults if one.part in SETS]
    assert ranks.count(0) > len(ranks) / 2
    assert {1, 2} <= set(ranks)


def test_no_set_has_two_faults_at_once_except_a_short_loss_of_the_etcd_quorum() -> None:
    quorum_lost = 0
    for group in drawn(3):
        parts = [one.part for one in group.faults]
        if parts == [ETCD, ETCD]:
            quorum_lost += 1
            assert len({one.rank for one in group.faults}) == 2
            assert all(one.kind == "pause" and one.hold_ms < 10_000 for one in group.faults)
        else:
            assert len(parts) == len(set(parts))
    assert quorum_lost


def test_several_parts_can_have_faults_at_once() -> None:
    assert {len(group.faults) for group in drawn(4)} == {1, 2, 3}
