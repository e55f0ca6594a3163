"""Goal: outputs are stored once for their inputs under every schedule; the runs find a broken rule.

Method: `transforms` plays transformers that die, freeze and leave, and services that are killed,
with faults drawn from a seed; in some runs the broker is a replica set, whose leader fails. Each
mutant leaves one rule of client or storage out; one of its runs must break a promise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from batonmq._consumer import transformer
from batonmq_server.storage.core.outputs import OutputTable, SourceOutputs
from tests.simulation.mutant_search import assert_found
from tests.simulation.seeds import SEEDS, each_bunch
from tests.simulation.transforms import play_transforms
from tests.support.run_counts import note_runs

pytestmark = [pytest.mark.sim, pytest.mark.timeout(900)]

BUNCH = 5
TRANSFORM_SEEDS = SEEDS[: max(1, len(SEEDS) // 100)]
REPLICATED_SEEDS = SEEDS[: max(1, len(SEEDS) // 100)]
LEAST = {"kills": 150, "freezes": 80, "broker kills": 200, "offsets kills": 80, "outputs": 20_000}
"""Minimum number of events of each kind in 100 runs, judged over a whole session."""
LEAST_REPLICATED = {"kills": 150, "freezes": 80, "takeovers": 40, "outputs": 15_000}
MUTANT_SEEDS = 12


@each_bunch(TRANSFORM_SEEDS, BUNCH)
def test_each_output_is_stored_once(request: pytest.FixtureRequest, seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = play_transforms(f"transforms/{seed}")
        assert not run.violations, f"seed {run.seed}: {run.violations[:5]}"
        counts += run.counts
    note_runs(request, "transforms", len(seeds), counts, LEAST, BUNCH)


@each_bunch(REPLICATED_SEEDS, BUNCH)
def test_each_output_is_stored_once_while_followers_take_over(
    request: pytest.FixtureRequest, seeds: range
) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = play_transforms(f"transforms/{seed}", replicated=True)
        assert not run.violations, f"seed {run.seed}: {run.violations[:5]}"
        counts += run.counts
    note_runs(request, "transforms with takeovers", len(seeds), counts, LEAST_REPLICATED, BUNCH)


def stored_outputs_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Storage does not look whether an output is stored."""
    patch.setattr(OutputTable, "check", lambda *_: None)


def redelivered_inputs_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """The owner does not ask what is stored of inputs that come again."""

    async def broken(self: Any, state: Any, message: Any, outputs: Any, **_: Any) -> Any:
        return outputs

    patch.setattr(transformer.Transformer, "_missing", broken)


def inputs_are_acknowledged_before_their_outputs_are_stored(patch: pytest.MonkeyPatch) -> None:
    """An input is finished as soon as its outputs wait to be sent; batches have no floor."""
    begin, head = transformer.Transformer._begin, transformer.Transformer._head

    def broken(self: Any, state: Any, pending: Any) -> None:
        begin(self, state, pending)
        state.queue.finish_ranges(pending.messages[0], pending.ranges)

    patch.setattr(transformer.Transformer, "_begin", broken)
    patch.setattr(transformer.Transformer, "_head", lambda *of: head(*of)._replace(floor=0))


def remembered_outputs_are_forgotten_too_early(patch: pytest.MonkeyPatch) -> None:
    """A floor that rises forgets the outputs of all inputs, not only of those below it."""
    raise_floor = SourceOutputs.raise_floor

    def broken(self: Any, floor: int) -> None:
        raise_floor(self, floor)
        self.begin_epoch(self.reset_epoch, floor)

    patch.setattr(SourceOutputs, "raise_floor", broken)


MUTANTS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], set[str]], ...] = (
    (stored_outputs_are_not_compared, {"once"}),
    (redelivered_inputs_are_not_compared, {"once", "settled"}),
    (inputs_are_acknowledged_before_their_outputs_are_stored, {"stored"}),
    (remembered_outputs_are_forgotten_too_early, {"once"}),
)
"""Each mutant, and the rules that it may break."""


@pytest.mark.long
@pytest.mark.parametrize(("break_it", "rules"), MUTANTS, ids=[one.__name__ for one, *_ in MUTANTS])
def test_mutant_of_transforms_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None],
    rules: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    name = break_it.__name__
    runs = (play_transforms(f"{name}/{number}") for number in range(MUTANT_SEEDS))
    assert_found(rules, runs)
