"""Schedules by name, each for one class of faults; the same seed gives the same faults.

`drawn` draws from all classes of `FaultSchedule` instead, and `selection` has every kind once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from random import Random

from batonmq_server.local.layout import ClusterOptions, highly_available
from tools.faults.fault_schedule import (
    BYTES,
    ETCD,
    EVERYTHING,
    MEMBER,
    ONE_WAY,
    POWER,
    RUNNING_FLIP,
    TWO_STEPS,
    Fault,
    FaultGroup,
)
from tools.faults.file_damage import KINDS
from tools.faults.network import HUB

_AWAY_MS = 8_000
"""A node with a damaged file, and a leader that died, stay down at least this long."""
STARVED_MS = 2_000
BUSY = 60
"""The load that `busy` and `starvation` add."""
_ROUNDS = 50
"""More than fit into a run; the duration of a run ends a schedule."""


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """A schedule and the cluster that it needs.

    Attributes:
        groups: Returns the faults, given the random numbers and the names of all processes.
        layout: Returns the options of the cluster.
        cuts: Whether the network must be cut.
        busy: Processes that compete with the cluster for the processors during the faults.
        elects: Whether faults may replace leaders; otherwise an election makes the run invalid.
        power: Whether the disks must be images; these are mounted in the private network's
            namespace.
    """

    groups: Callable[[Random, Sequence[str]], Sequence[FaultGroup]]
    layout: Callable[[ClusterOptions], ClusterOptions]
    cuts: bool = False
    power: bool = False
    busy: int = 0
    elects: bool = True


def sets_of_three(options: ClusterOptions) -> ClusterOptions:
    """Return options with three nodes of each replica set, two of which must be in sync."""
    storage = {"min_in_sync": 2, **options.settings.get("storage", {})}
    settings = {**options.settings, "storage": storage}
    return replace(highly_available(options), brokers=1, storage_replicas=3, settings=settings)


def _one_way_cuts(random: Random, names: Sequence[str]) -> list[FaultGroup]:
    """Every ordered pair of processes once, clients included; in random order."""
    clients = {HUB, MEMBER}
    pairs = [
        pair for pair in permutations([*names, *sorted(clients)], 2) if not clients.issuperset(pair)
    ]
    random.shuffle(pairs)
    return [
        FaultGroup(
            (Fault(ONE_WAY, sender, 0, random.randrange(6_000, 9_000), target=receiver),), 500
        )
        for sender, receiver in pairs
    ]


def _two_steps(random: Random, names: Sequence[str]) -> list[FaultGroup]:
    """The leaders of storage and of offsets, in turn."""
    return [
        FaultGroup(
            (Fault(TWO_STEPS, part, 0, random.randrange(500, 12_000), random.randrange(_AWAY_MS)),),
            random.randrange(500, 3_000),
        )
        for _ in range(_ROUNDS)
        for part in ("storage broker-0", "offsets")
    ]


def _power_cuts(random: Random, names: Sequence[str]) -> list[FaultGroup]:
    """Everything every second time; else all nodes of one set."""
    found = []
    for number in range(_ROUNDS):
        part = random.choice(("storage broker-0", "offsets", ETCD)) if number % 2 else EVERYTHING
        found.append(
            FaultGroup(
                (Fault(POWER, part, 0, random.randrange(3_000)),), random.randrange(1_000, 12_000)
            )
        )
    return found


def _flipped_bits(random: Random, names: Sequence[str]) -> list[FaultGroup]:
    """Every kind of file once while its process is down and once while it runs, in random order."""
    cases = [
        (kind, part, file)
        for kind in (BYTES[1], RUNNING_FLIP)
        for part in ("storage broker-0", "offsets")
        for file in KINDS[part.split()[0]]
    ]
    found = []
    for _ in range(_ROUNDS):
        random.shuffle(cases)
        found += [
            FaultGroup(
                (
                    Fault(
                        kind, part, random.choice((0, 1)), _AWAY_MS, random.randrange(1 << 30), file
                    ),
                ),
                random.randrange(500, 3_000),
            )
            for kind, part, file in cases
        ]
    return found


def _starvation(random: Random, names: Sequence[str]) -> list[FaultGroup]:
    """The leaders of all services get no CPU for 2 s, at once; then they renew their leases."""
    parts = ("storage broker-0", "storage broker-1", "offsets", "lockmgr")
    pauses = tuple(Fault("pause", part, 0, STARVED_MS) for part in parts)
    return [FaultGroup(pauses, random.randrange(2_500, 4_000)) for _ in range(_ROUNDS * 20)]


def _busy(random: Random, names: Sequence[str]) -> list[FaultGroup]:
    """Only consumers are paused, shortly; services get too little CPU because of the load."""
    return [
        FaultGroup(
            (Fault("pause", MEMBER, random.randrange(3), random.randrange(500, 3_000)),),
            random.randrange(5_000, 15_000),
        )
        for _ in range(_ROUNDS * 20)
    ]


SCHEDULES = {
    "one-way-cuts": NamedSchedule(_one_way_cuts, sets_of_three, cuts=True),
    "two-steps": NamedSchedule(_two_steps, sets_of_three, cuts=True),
    "power-cuts": NamedSchedule(_power_cuts, sets_of_three, cuts=True, power=True),
    "flipped-bits": NamedSchedule(_flipped_bits, sets_of_three),
    "busy": NamedSchedule(_busy, highly_available, busy=BUSY, elects=False),
    "starvation": NamedSchedule(_starvation, highly_available, busy=BUSY, elects=False),
}
