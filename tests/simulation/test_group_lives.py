"""Goal: a group that was deleted and begins again repeats no token and handles every message; a
deleted group leaves nothing behind; the runs find a broken rule.

Method: `group_lives` plays groups that are deleted and begin again while late calls of their last
lives arrive and services are killed. Offsets forgets tombstones after a moment, not after days.
Each mutant leaves one rule out; one of its runs must break a promise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from batonmq._core.queues import GroupQueue
from batonmq_server.lockmgr import lock_remover
from batonmq_server.offsets import persistence, tombstone_expiry
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.values import TokenFloor
from tests.simulation.group_lives import play_lives
from tests.simulation.mutant_search import assert_found
from tests.simulation.seeds import SEEDS, each_bunch
from tests.support.run_counts import note_runs

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

BUNCH = 5
LIVES_SEEDS = SEEDS[: max(1, len(SEEDS) // 20)]
LEAST = {
    "lives": 500, "lives judged": 200, "kills": 300, "grants": 1_000, "offsets kills": 100,
    "late commits": 1_000,
}  # fmt: skip
"""Minimum number of events of each kind in 100 runs, judged over a whole session."""
MUTANT_SEEDS = 12


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstone_expiry, "KEPT_MS", 300)
    monkeypatch.setattr(tombstone_expiry, "INTERVAL_S", 0.5)
    monkeypatch.setattr(lock_remover, "INTERVAL_S", 1.0)


@each_bunch(LIVES_SEEDS, BUNCH)
def test_next_life_of_a_group_is_independent_of_the_last(
    request: pytest.FixtureRequest, seeds: range
) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = play_lives(f"lives/{seed}")
        assert not run.violations, f"seed {run.seed}: {run.violations[:5]}"
        counts += run.counts
    note_runs(request, "lives of groups", len(seeds), counts, LEAST, BUNCH)


def test_same_seed_is_the_same_run() -> None:
    first, second = (play_lives("lives/1") for _ in range(2))
    assert (first.counts, first.granted) == (second.counts, second.granted)


def floor_is_not_raised(patch: pytest.MonkeyPatch) -> None:
    """A tombstone is removed, and nothing remembers its token."""
    forget = ProgressTable.forget

    def broken(self: ProgressTable, keys: Iterable[GroupQueue]) -> list[GroupQueue]:
        before = self.floor
        forgotten = forget(self, keys)
        self.floor = before
        return forgotten

    patch.setattr(ProgressTable, "forget", broken)


def floor_has_no_reset_epoch(patch: pytest.MonkeyPatch) -> None:
    """The next life has the reset epoch of the last one."""

    def broken(self: TokenFloor, other: tuple[int, int]) -> TokenFloor:
        return TokenFloor(max(self.token, other[0]))

    patch.setattr(TokenFloor, "raised", broken)


def floor_is_not_stored(patch: pytest.MonkeyPatch) -> None:
    """The floor is lost when offsets is killed."""
    patch.setattr(persistence, "_floor", lambda _: (0, 0))


MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[int, frozenset[str]]] = {
    floor_is_not_raised: (0, frozenset({"token", "handled", "left"})),
    floor_has_no_reset_epoch: (0, frozenset({"handled"})),
    floor_is_not_stored: (0, frozenset({"token", "handled", "left"})),
}
"""The first run to play, and the rules that are to be broken."""


@pytest.mark.parametrize("break_it", MUTANTS, ids=[one.__name__ for one in MUTANTS])
def test_mutant_of_forgetting_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    name, (first, rules) = break_it.__name__, MUTANTS[break_it]
    runs = (play_lives(f"{name}/{number}") for number in range(first, first + MUTANT_SEEDS))
    assert_found(rules, runs)
