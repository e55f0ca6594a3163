"""Goal: a compacted topic keeps its promises under every schedule; the runs find a broken rule.

Method: `compactions` plays writers, readers and members of a compacted topic while services fail,
with faults drawn from a seed; in some runs the broker is a replica set, whose leader fails. Each
mutant leaves one rule of storage out; one of its runs must break a promise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from batonmq_server.storage.core import compaction_run
from batonmq_server.storage.core.compacted import CompactedQueues, Section
from batonmq_server.storage.core.compaction_order import CompactionOrder, SectionRows
from batonmq_server.storage.core.compaction_run import RunRules
from batonmq_server.storage.core.compaction_source import ExaminedChunk
from batonmq_server.storage.core.consumequeue import Int64Array
from batonmq_server.storage.core.key_digests import BoolArray
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.queue_reader import ReadResult
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.deliverer import Deliverer
from batonmq_server.storage.log_follower import LogFollower
from batonmq_server.storage.replica import StorageReplica
from batonmq_server.storage.validation import ParsedPull
from tests.simulation.compactions import play_compactions
from tests.simulation.mutant_search import assert_found
from tests.simulation.seeds import SEEDS, each_bunch
from tests.support.run_counts import note_runs

pytestmark = [pytest.mark.sim, pytest.mark.timeout(900)]

BUNCH = 5
JUDGED_FROM = 20
"""Number of runs from which on rare events are judged: segments are purged in few runs."""
COMPACTION_SEEDS = SEEDS[: max(1, len(SEEDS) // 200)]
MUTANT_SEEDS = 40
FOUND_REPLICATED = (43,)
"""Seeds that failed in a long run, each before its cause was mended."""
LEAST = {
    "compactions": 1_000, "compactions broken off": 100, "removed": 20_000, "tombstones": 3_000,
    "broker kills": 400, "offsets kills": 80, "kills": 150, "tables": 100, "removals seen": 200,
    "lags over holes": 80, "purged segments": 200,
}  # fmt: skip
"""Minimum number of events of each kind in 100 runs, judged over a whole session."""
LEAST_REPLICATED = {
    "compactions": 1_000, "compactions broken off": 100, "removed": 10_000, "tombstones": 2_000,
    "takeovers": 100, "kills": 150, "tables": 100, "removals seen": 200, "lags over holes": 40,
    "purged segments": 200,
}  # fmt: skip


@each_bunch(COMPACTION_SEEDS, BUNCH)
def test_promises_of_compacted_topics_hold(request: pytest.FixtureRequest, seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = play_compactions(f"compactions/{seed}")
        assert not run.violations, f"seed {run.seed}: {run.violations[:5]}"
        counts += run.counts
    note_runs(request, "compactions", len(seeds), counts, LEAST, JUDGED_FROM)


@each_bunch(COMPACTION_SEEDS, BUNCH)
def test_promises_of_compacted_topics_hold_while_followers_take_over(
    request: pytest.FixtureRequest, seeds: range
) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = play_compactions(f"compactions/{seed}", replicated=True)
        assert not run.violations, f"seed {run.seed}: {run.violations[:5]}"
        counts += run.counts
    kind = "compactions with takeovers"
    note_runs(request, kind, len(seeds), counts, LEAST_REPLICATED, JUDGED_FROM)


@pytest.mark.parametrize("seed", FOUND_REPLICATED)
def test_replicated_runs_that_once_broke_a_promise_keep_it(seed: int) -> None:
    assert not play_compactions(f"compactions/{seed}", replicated=True).violations


def test_same_seed_is_the_same_run() -> None:
    first, second = (play_compactions("compactions/repeated", replicated=True) for _ in range(2))
    assert (first.counts, first.receipts) == (second.counts, second.receipts)
    assert first.handled == second.handled


def the_newest_is_removed(patch: pytest.MonkeyPatch) -> None:
    """A clean removes the newest message of a key that has an older one in the same chunk."""

    def broken(chunk: ExaminedChunk, rules: RunRules, since: Int64Array) -> BoolArray:
        newest = rules.newest.find(chunk.keys)
        first = np.unique(newest, return_index=True)[1]
        is_first = np.zeros(len(newest), bool)
        is_first[first] = True
        return ~chunk.keyed | (chunk.offsets >= rules.compact_to) | is_first

    patch.setattr(compaction_run, "kept_messages", broken)


def tombstones_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    """A tombstone is removed together with the messages that it deletes."""
    kept_messages = compaction_run.kept_messages

    def broken(chunk: ExaminedChunk, rules: RunRules, since: Int64Array) -> BoolArray:
        over = chunk.tombstones & (chunk.offsets < rules.compact_to)
        return kept_messages(chunk, rules, since) & ~over

    patch.setattr(compaction_run, "kept_messages", broken)


def lag_counts_holes(patch: pytest.MonkeyPatch) -> None:
    """The lag of a group is a difference of offsets."""

    def broken(self: MessageStore, key: Any, offset: int) -> int:
        return max(0, self.offsets(key).next_offset - offset)

    patch.setattr(MessageStore, "count_from", broken)


def an_order_is_applied_at_once(patch: pytest.MonkeyPatch) -> None:
    """A leader follows its order before the other nodes have it, and all of them are read."""
    take = MessageStore._take_compaction

    def broken(self: MessageStore, order: CompactionOrder, receipt: StoreReceipt) -> None:
        take(self, order, receipt)
        self.apply_compactions(receipt.next_position)

    patch.setattr(MessageStore, "_take_compaction", broken)
    patch.setattr(StorageReplica, "has_confirmed", True)


def a_follower_compacts_by_itself(patch: pytest.MonkeyPatch) -> None:
    """A follower leaves tombstones out without an order of the leader."""
    rows, run = CompactedQueues.rows, LogFollower.run
    following: set[int] = set()

    async def follow(self: LogFollower) -> None:
        following.add(id(self._copy.components.node.store.compacted))
        await run(self)

    def broken(self: CompactedQueues, section: Section) -> SectionRows:
        found = rows(self, section)
        if id(self) not in following:
            return found
        kept = ~np.isin(found.offsets, found.tombstone_offsets)
        none = np.empty(0, np.int64)
        return SectionRows(
            found.offsets[kept],
            found.positions[kept],
            found.sizes[kept],
            found.tags[kept],
            none,
            none,
        )

    patch.setattr(LogFollower, "run", follow)
    patch.setattr(CompactedQueues, "rows", broken)


def a_hole_stops_a_queue(patch: pytest.MonkeyPatch) -> None:
    """A member that continues at a removed message waits for it, as for one that comes yet."""
    read = Deliverer._read

    def broken(self: Deliverer, key: Any, pull: ParsedPull) -> ReadResult | None:
        reading = read(self, key, pull)
        if reading is None or reading.kept is None or not pull.owner.token:
            return reading
        is_hole = not len(reading.kept) or reading.kept[0] > 0
        return None if is_hole and not reading.lost_count else reading

    patch.setattr(Deliverer, "_read", broken)


MUTANTS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], bool, set[str]], ...] = (
    (the_newest_is_removed, False, {"newest", "table"}),
    (tombstones_do_not_wait, False, {"table"}),
    (lag_counts_holes, False, {"lag"}),
    (a_hole_stops_a_queue, False, {"settled"}),
    (an_order_is_applied_at_once, True, {"alike", "back"}),
    (a_follower_compacts_by_itself, True, {"alike", "back", "table"}),
)
"""Each mutant, whether its runs have replicas, and the rules that it may break."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("break_it", "replicated", "rules"), MUTANTS, ids=[one[0].__name__ for one in MUTANTS]
)
def test_mutant_of_compaction_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None],
    replicated: bool,
    rules: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    name = break_it.__name__
    runs = (
        play_compactions(f"{name}/{number}", replicated=replicated)
        for number in range(MUTANT_SEEDS)
    )
    assert_found(rules, runs)
