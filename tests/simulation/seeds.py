"""Which runs are played: BATON_SIM_SEEDS, BATON_SIM_FIRST_SEED, BATON_SIM_STEPS."""

from __future__ import annotations

from random import Random

from pydantic import Field

from batonmq._process.config import Settings, load
from tests.simulation.options import RunOptions


class SimSettings(Settings):
    """Read from the environment."""

    seeds: int = Field(200, ge=1)
    """How many runs with faults are played."""
    first_seed: int = Field(1, ge=0)
    """Their numbers count from here."""
    steps: int = Field(30, ge=1)
    """How much happens in a run: actions until the faults cease."""


SETTINGS = load(SimSettings, "BATON_SIM")
SEEDS = range(SETTINGS.first_seed, SETTINGS.first_seed + SETTINGS.seeds)
STORAGE_SEEDS = SEEDS[: max(1, SETTINGS.seeds * 3 // 20)]
"""Of runs in which the broker is a replica set."""
MOVES_SEEDS = SEEDS[: max(1, SETTINGS.seeds // 10)]
"""Of runs in which the group is moved between two sets of offsets."""


def options_of(seed: int) -> RunOptions:
    """What may happen in the run of a seed."""
    return RunOptions.drawn(Random(f"{seed}/options"), SETTINGS.steps)


def storage_options_of(seed: int) -> RunOptions:
    """What may happen in a run of a seed in which the broker is a replica set."""
    return RunOptions.of_storage(Random(f"{seed}/storage"), SETTINGS.steps)


def moves_options_of(seed: int) -> RunOptions:
    """What may happen in a run of a seed in which the group is moved."""
    return RunOptions.of_moves(Random(f"{seed}/moves"), SETTINGS.steps)


def graceful_options_of(seed: int) -> RunOptions:
    """The same for a run in which nothing breaks."""
    return RunOptions.graceful(Random(f"{seed}/options"), SETTINGS.steps)


KINDS = {
    "": options_of,
    "graceful": graceful_options_of,
    "storage": storage_options_of,
    "moves": moves_options_of,
}
"""What `python -m tests.simulation SEED KIND` plays."""
