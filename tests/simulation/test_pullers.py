"""Goal: a puller returns each offset once and in order, and keeps to what its group has committed.

Method: `pullers` plays programs that poll, seek and commit, services that are killed, and an
operator who resets, with faults drawn from a seed; in some runs the broker is a replica set, whose
leader fails. Each mutant leaves one rule of the puller out; one of its runs must break a promise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import pytest

from batonmq._consumer import prefetched_queue, puller
from batonmq._consumer.prefetched_queue import PrefetchedQueue
from batonmq._consumer.puller import Puller, SeekTarget
from batonmq._consumer.reader_calls import ReaderCalls, ReadProgress
from batonmq._core.queues import QueueRef
from batonmq.errors import BatonError, GroupNotFound
from batonmq_server.runtime.group_gates import GroupGate, GroupGates
from tests.simulation.mutant_search import assert_found
from tests.simulation.pullers import play_pullers
from tests.simulation.seeds import SEEDS, each_bunch
from tests.support.run_counts import note_runs

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

BUNCH = 10
PULLER_SEEDS = SEEDS[: max(1, len(SEEDS) // 10)]
REPLICATED_SEEDS = SEEDS[: max(1, len(SEEDS) // 20)]
LEAST = {
    "broker kills": 300, "offsets kills": 80, "program ends": 500, "resets": 400, "seeks": 2_000,
    "commits": 500, "commits that were fenced": 70, "reads": 30_000,
}  # fmt: skip
"""Minimum number of events of each kind in 100 runs, judged over a whole session."""
LEAST_REPLICATED = {
    "takeovers": 90, "offsets kills": 45, "program ends": 500, "resets": 350, "seeks": 1_800,
    "commits": 400, "commits that were fenced": 60, "reads": 15_000,
}  # fmt: skip
MUTANT_SEEDS = 30


@each_bunch(PULLER_SEEDS, BUNCH)
def test_promises_of_pullers_hold(request: pytest.FixtureRequest, seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = play_pullers(f"pullers/{seed}")
        assert not run.violations, f"seed {run.seed}: {run.violations[:5]}"
        counts += run.counts
    note_runs(request, "pullers", len(seeds), counts, LEAST, BUNCH)


@each_bunch(REPLICATED_SEEDS, BUNCH)
def test_promises_hold_while_followers_take_over(
    request: pytest.FixtureRequest, seeds: range
) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = play_pullers(f"pullers/{seed}", replicated=True)
        assert not run.violations, f"seed {run.seed}: {run.violations[:5]}"
        counts += run.counts
    note_runs(request, "pullers with takeovers", len(seeds), counts, LEAST_REPLICATED, BUNCH)


def test_same_seed_is_the_same_run() -> None:
    first, second = (play_pullers("pullers/7", replicated=True) for _ in range(2))
    assert (first.counts, first.read) == (second.counts, second.read)


def fetch_under_way_survives_a_seek(patch: pytest.MonkeyPatch) -> None:
    """The answer of a fetch is kept, although the position was moved meanwhile."""
    move = PrefetchedQueue.move

    def broken(self: PrefetchedQueue, offset: int) -> None:
        move(self, offset)
        self._moved.clear()

    patch.setattr(prefetched_queue, "unless", lambda _, fetch: fetch)
    patch.setattr(PrefetchedQueue, "move", broken)


def messages_survive_a_seek(patch: pytest.MonkeyPatch) -> None:
    """Messages that were fetched ahead are kept, although the position is moved."""
    patch.setattr(PrefetchedQueue, "_drop", lambda *_: None)


def commits_continue_after_a_reset(patch: pytest.MonkeyPatch) -> None:
    """A commit names the newest reset, and not the one that its program knows."""
    commit = Puller.commit

    async def broken(self: Puller, offsets: Mapping[QueueRef, int] | None = None) -> None:
        self._reset_epochs.clear()
        await commit(self, offsets)

    patch.setattr(Puller, "commit", broken)


def seeks_do_not_note_the_resets(patch: pytest.MonkeyPatch) -> None:
    """A program that seeks before its start is known learns of resets at its first commit."""
    seek = Puller.seek

    async def broken(self: Puller, queue: QueueRef, to: SeekTarget) -> int:
        known = queue in self._reset_epochs
        offset = await seek(self, queue, to)
        if not known:
            self._reset_epochs.pop(queue, None)
        return offset

    patch.setattr(Puller, "seek", broken)


def calls_are_not_repeated(patch: pytest.MonkeyPatch) -> None:
    """A call fails as soon as one node does not serve it."""
    patch.setattr(puller, "_REPEAT_S", 0)


def commits_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """A commit returns although offsets did not answer."""
    commit = ReaderCalls.commit

    async def broken(self: ReaderCalls, progress: Sequence[tuple[QueueRef, ReadProgress]]) -> None:
        with suppress(BatonError):
            await commit(self, progress)

    patch.setattr(ReaderCalls, "commit", broken)


def groups_are_unknown_until_they_are_read(patch: pytest.MonkeyPatch) -> None:
    """A service that has not read the groups from etcd yet says that there is no such group."""
    check = GroupGates.check_unowned

    def broken(self: GroupGates, group: str) -> GroupGate:
        if self.get(group) is None:
            raise GroupNotFound("not known")
        return check(self, group)

    patch.setattr(GroupGates, "check_unowned", broken)


MUTANTS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], set[str]], ...] = (
    (fetch_under_way_survives_a_seek, {"order"}),
    (messages_survive_a_seek, {"order"}),
    (commits_continue_after_a_reset, {"fenced"}),
    (seeks_do_not_note_the_resets, {"fenced"}),
    (calls_are_not_repeated, {"repeated"}),
    (commits_are_not_awaited, {"committed", "begin", "fenced"}),
    (groups_are_unknown_until_they_are_read, {"poll", "commit"}),
)
"""Each mutant, and the rules that it may break."""


@pytest.mark.parametrize(("break_it", "rules"), MUTANTS, ids=[one.__name__ for one, *_ in MUTANTS])
def test_mutant_of_pullers_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None],
    rules: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    name = break_it.__name__
    runs = (
        play_pullers(f"{name}/{number}", replicated=number % 2 == 1)
        for number in range(MUTANT_SEEDS)
    )
    assert_found(rules, runs)
