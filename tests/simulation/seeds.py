"""The runs to execute: BATON_SIM_SEEDS, BATON_SIM_FIRST_SEED, BATON_SIM_STEPS."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from pydantic import Field

from batonmq._process.config import Settings, load
from tests.simulation.options import RunOptions


class SimSettings(Settings):
    """Settings of the simulation, read from the environment."""

    seeds: int = Field(200, ge=1)
    """Number of runs with faults."""
    first_seed: int = Field(1, ge=0)
    """First seed."""
    steps: int = Field(30, ge=1)
    """Number of actions of a run until the faults end."""


SETTINGS = load(SimSettings, "BATON_SIM")
SEEDS = range(SETTINGS.first_seed, SETTINGS.first_seed + SETTINGS.seeds)
STORAGE_SEEDS = SEEDS[: max(1, SETTINGS.seeds * 3 // 20)]
"""Seeds of runs in which the broker is a replica set."""
OUTAGE_SEEDS = SEEDS[: max(1, SETTINGS.seeds // 10)]
"""Seeds of runs in which all services are unreachable for a while."""
MOVES_SEEDS = SEEDS[: max(1, SETTINGS.seeds // 10)]
"""Seeds of runs in which the group moves between two sets of offsets."""


def options_of(seed: int) -> RunOptions:
    """Return the options of the run of a seed."""
    drawn = RunOptions.drawn(Random(f"{seed}/options"), SETTINGS.steps)
    buffer = Random(f"{seed}/buffer").choice((2, 20))
    return replace(drawn.with_stranger(Random(f"{seed}/stranger")), buffer=buffer)


def storage_options_of(seed: int) -> RunOptions:
    """Return the options of a run in which the broker is a replica set."""
    drawn = RunOptions.of_storage(Random(f"{seed}/storage"), SETTINGS.steps)
    return drawn.with_stranger(Random(f"{seed}/stranger"))


def moves_options_of(seed: int) -> RunOptions:
    """Return the options of a run in which the group moves."""
    return RunOptions.of_moves(Random(f"{seed}/moves"), SETTINGS.steps)


def outage_options_of(seed: int) -> RunOptions:
    """Return the options of a run with an outage of all services."""
    return RunOptions.of_outages(Random(f"{seed}/outage"), SETTINGS.steps)


def switching_options_of(seed: int) -> RunOptions:
    """Return the options of a run in which access control is switched on."""
    return RunOptions.switching_identities(Random(f"{seed}/identities"), SETTINGS.steps)


def graceful_options_of(seed: int) -> RunOptions:
    """Return the options of a run without faults."""
    return RunOptions.graceful(Random(f"{seed}/options"), SETTINGS.steps)


KINDS = {
    "": options_of,
    "graceful": graceful_options_of,
    "storage": storage_options_of,
    "moves": moves_options_of,
    "outage": outage_options_of,
    "identities": switching_options_of,
}
"""The options by KIND of `python -m tests.simulation SEED KIND`."""
