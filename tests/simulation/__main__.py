"""`python -m tests.simulation SEED [KIND]` plays one run and prints it; for KIND see `seeds`."""

from __future__ import annotations

import sys

from tests.simulation.scenario import play
from tests.simulation.seeds import KINDS


def main(seed: str, kind: str = "") -> int:
    """Print every event of the run; exit status 1 if a property was broken."""
    options = KINDS[kind](int(seed))
    outcome = play(seed, options, kept_max=None)
    print("\n".join(outcome.lines()))
    return int(outcome.violation is not None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
