"""Goal: the simulator finds a protocol with a missing rule.

Method: each mutant leaves out one of the protocol's rules in the real code (`mutants`); some
run, of a bounded number, must then break a promise. The same run of the complete protocol must not.
"""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.scenario import play

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]
RUNS_MAX = 60
"""Number of runs within which every mutant is found; most are in the first ten."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_mutant_of_the_protocol_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.break_it(monkeypatch)
    for number in range(mutant.first_run, mutant.first_run + RUNS_MAX):
        seed = f"{mutant.name}/{number}"
        outcome = play(seed, mutant.options)
        if outcome.violation is not None:
            break
    rule = outcome.broken_rule
    assert rule in mutant.rules, f"{mutant.name} broke {rule}"
    monkeypatch.undo()
    play(seed, mutant.options).check()


def test_violation_shows_seed_options_and_previous_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant = MUTANTS[0]
    mutant.break_it(monkeypatch)
    outcome = play(f"{mutant.name}/0", mutant.options)
    with pytest.raises(AssertionError) as raised:
        outcome.check()
    text = str(raised.value)
    assert f"seed {mutant.name}/0" in text
    assert "VIOLATION V1" in text
    assert "Acquire to lock-" in text
    assert len(text.splitlines()) > 20
