"""Goal: leaders are spread evenly over hosts with as few moves as that takes.

Method: the plan without a cluster, by hand and for sets drawn from a seed.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random

import pytest

from batonmq.admin._leader_plan import LedSet, plan_moves


def led(name: str, leader: str, *others: str) -> LedSet:
    """Return a set with one node on each of these hosts; a node is named after its host."""
    return LedSet("storage", name, leader, {host: host for host in (leader, *others)})


def counts_after(sets: list[LedSet]) -> Counter[str]:
    moved = {move.replica_set: move.to_host for move in plan_moves(sets)}
    counts = Counter({host: 0 for one in sets for host in one.hosts.values()})
    counts.update(moved.get(one.replica_set, one.hosts[one.leader]) for one in sets)
    return counts


def test_leaders_of_one_host_are_spread() -> None:
    sets = [led("a", "x", "y", "z"), led("b", "x", "y"), led("c", "x", "z")]
    assert counts_after(sets) == {"x": 1, "y": 1, "z": 1}
    assert len(plan_moves(sets)) == 2


def test_even_leaders_stay() -> None:
    assert plan_moves([led("a", "x", "y"), led("b", "y", "x"), led("c", "x", "y")]) == []
    assert plan_moves([led("a", "x"), led("b", "x")]) == []
    assert plan_moves([]) == []


def test_move_that_needs_room_moves_another_set_first() -> None:
    sets = [led("a", "x", "y"), led("b", "x", "y"), led("c", "y", "z")]
    moves = {(move.replica_set, move.from_host, move.to_host) for move in plan_moves(sets)}
    assert moves == {("a", "x", "y"), ("c", "y", "z")}


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_of_leaders_is_more_even(seed: int) -> None:
    random = Random(seed)
    sets = []
    for number in range(random.randint(1, 6)):
        hosts = random.sample("wxyz", random.randint(1, 3))
        sets.append(led(str(number), *hosts))
    names = {host for one in sets for host in one.hosts.values()}

    def unevenness(counts: Counter[str]) -> int:
        return sum(counts[host] ** 2 for host in names)

    best = min(unevenness(Counter(each)) for each in product(*(one.hosts.values() for one in sets)))
    assert unevenness(counts_after(sets)) == best
