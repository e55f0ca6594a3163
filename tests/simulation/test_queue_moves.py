"""Goal: no message is lost or comes twice while queues move; the runs find a broken rule.

Method: `queue_moves` plays an operator who moves queues to and fro while producers and groups work
and services are killed, with faults drawn from a seed. Each mutant leaves one rule of the
nameserver or of storage out; one of its runs must break a promise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from batonmq_server.nameserver.retirement import RetirementReader
from tests.simulation.mutant_search import assert_found
from tests.simulation.queue_moves import play_moves
from tests.simulation.seeds import SEEDS, each_bunch
from tests.support.run_counts import note_runs

pytestmark = [pytest.mark.sim, pytest.mark.timeout(900)]

BUNCH = 5
MOVES_SEEDS = SEEDS[: max(1, len(SEEDS) // 20)]
LEAST = {
    "moves": 300, "broker kills": 100, "nameserver kills": 20, "kills": 180, "freezes": 50,
    "scheduled": 4_000, "transactions": 2_000, "handled": 50_000,
}  # fmt: skip
"""Minimum number of events of each kind in 100 runs, judged over a whole session."""
MUTANT_SEEDS = 12


@each_bunch(MOVES_SEEDS, BUNCH)
def test_nothing_is_lost_while_queues_move(request: pytest.FixtureRequest, seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = play_moves(f"moves/{seed}")
        assert not run.violations, f"seed {run.seed}: {run.violations[:5]}"
        counts += run.counts
    note_runs(request, "queue moves", len(seeds), counts, LEAST, BUNCH)


def test_same_seed_is_the_same_run() -> None:
    first, second = (play_moves("moves/1") for _ in range(2))
    assert (first.counts, first.handled) == (second.counts, second.handled)


def queues_are_removed_unread(patch: pytest.MonkeyPatch) -> None:
    """Retiring queues are removed although a group has not read them."""

    async def broken(*_: Any, **__: Any) -> list[Any]:
        return []

    patch.setattr(RetirementReader, "_unread", broken)


def brokers_are_not_asked_what_they_hold(patch: pytest.MonkeyPatch) -> None:
    """The last queues on a broker are removed although it has scheduled messages."""

    async def broken(*_: Any) -> list[Any]:
        return []

    patch.setattr(RetirementReader, "_held_by", broken)


MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[int, frozenset[str]]] = {
    queues_are_removed_unread: (0, frozenset({"handled"})),
    brokers_are_not_asked_what_they_hold: (0, frozenset({"handled"})),
}
"""The first run to play, and the rules that are to be broken."""


@pytest.mark.long
@pytest.mark.parametrize("break_it", MUTANTS, ids=[one.__name__ for one in MUTANTS])
def test_mutant_of_moves_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    name, (first, rules) = break_it.__name__, MUTANTS[break_it]
    runs = (play_moves(f"{name}/{number}") for number in range(first, first + MUTANT_SEEDS))
    assert_found(rules, runs)
