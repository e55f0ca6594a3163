"""Goal: a snapshot has what its cluster had, and a restore brings back all of it, once.

Method: `backups` plays a cluster that is backed up while it works, and an empty cluster to which a
snapshot is restored, with faults drawn from a seed; in some runs the first cluster is a replica
set. Each mutant leaves one rule out; one of its runs must break a promise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.simulation import broken_backups as broken
from tests.simulation.backups import play_backups
from tests.simulation.mutant_search import assert_found
from tests.simulation.seeds import SEEDS, each_bunch
from tests.support.run_counts import note_runs

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

BUNCH = 5
JUDGED_FROM = 20
BACKUP_SEEDS = SEEDS[: max(1, len(SEEDS) // 40)]
MUTANT_SEEDS = 40
LEAST = {
    "snapshots": 120, "snapshots after a kill": 40, "writer kills": 80,
    "sent during a snapshot": 2_000, "store failures": 100, "broker kills": 40,
    "broker restarts": 40, "changed queues": 100, "deleted topics": 50,
    "removed by retention": 100, "transactions": 1_000, "cancelled": 300, "restores": 90,
    "restores after a kill": 25, "restorer kills": 50, "compared": 8_000,
    "storage kills during a restore": 200, "restored as scheduled": 1_500,
    "handled before": 8_000, "left to handle": 3_000, "acknowledged above": 100,
    "runs to the end": 90,
}  # fmt: skip
"""Minimum number of events of each kind in 100 runs, judged over a whole session."""
LEAST_REPLICATED = {
    "takeovers": 50, "snapshots": 110, "snapshots after a kill": 40, "writer kills": 80,
    "sent during a snapshot": 1_500, "restores": 90, "restores after a kill": 25,
    "restorer kills": 40, "compared": 8_000, "left to handle": 3_000, "runs to the end": 90,
}  # fmt: skip


@each_bunch(BACKUP_SEEDS, BUNCH)
def test_restored_snapshot_has_what_its_cluster_had(
    request: pytest.FixtureRequest, seeds: range
) -> None:
    _play_all(request, seeds, "backups", LEAST, replicated=False)


@each_bunch(BACKUP_SEEDS, BUNCH)
def test_snapshot_is_complete_while_followers_take_over(
    request: pytest.FixtureRequest, seeds: range
) -> None:
    _play_all(request, seeds, "backups of a set", LEAST_REPLICATED, replicated=True)


def test_same_seed_is_the_same_run() -> None:
    first, second = (play_backups("backups/1") for _ in range(2))
    assert (first.counts, first.handled) == (second.counts, second.handled)


def _play_all(
    request: pytest.FixtureRequest,
    seeds: range,
    kind: str,
    least: dict[str, int],
    *,
    replicated: bool,
) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = play_backups(f"backups/{seed}", replicated=replicated)
        assert not run.violations, f"seed {run.seed}: {run.violations[:5]}"
        counts += run.counts
    note_runs(request, kind, len(seeds), counts, least, JUDGED_FROM)


MUTANTS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], bool, set[str]], ...] = (
    (broken.progress_is_read_last, False, {"beyond", "lost", "handled"}),
    (broken.scheduled_messages_are_read_last, False, {"lost", "handled"}),
    (broken.delivered_messages_stay_scheduled, False, {"once"}),
    (broken.manifest_is_written_first, False, {"exists", "verify"}),
    (broken.restored_batches_have_random_ids, False, {"continue"}),
    (broken.deliveries_are_of_another_snapshot, False, {"continue"}),
    (broken.removed_queues_lose_scheduled_messages, False, {"scheduled", "lost", "handled"}),
    (broken.deleted_topics_keep_scheduled_messages, False, {"deleted", "once"}),
    (broken.single_acknowledgements_are_lost, False, {"repeated"}),
    (broken.offsets_are_not_translated, False, {"repeated", "delivered"}),
    (broken.changed_batches_are_not_found, False, {"damage"}),
)
"""Each mutant, whether its runs have replicas, and the rules that it may break."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("break_it", "replicated", "rules"), MUTANTS, ids=[one[0].__name__ for one in MUTANTS]
)
def test_mutant_of_backups_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None],
    replicated: bool,
    rules: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    name = break_it.__name__
    runs = (
        play_backups(f"{name}/{number}", replicated=replicated) for number in range(MUTANT_SEEDS)
    )
    assert_found(rules, runs)
