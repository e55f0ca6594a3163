"""Goal: two clusters that mirror each other have each message once and in order, and a group
that fails over goes on where it was, whatever fails; the runs find a broken rule.

Method: `mirrors` plays producers, members, an operator and mirrors of both directions, while
mirrors, services and members are killed and frozen, with faults drawn from a seed; in some runs
each cluster has a replica set, whose leader fails. Each mutant leaves one rule out; one of its runs
must break a promise.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from typing import Any

import pytest

from batonmq._core.mirror_map import OffsetMap, OffsetRun
from batonmq._core.mirror_marks import mark_of
from batonmq._core.queues import QueueRef
from batonmq.admin import _group_mirror, _mirrored_clusters
from batonmq.admin._group_mirror import STANDBY_REASON, GroupMirror
from batonmq.admin._queue_mirror import QueueMirror
from batonmq.admin.admin import Admin
from batonmq.errors import GroupNotFound
from batonmq_server.storage.core.producers import ProducerTable
from tests.simulation.mirrors import play_mirrors
from tests.simulation.mutant_search import assert_found
from tests.simulation.seeds import SEEDS, each_bunch
from tests.support.run_counts import note_runs

pytestmark = [pytest.mark.sim, pytest.mark.timeout(900)]

BUNCH = 2
MIRROR_SEEDS = SEEDS[: max(1, len(SEEDS) // 20)]
REPLICATED_SEEDS = SEEDS[: max(1, len(SEEDS) // 40)]
JUDGED_FROM = 40
LEAST = {
    "mirrored": 120_000, "changes of progress": 800, "runs of maps": 8_000, "failed over": 20_000,
    "planned failovers": 25, "sudden failovers": 8, "added queues": 40, "second starts": 60,
    "mirror kills": 250, "mirror freezes": 60, "mirror cuts": 50, "kills in an append": 5,
    "kills with a lag": 30, "batches repeated": 20, "batches rejected": 20,
    "broker kills": 400, "nameserver kills": 100, "offsets kills": 120, "member kills": 100,
    "scheduled": 2_000, "transactions": 1_800,
}  # fmt: skip
"""Minimum number of events of each kind in 100 runs, judged over a whole session."""
LEAST_REPLICATED = {
    "mirrored": 60_000, "changes of progress": 500, "runs of maps": 4_000, "takeovers": 100,
    "planned failovers": 15, "sudden failovers": 5, "mirror kills": 150,
}  # fmt: skip
MUTANT_SEEDS = 12
STEP_S = 3.0
"""Time between the two steps of a mutant, in which some mirrors are killed."""


@each_bunch(MIRROR_SEEDS, BUNCH)
def test_each_message_is_mirrored_once_and_progress_follows(
    request: pytest.FixtureRequest, seeds: range
) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = play_mirrors(f"mirrors/{seed}")
        assert not run.violations, f"seed {run.seed}: {run.violations[:5]}"
        counts += run.counts
    note_runs(request, "mirrors", len(seeds), counts, LEAST, JUDGED_FROM)


@each_bunch(REPLICATED_SEEDS, BUNCH)
def test_promises_of_mirrors_hold_while_followers_take_over(
    request: pytest.FixtureRequest, seeds: range
) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = play_mirrors(f"mirrors/{seed}", replicated=True)
        assert not run.violations, f"seed {run.seed}: {run.violations[:5]}"
        counts += run.counts
    note_runs(request, "mirrors of sets", len(seeds), counts, LEAST_REPLICATED, JUDGED_FROM)


@pytest.mark.long
def test_same_seed_is_the_same_run() -> None:
    first, second = (play_mirrors("mirrors/2") for _ in range(2))
    assert (first.counts, first.calls) == (second.counts, second.calls)


def waiting_messages_count_as_handled(patch: pytest.MonkeyPatch) -> None:
    """A message that was sent back and waits for its retry is translated as handled."""

    async def broken(*_: Any) -> AsyncIterator[tuple[QueueRef, int]]:
        nothing: tuple[tuple[QueueRef, int], ...] = ()
        for one in nothing:
            yield one

    patch.setattr(GroupMirror, "_waiting", broken)


def storage_does_not_compare_marks(patch: pytest.MonkeyPatch) -> None:
    """Storage stores a mirrored batch that it has, or that leaves others out."""
    check = ProducerTable.check

    def broken(self: ProducerTable, header: Any, queue: Any) -> Any:
        return None if mark_of(header) else check(self, header, queue)

    patch.setattr(ProducerTable, "check", broken)


def runs_are_joined_over_other_messages(patch: pytest.MonkeyPatch) -> None:
    """A run of the map goes on although the target has other messages in between."""
    add = OffsetMap.add

    def broken(self: OffsetMap, run: OffsetRun) -> None:
        if self.runs and self.runs[-1].source_end == run.source_offset:
            run = run._replace(target_offset=self.runs[-1].target_end)
        add(self, run)

    patch.setattr(OffsetMap, "add", broken)


def own_messages_are_not_looked_up(patch: pytest.MonkeyPatch) -> None:
    """A mirror that starts does not look for messages of the target in the source."""

    async def broken(*_: Any) -> None:
        return

    patch.setattr(QueueMirror, "_find_own", broken)


def standbys_are_made_in_two_steps(patch: pytest.MonkeyPatch) -> None:
    """A mirror that is killed between two calls leaves a group that is not paused."""

    async def broken(admin: Admin, name: str, by: str, *, dry_run: bool = False) -> None:
        assert not dry_run
        try:
            if _group_mirror.is_standby(await admin.describe_group(name)):
                return
        except GroupNotFound:
            await admin.update_group(name, ownership="off")
            await asyncio.sleep(STEP_S)
        await admin.pause_group(name, by, STANDBY_REASON, ownership="off")

    patch.setattr("batonmq.admin.mirror.make_standby", broken)


def errors_at_once_are_a_group(patch: pytest.MonkeyPatch) -> None:
    """Two queues whose reading fails at once end a mirror with an error that is not documented."""
    patch.setattr(_mirrored_clusters, "without_group", nullcontext)


MUTANTS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], set[str]], ...] = (
    (waiting_messages_count_as_handled, {"past"}),
    (storage_does_not_compare_marks, {"once"}),
    (runs_are_joined_over_other_messages, {"map", "past", "progress"}),
    (own_messages_are_not_looked_up, {"progress"}),
    (standbys_are_made_in_two_steps, {"progress", "standby"}),
    (errors_at_once_are_a_group, {"group"}),
)
"""Each mutant, and the rules that it may break."""


@pytest.mark.long
@pytest.mark.parametrize(("break_it", "rules"), MUTANTS, ids=[one.__name__ for one, _ in MUTANTS])
def test_mutant_of_mirrors_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None],
    rules: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    name = break_it.__name__
    runs = (play_mirrors(f"{name}/{number}") for number in range(MUTANT_SEEDS))
    assert_found(rules, runs)
