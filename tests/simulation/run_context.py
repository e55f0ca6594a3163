"""What everybody who makes things happen in a run shares."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from batonmq_server.testing.processes import SimulatedProcess
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.options import RunOptions

Later = Coroutine[Any, Any, None] | None
"""What goes on for a while after an action; None if nothing does."""


class RunContext:
    """The world of a run, its options, its chance, and a count of what was done to it."""

    def __init__(self, cluster: SimulatedCluster, options: RunOptions) -> None:
        self.cluster, self.options = cluster, options
        self.random = cluster.random("scenario")
        self.counts: Counter[str] = Counter()

    def note(self, what: str, kind: str = "") -> None:
        """The director does something; `kind` is counted."""
        self.cluster.trace.note("director", what)
        if kind:
            self.counts[kind] += 1

    def time_s(self) -> float:
        """How long a pause or cut lasts; short ones are as likely as long ones."""
        longest = self.random.choice([500, 4_000, self.options.pause_ms_max])
        return min(longest, self.options.pause_ms_max) * self.random.uniform(0.3, 1) / 1000

    async def until(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Wait, but not for ever."""
        end_s = self.cluster.loop.time() + timeout_s
        while not condition() and self.cluster.loop.time() < end_s:  # noqa: ASYNC110  time costs nothing
            await asyncio.sleep(0.1)

    async def freeze(self, process: SimulatedProcess, kind: str) -> None:
        """Stop a process for a while, in the middle of whatever it does."""
        process.freeze()
        self.note(f"{process.name} is frozen", kind)
        await asyncio.sleep(self.time_s())
        if process.alive:
            self.note(f"{process.name} goes on")
        process.thaw()
