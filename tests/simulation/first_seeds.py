"""`python -m tests.simulation.first_seeds` prints mutants that their first seed does not reveal.

A change of the protocol or of the simulator changes the runs, and so the seeds that reveal a
mutant. The printed seed is the next one that does: put it into `mutants`.
"""

from __future__ import annotations

import logging

import pytest

from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.scenario import play


def revealing_seed(mutant: Mutant) -> int | None:
    """Return the first number of a seed that reveals the mutant; None if no seed does."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.break_it(monkeypatch)
        for number in range(mutant.first, mutant.first + mutant.seeds_max):
            if play(f"{mutant.name}/{number}", mutant.options).violation is not None:
                return number
    return None


def main() -> None:
    """Print name, current and new first seed of the mutants that start too early."""
    logging.disable(logging.WARNING)
    for mutant in MUTANTS:
        number = revealing_seed(mutant)
        if number != mutant.first:
            print(f"{mutant.name}: {mutant.first} -> {number}", flush=True)


if __name__ == "__main__":
    main()
