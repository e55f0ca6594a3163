"""The runs to execute: BATON_SIM_SEEDS, BATON_SIM_FIRST_SEED, BATON_SIM_STEPS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from pydantic import Field

from batonmq._process.config import Settings, load
from tests.simulation.options import RunOptions


class SimSettings(Settings):
    """Settings of the simulation, read from the environment."""

    seeds: int = Field(40, ge=1)
    """Number of runs with faults; `make long` has 200."""
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
DRAIN_SEEDS = SEEDS[: max(1, SETTINGS.seeds // 40)]
"""Seeds of runs in which an operator drains nodes."""

BY_KEY = 0.3
"""Part of the runs in which messages are handled in the order of their ordering keys."""


def each_bunch(seeds: Sequence[int], size: int) -> pytest.MarkDecorator:
    """Return a mark that calls a test with every `size` of `seeds`."""
    bunches = [seeds[begin : begin + size] for begin in range(0, len(seeds), size)]
    return pytest.mark.parametrize("seeds", bunches, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")


def options_of(seed: int) -> RunOptions:
    """Return the options of the run of a seed."""
    drawn = RunOptions.drawn(Random(f"{seed}/options"), SETTINGS.steps)
    buffer = Random(f"{seed}/buffer").choice((2, 40))
    drawn = replace(drawn, buffer=buffer, by_key=by_key(seed))
    return drawn.with_stranger(Random(f"{seed}/stranger"))


def by_key(seed: int) -> bool:
    """Return whether the messages of a run are handled in the order of their keys."""
    return Random(f"{seed}/order").random() < BY_KEY


def storage_options_of(seed: int) -> RunOptions:
    """Return the options of a run in which the broker is a replica set."""
    drawn = RunOptions.of_storage(Random(f"{seed}/storage"), SETTINGS.steps)
    return drawn.with_stranger(Random(f"{seed}/stranger"))


def moves_options_of(seed: int) -> RunOptions:
    """Return the options of a run in which the group moves."""
    return RunOptions.of_moves(Random(f"{seed}/moves"), SETTINGS.steps)


def drain_options_of(seed: int) -> RunOptions:
    """Return the options of a run in which nodes are drained."""
    return RunOptions.of_drains(Random(f"{seed}/drains"), SETTINGS.steps)


def outage_options_of(seed: int) -> RunOptions:
    """Return the options of a run with an outage of all services."""
    drawn = RunOptions.of_outages(Random(f"{seed}/outage"), SETTINGS.steps)
    return replace(drawn, by_key=by_key(seed))


def switching_options_of(seed: int) -> RunOptions:
    """Return the options of a run in which access control is switched on."""
    return RunOptions.switching_identities(Random(f"{seed}/identities"), SETTINGS.steps)


def graceful_options_of(seed: int) -> RunOptions:
    """Return the options of a run without faults."""
    drawn = RunOptions.graceful(Random(f"{seed}/options"), SETTINGS.steps)
    return replace(drawn, by_key=by_key(seed))


KINDS = {
    "": options_of,
    "graceful": graceful_options_of,
    "storage": storage_options_of,
    "moves": moves_options_of,
    "drains": drain_options_of,
    "outage": outage_options_of,
    "identities": switching_options_of,
}
"""The options by KIND of `python -m tests.simulation SEED KIND`."""
