"""Goal: a named schedule is determined by its seed and covers all of its class.

Method: the faults of each schedule for the processes of its cluster.
"""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from batonmq_server.local.layout import ClusterOptions
from tools.faults.fault_schedule import (
    BYTES,
    ETCD,
    EVERYTHING,
    MEMBER,
    RUNNING_FLIP,
    Fault,
    FaultGroup,
    is_cut,
)
from tools.faults.file_damage import KINDS
from tools.faults.named_schedules import SCHEDULES, sets_of_three
from tools.faults.network import HUB

OPTIONS = sets_of_three(ClusterOptions(settings={"storage": {"segment_bytes": 1}}))
NAMES = (ETCD, "etcd-1", "etcd-2", *OPTIONS.names)


def drawn(name: str, seed: int = 1) -> list[FaultGroup]:
    return list(SCHEDULES[name].groups(Random(seed), NAMES))


def faults(name: str) -> list[Fault]:
    return [fault for group in drawn(name) for fault in group.faults]


@pytest.mark.parametrize("name", SCHEDULES)
def test_seed_determines_a_named_schedule(name: str) -> None:
    assert drawn(name) == drawn(name)
    assert drawn(name) != drawn(name, 2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_that_cuts_the_network_says_so(name: str) -> None:
    assert SCHEDULES[name].cuts or not any(map(is_cut, faults(name)))


def test_set_of_three_needs_two_in_sync_and_keeps_other_settings() -> None:
    for service in ("storage", "offsets"):
        assert len(OPTIONS.names_of(service)) == 3
    assert OPTIONS.settings["storage"] == {"min_in_sync": 2, "segment_bytes": 1}


def test_every_ordered_pair_of_processes_is_cut_once() -> None:
    cut = [(fault.part, fault.target) for fault in faults("one-way-cuts")]
    assert len(cut) == len(set(cut))
    between_clients = {(HUB, MEMBER), (MEMBER, HUB)}
    assert set(cut) == {*permutations([*NAMES, HUB, MEMBER], 2)} - between_clients


def test_leader_is_cut_off_before_it_dies() -> None:
    assert {fault.part for fault in faults("two-steps")} == {"storage broker-0", "offsets"}
    assert all(fault.rank == 0 and fault.hold_ms for fault in faults("two-steps"))


def test_starvation_pauses_all_leaders_at_once_for_less_than_a_lease() -> None:
    schedule = SCHEDULES["starvation"]
    assert schedule.busy
    assert not schedule.elects
    for group in drawn("starvation"):
        assert {one.part.split()[0] for one in group.faults} == {"storage", "offsets", "lockmgr"}
        assert {(one.kind, one.rank, one.hold_ms) for one in group.faults} == {("pause", 0, 2_000)}


def test_busy_leaves_services_alone() -> None:
    assert SCHEDULES["busy"].busy
    assert not SCHEDULES["busy"].elects
    assert {(fault.kind, fault.part) for fault in faults("busy")} == {("pause", MEMBER)}


def test_power_is_cut_for_everything_and_for_each_set() -> None:
    parts = [fault.part for fault in faults("power-cuts")]
    assert parts[::2] == [EVERYTHING] * (len(parts) // 2)
    assert {*parts[1::2]} == {ETCD, "storage broker-0", "offsets"}


def test_a_bit_of_every_kind_of_file_is_flipped_while_its_process_is_down_and_while_it_runs() -> (
    None
):
    kinds = [(part, kind) for part in KINDS for kind in KINDS[part]]
    cases = {(how, *one) for how in (BYTES[1], RUNNING_FLIP) for one in kinds}
    first = faults("flipped-bits")[: len(cases)]
    assert {(one.kind, one.part.split()[0], one.target) for one in first} == cases
