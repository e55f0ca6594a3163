"""`python -m tests.simulation.first_seeds` prints mutants that their first seed does not reveal.

A change of the protocol or of the simulator changes the runs, and so the seeds that reveal a
mutant. The printed seed is the next one that does: put it into `mutants`. A rule that the mutant
breaks and does not name is printed too: name it there if the mutant explains it.
"""

from __future__ import annotations

import logging

import pytest

from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.scenario import RunResult, play


def revealing_run(mutant: Mutant) -> tuple[int, RunResult] | None:
    """Return the first number of a seed that reveals the mutant, and its run; None if none does."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.break_it(monkeypatch)
        for number in range(mutant.first, mutant.first + mutant.seeds_max):
            outcome = play(f"{mutant.name}/{number}", mutant.options)
            if outcome.violation is not None:
                return number, outcome
    return None


def main() -> None:
    """Print the mutants whose first seed or rules are stale."""
    logging.disable(logging.WARNING)
    for mutant in MUTANTS:
        revealing = revealing_run(mutant)
        if revealing is None:
            print(f"{mutant.name}: no seed breaks a rule", flush=True)
            continue
        number, outcome = revealing
        if number != mutant.first:
            print(f"{mutant.name}: {mutant.first} -> {number}", flush=True)
        if outcome.broken_rule not in mutant.rules:
            print(f"{mutant.name}/{number}: breaks {outcome.broken_rule}", flush=True)


if __name__ == "__main__":
    main()
