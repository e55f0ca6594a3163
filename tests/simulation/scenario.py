"""One run: a cluster starts, things happen to it, then it is left in peace and must finish."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from batonmq._common.aio import unless
from batonmq_server.testing.memory_network import Faults
from batonmq_server.testing.virtual_time import run_virtual
from tests.simulation.books import Violation
from tests.simulation.cluster import World
from tests.simulation.crew import Crew
from tests.simulation.operations import Operator
from tests.simulation.options import Options
from tests.simulation.plant import Plant
from tests.simulation.producing import Producing
from tests.simulation.stage import Later, Stage
from tests.simulation.trace import Trace

SETTLE_S = 240
"""Once faults have ceased, everything must be done within this time."""
ALIKE_S = 30
"""And then all copies must be alike."""
ASK_S = 20
"""Meanwhile the operator asks so often why it is not."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has come to.

    Attributes:
        counts: How often which kind of event happened.
        violation: The first broken property.
    """

    seed: str
    options: Options
    counts: Mapping[str, int]
    trace: Trace
    violation: Violation | None

    def lines(self) -> list[str]:
        """The transcript, as far as it was kept."""
        return self.trace.lines()

    def check(self) -> None:
        """Raise the violation, with what is needed to play it again."""
        if self.violation is not None:
            raise Violation(f"seed {self.seed}, {self.options}\n{self.violation}")


def play(seed: str, options: Options, *, kept_max: int | None = 4_000) -> Outcome:
    """One run in virtual time.

    The garbage collector rests meanwhile: it would end abandoned generators at times of its own.
    """
    gc.disable()
    try:
        return run_virtual(_play(seed, options, kept_max))
    finally:
        gc.enable()


async def _play(seed: str, options: Options, kept_max: int | None) -> Outcome:
    world = World(seed, kept_max=kept_max)
    run = Run(world, options)
    logging.getLogger().addHandler(world.trace)
    try:
        await run.play()
    finally:
        logging.getLogger().removeHandler(world.trace)
        world.trace.end()
        world.checker.books.watching = False
        counts = world.checker.books.counts + world.network.counts + run.stage.counts
        await _end(world)
    return Outcome(seed, options, counts, world.trace, world.checker.books.violation)


async def _end(world: World) -> None:
    """Unwind every process, also those that were killed: Python wants its tasks to end."""
    world.network.end()
    for host in world.hosts:
        host.thaw()
    this = asyncio.current_task()
    while left := [task for task in asyncio.all_tasks() if task is not this]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=5)


class Run:
    """The director of one run."""

    def __init__(self, world: World, options: Options) -> None:
        self.world, self.options = world, options
        self.stage = Stage(world, options)
        self._crew = Crew(self.stage)
        self._plant = Plant(self.stage, self._crew)
        self._producing = Producing(self.stage)
        self._operator = Operator(self.stage)
        self._later: list[asyncio.Task[None]] = []

    async def play(self) -> None:
        """The whole run; ends early at the first violation."""
        async with asyncio.TaskGroup() as tasks:
            await unless(self.world.checker.books.broken, self._direct(tasks))
            for task in self._later:
                task.cancel()

    async def _direct(self, tasks: asyncio.TaskGroup) -> None:
        random = self.stage.random
        self._plant.start()
        self._producing.start()
        await self.stage.until(lambda: self._producing.ready, 60)
        await self._operator.prepare()
        for _ in range(self.options.consumers):
            self._crew.join()
        self._producing.burst()
        self.world.network.faults = self.options.faults
        actions = self._actions()
        for _ in range(self.options.steps):
            await asyncio.sleep(random.choice([0.01, 0.3, 2, 6]) * random.random())
            action = random.choices(list(actions), list(actions.values()))[0]
            later = action()
            if later is not None:
                self._later.append(tasks.create_task(later))
        await self._settle(tasks)

    def _actions(self) -> dict[Callable[[], Later], int]:
        """What may happen, by weight; some of it goes on for a while."""
        options = self.options
        return {
            self._producing.burst: 8,
            self._crew.join: options.joins,
            self._crew.leave: options.leaves,
            self._crew.kill: options.kills,
            self._crew.pause: options.pauses,
            self._crew.switch: options.switches,
            self._crew.break_watches: options.watch_breaks,
            self._plant.kill: options.service_kills,
            self._plant.pause: options.service_pauses,
            self._plant.restart: options.service_restarts,
            self._plant.cut: options.cuts,
            self._plant.deafen: options.deaf,
            self._plant.fail_leader: options.leader_faults,
            self._plant.split: options.splits,
            self._plant.lose_disk: options.lost_disks,
            self._plant.rot: options.rots,
            self._plant.fail_disk: options.disk_failures,
            self._plant.jump: options.jumps,
            self._operator.reset: options.resets,
            self._operator.force: options.forces,
            self._operator.pause: options.group_pauses,
            self._operator.ask: options.questions,
            self._operator.move: options.moves,
        }

    async def _settle(self, tasks: asyncio.TaskGroup) -> None:
        """Faults cease; what is left to be done gets done (L1, L2)."""
        self.world.trace.note("director", "faults cease")
        self.world.network.faults = Faults()
        self._plant.settle()
        self._crew.settle()
        self._later.append(tasks.create_task(self._operator.settle()))
        for _ in range(0, SETTLE_S, ASK_S):
            await self.stage.until(self._done, ASK_S)
            if self._done():
                break
            self._operator.ask()
        for replicas in (self.world.checker.replicas, self.world.checker.stores):
            await self.stage.until(replicas.alike, ALIKE_S)
            replicas.check_alike()
        self.world.checker.check_complete(self._producing.acked)

    def _done(self) -> bool:
        settled = not self._producing.unsettled and not self._operator.busy
        checker = self.world.checker
        return settled and checker.stores.quiet() and checker.complete()
