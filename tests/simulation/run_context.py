"""The context that all drivers of a run share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from batonmq_server.testing.processes import SimulatedProcess
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.options import RunOptions

Later = Coroutine[Any, Any, None] | None
"""The rest of an action, which takes time; None if the action is complete."""


class RunContext:
    """The cluster of a run, its options, its random generator, and the counts of its actions."""

    def __init__(self, cluster: SimulatedCluster, options: RunOptions) -> None:
        self.cluster, self.options = cluster, options
        self.random = cluster.random("scenario")
        self.counts: Counter[str] = Counter()

    def note(self, text: str, kind: str = "") -> None:
        """Add an action of the scenario to the trace; count its `kind`."""
        self.cluster.trace.note("director", text)
        if kind:
            self.counts[kind] += 1

    def time_s(self) -> float:
        """Draw the duration of a pause or cut; short ones are as likely as long ones."""
        longest = self.random.choice([500, 4_000, self.options.pause_ms_max])
        return min(longest, self.options.pause_ms_max) * self.random.uniform(0.3, 1) / 1000

    async def until(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Wait until the condition is true, at most `timeout_s`."""
        end_s = self.cluster.loop.time() + timeout_s
        while not condition() and self.cluster.loop.time() < end_s:  # noqa: ASYNC110  time costs nothing
            await asyncio.sleep(0.1)

    async def freeze(self, process: SimulatedProcess, kind: str) -> None:
        """Freeze a process for a while, at any point of its work."""
        process.freeze()
        self.note(f"{process.name} is frozen", kind)
        await asyncio.sleep(self.time_s())
        if process.alive:
            self.note(f"{process.name} goes on")
        process.thaw()
