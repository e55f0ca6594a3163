"""Goal: the promises of transactions hold under every schedule, and the runs find a broken one.

Method: `transactions` plays shops that die and brokers that are killed, with faults drawn from a
seed; in some runs the broker is a replica set, whose leader fails while transactions are open. Each
mutant leaves one rule of storage out; one of its runs must break a promise.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from baton.storage.v1 import transaction_service_pb2 as pb
from batonmq_server.storage import transaction_checker, transaction_server
from batonmq_server.storage.core import transactions as core
from batonmq_server.storage.core.check_streams import CheckStreams
from batonmq_server.storage.core.transactions import Outcome
from batonmq_server.storage.transaction_checker import TransactionChecker
from tests.simulation.broken_storage_replicas import ack_before_replicate
from tests.simulation.mutant_search import assert_found
from tests.simulation.seeds import SEEDS, each_bunch
from tests.simulation.transactions import INTERVAL_MS, play_transactions
from tests.support.run_counts import note_runs

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

BUNCH = 10
TRANSACTION_SEEDS = SEEDS[: max(1, len(SEEDS) // 10)]
REPLICATED_SEEDS = SEEDS[: max(1, len(SEEDS) // 20)]
LEAST = {
    "broker kills": 500, "shop deaths": 500, "confirmed": 5_000, "refused": 500, "answers": 300,
    "discarded": 100,
}  # fmt: skip
"""Minimum number of events of each kind in 100 runs, judged over a whole session."""
LEAST_REPLICATED = {
    "takeovers": 150, "shop deaths": 500, "confirmed": 2_500, "refused": 500, "answers": 1_000,
    "discarded": 200,
}  # fmt: skip
MUTANT_SEEDS = 12


@each_bunch(TRANSACTION_SEEDS, BUNCH)
def test_promises_of_transactions_hold(request: pytest.FixtureRequest, seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = play_transactions(f"transactions/{seed}")
        assert not run.violations, f"seed {run.seed}: {run.violations[:5]}"
        counts += run.counts
    note_runs(request, "transactions", len(seeds), counts, LEAST, BUNCH)


@each_bunch(REPLICATED_SEEDS, BUNCH)
def test_promises_hold_while_followers_take_over(
    request: pytest.FixtureRequest, seeds: range
) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = play_transactions(f"transactions/{seed}", replicated=True)
        assert not run.violations, f"seed {run.seed}: {run.violations[:5]}"
        counts += run.counts
    kind = "transactions with takeovers"
    note_runs(request, kind, len(seeds), counts, LEAST_REPLICATED, BUNCH)


@pytest.mark.parametrize("replicated", [False, True])
def test_same_seed_is_the_same_run(*, replicated: bool) -> None:
    first, second = (
        play_transactions("transactions/repeated", replicated=replicated) for _ in range(2)
    )
    assert (first.counts, first.asked) == (second.counts, second.asked)


def commit_leaves_it_open(patch: pytest.MonkeyPatch) -> None:
    """A commit stores the message, but does not end its transaction."""
    end = core.Transactions._end

    def broken(self: Any, transaction_id: int, outcome: Outcome, position: int) -> None:
        if outcome is not Outcome.COMMITTED:
            end(self, transaction_id, outcome, position)

    patch.setattr(core.Transactions, "_end", broken)


def ends_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A rollback is not in the log, but is confirmed."""

    def broken(marks: Sequence[core.RollbackMark]) -> bytes:
        return core.encode_marks([core.CheckMark(one.transaction_id, 0, 1) for one in marks])

    patch.setattr(transaction_server, "encode_marks", broken)


def checks_are_not_recorded(patch: pytest.MonkeyPatch) -> None:
    """A check is sent without a record in the log."""

    def broken(self: Any, marks: Any) -> int:
        for one in marks:
            self._open.checked(one.transaction_id, one.check_unix_s, one.checks)
        return 0

    patch.setattr(TransactionChecker, "_write", broken)


def checks_have_no_limit(patch: pytest.MonkeyPatch) -> None:
    """A transaction whose state stays unknown is not discarded."""

    async def broken(self: Any, transactions: Any, halves: Any, reason: str) -> None:
        for one in transactions:
            self._open.checked(one.transaction_id, one.check_unix_s + 60, one.checks)

    patch.setattr(TransactionChecker, "_discard", broken)


def rollback_commits(patch: pytest.MonkeyPatch) -> None:
    """A rollback delivers the message."""
    outcomes: Any = transaction_server._OUTCOMES
    patch.setitem(outcomes, pb.TRANSACTION_STATE_ROLLED_BACK, Outcome.COMMITTED)


def checks_are_never_sent(patch: pytest.MonkeyPatch) -> None:
    """Checks are recorded, but no producer is asked."""
    patch.setattr(CheckStreams, "put", staticmethod(lambda *_: False))


def two_are_asked_at_once(patch: pytest.MonkeyPatch) -> None:
    """A check goes to all producers of the group."""

    def broken(able: Any, topic: str, check: Any, turn: int, size: int) -> bool:
        for one in able:
            one.add(topic, check, turn, size)
        return bool(able)

    patch.setattr(CheckStreams, "put", staticmethod(broken))


def the_interval_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """The next check is due as soon as one is sent."""
    real = transaction_server.seconds_after

    def broken(now_unix_ms: int, wait_ms: int) -> int:
        return real(now_unix_ms, 0 if wait_ms == INTERVAL_MS else wait_ms)

    patch.setattr(transaction_checker, "seconds_after", broken)


def a_rewritten_half_message_is_lost(patch: pytest.MonkeyPatch) -> None:
    """A half message that is written again ends its transaction."""
    begin = core.Transactions._begin

    def broken(self: Any, half: core.HalfMessage, owner: int, receipt: Any) -> None:
        if half.transaction_id == core.FIRST:
            begin(self, half, owner, receipt)
        else:
            self.open.remove(half.transaction_id)

    patch.setattr(core.Transactions, "_begin", broken)


def the_next_leader_does_not_check(patch: pytest.MonkeyPatch) -> None:
    """Only the first leader of a replica set asks producers."""
    run = TransactionChecker.run

    async def broken(self: Any) -> None:
        if self._store.epoch > 1:
            await asyncio.Event().wait()
        await run(self)

    patch.setattr(TransactionChecker, "run", broken)


MUTANTS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], set[str]], ...] = (
    (commit_leaves_it_open, {"once", "limit"}),
    (ends_are_forgotten, {"limit", "rolled back"}),
    (checks_are_not_recorded, {"checks"}),
    (checks_have_no_limit, {"limit"}),
    (rollback_commits, {"rolled back", "booked"}),
    (checks_are_never_sent, {"limit", "booked"}),
    (two_are_asked_at_once, {"checks"}),
    (the_interval_is_ignored, {"interval"}),
    (a_rewritten_half_message_is_lost, {"booked"}),
)
REPLICATED_MUTANTS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], set[str]], ...] = (
    (the_next_leader_does_not_check, {"limit"}),
    (checks_are_not_recorded, {"checks"}),
    (ack_before_replicate, {"confirmed", "rolled back", "booked", "checks", "once"}),
    (a_rewritten_half_message_is_lost, {"booked"}),
)


@pytest.mark.long
@pytest.mark.parametrize(("break_it", "rules"), MUTANTS, ids=[one.__name__ for one, _ in MUTANTS])
def test_mutant_of_transactions_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None],
    rules: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    name = break_it.__name__
    runs = (
        play_transactions(f"{name}/{number}", replicated=False) for number in range(MUTANT_SEEDS)
    )
    assert_found(rules, runs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("break_it", "rules"), REPLICATED_MUTANTS, ids=[one.__name__ for one, _ in REPLICATED_MUTANTS]
)
def test_mutant_of_transactions_is_found_while_followers_take_over(
    break_it: Callable[[pytest.MonkeyPatch], None],
    rules: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    name = break_it.__name__
    runs = (
        play_transactions(f"{name}/{number}", replicated=True) for number in range(MUTANT_SEEDS)
    )
    assert_found(rules, runs)
