"""One run: a cluster starts, has faults, and must finish all work after the faults."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from batonmq._common.aio import unless
from batonmq._core.queues import QueueRef
from batonmq_server.testing.memory_network import Faults
from batonmq_server.testing.virtual_time import run_virtual
from tests.simulation.cluster import BROKER, TOPIC, SimulatedCluster
from tests.simulation.expected_state import Violation
from tests.simulation.options import RunOptions
from tests.simulation.other_tasks import cancel_other_tasks
from tests.simulation.run_context import Later, RunContext
from tests.simulation.service_faults import ServiceFaults
from tests.simulation.simulated_members import SimulatedMembers
from tests.simulation.simulated_operator import SimulatedOperator
from tests.simulation.simulated_producer import SimulatedProducer
from tests.simulation.simulated_stranger import SimulatedStranger
from tests.simulation.trace import Trace

SETTLE_S = 240
"""After the last fault all work must be finished within this time."""
ALIKE_S = 30
"""After that all copies must be equal within this time."""
RETAKE_S = 8
"""After an outage every queue must have an owner within this time, which is less than a lease."""
ASK_S = 20
"""Interval at which the operator diagnoses the queues meanwhile."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run.

    Attributes:
        counts: Number of events by kind.
        violation: The first broken property.
    """

    seed: str
    options: RunOptions
    counts: Mapping[str, int]
    trace: Trace
    violation: Violation | None

    @property
    def broken_rule(self) -> str | None:
        """The broken property, such as "V3"."""
        return None if self.violation is None else str(self.violation).partition(":")[0]

    def lines(self) -> list[str]:
        """Return the kept lines of the transcript."""
        return self.trace.lines()

    def check(self) -> None:
        """Raise the violation, with seed and options to repeat the run."""
        if self.violation is not None:
            raise Violation(f"seed {self.seed}, {self.options}\n{self.violation}")


def play(seed: str, options: RunOptions, *, kept_max: int | None = 4_000) -> RunResult:
    """Execute one run in virtual time.

    The garbage collector is off meanwhile: it would close abandoned generators at random times.
    """
    gc.disable()
    try:
        return run_virtual(_play(seed, options, kept_max))
    finally:
        gc.enable()


async def _play(seed: str, options: RunOptions, kept_max: int | None) -> RunResult:
    cluster = SimulatedCluster(seed, kept_max=kept_max)
    run = SimulationRun(cluster, options)
    logging.getLogger().addHandler(cluster.trace)
    try:
        await run.play()
    finally:
        logging.getLogger().removeHandler(cluster.trace)
        cluster.trace.end()
        cluster.checker.expected.watching = False
        counts = cluster.checker.expected.counts + cluster.network.counts + run.context.counts
        await _end(cluster)
    return RunResult(seed, options, counts, cluster.trace, cluster.checker.expected.violation)


async def _end(cluster: SimulatedCluster) -> None:
    """Cancel the tasks of every process, also of killed ones, so that the loop can close."""
    cluster.network.end()
    for host in cluster.hosts:
        host.thaw()
    await cancel_other_tasks()


class SimulationRun:
    """The scenario of one run."""

    def __init__(self, cluster: SimulatedCluster, options: RunOptions) -> None:
        self.cluster, self.options = cluster, options
        self.context = RunContext(cluster, options)
        cluster.checker.expected.by_key = options.by_key
        cluster.checker.replicas.min_in_sync = options.min_in_sync
        cluster.checker.stores.min_in_sync = min(options.min_in_sync, options.stores)
        self._members = SimulatedMembers(self.context)
        self._service_faults = ServiceFaults(self.context, self._members)
        self._producer = SimulatedProducer(self.context)
        self._operator = SimulatedOperator(self.context)
        self._stranger = SimulatedStranger(self.context)
        self._later: list[asyncio.Task[None]] = []

    async def play(self) -> None:
        """Execute the run; stop at the first violation."""
        async with asyncio.TaskGroup() as tasks:
            await unless(self.cluster.checker.expected.broken, self._direct(tasks))
            for task in self._later:
                task.cancel()

    async def _direct(self, tasks: asyncio.TaskGroup) -> None:
        random = self.context.random
        self._service_faults.start()
        self._producer.start()
        await self.context.until(lambda: self._producer.ready, 60)
        await self._operator.prepare()
        for _ in range(self.options.consumers):
            self._members.join()
        self._producer.burst()
        self.cluster.network.faults = self.options.faults
        actions = self._actions()
        for _ in range(self.options.steps):
            await asyncio.sleep(random.choice([0.01, 0.3, 2, 6]) * random.random())
            action = random.choices(list(actions), list(actions.values()))[0]
            later = action()
            if later is not None:
                self._later.append(tasks.create_task(later))
        await self._settle(tasks)

    def _actions(self) -> dict[Callable[[], Later], int]:
        """Return the possible actions and their weights."""
        options = self.options
        return {
            self._producer.burst: 8,
            self._members.join: options.joins,
            self._members.leave: options.leaves,
            self._members.kill: options.kills,
            self._members.pause: options.pauses,
            self._members.switch: options.switches,
            self._members.break_watches: options.watch_breaks,
            self._service_faults.kill: options.service_kills,
            self._service_faults.pause: options.service_pauses,
            self._service_faults.restart: options.service_restarts,
            self._service_faults.cut: options.cuts,
            self._service_faults.deafen: options.deaf,
            self._service_faults.fail_leader: options.leader_faults,
            self._service_faults.fail_in_two_steps: options.two_steps,
            self._service_faults.end_lease: options.ended_leases,
            self._service_faults.split: options.splits,
            self._service_faults.lose_disk: options.lost_disks,
            self._service_faults.rot: options.rots,
            self._service_faults.fail_disk: options.disk_failures,
            self._service_faults.strand: options.strandings,
            self._service_faults.jump: options.jumps,
            self._operator.reset: options.resets,
            self._operator.force: options.forces,
            self._operator.pause: options.group_pauses,
            self._operator.ask: options.questions,
            self._operator.move: options.moves,
            self._stranger.write: options.forgeries,
            self._stranger.steal: options.thefts,
            self._stranger.intrude: options.intrusions,
            self._drain: options.drains,
            self._service_faults.drain_alone: options.lone_drains,
        }

    def _drain(self) -> Later:
        if chosen := self._service_faults.node_to_drain():
            self._operator.drain(*chosen, self._service_faults.restart_node)
        return None

    async def _settle(self, tasks: asyncio.TaskGroup) -> None:
        """End all faults and check that the remaining work is finished (L1, L2, L4)."""
        if self.options.outage_ms:
            await self._service_faults.make_unreachable(self.options.outage_ms)
        if self.options.switches_identities:
            await self._service_faults.switch_on_identities()
        await asyncio.sleep(0)  # the last fault has begun
        self.cluster.trace.note("director", "faults cease")
        self.cluster.network.faults = Faults()
        self._service_faults.settle()
        self._members.settle()
        self._later.append(tasks.create_task(self._operator.settle()))
        if self.options.outage_ms or self.options.switches_identities:
            await self._check_retaken()
        for _ in range(0, SETTLE_S, ASK_S):
            await self.context.until(self._done, ASK_S)
            if self._done():
                break
            self._operator.ask()
        for replicas in (self.cluster.checker.replicas, self.cluster.checker.stores):
            await self.context.until(replicas.alike, ALIKE_S)
            replicas.check_alike()
        # The stranger may have stored a message under an id of the producer meanwhile.
        await self.context.until(self._done, ASK_S)
        self.cluster.checker.check_complete(self._producer.acked)

    async def _check_retaken(self) -> None:
        """L4: the members run, so no queue waits for a lease to expire."""
        queues = {QueueRef(TOPIC, BROKER, number) for number in range(self.options.queues)}

        def missing() -> list[QueueRef]:
            owned = {queue for member in self._members.present() for queue in member.assignment}
            return sorted(queues - owned)

        await self.context.until(lambda: not missing(), RETAKE_S)
        if without := missing():
            names = ", ".join(map(str, without))
            text = f"{RETAKE_S} s after the services are back no member owns {names}"
            self.cluster.checker.expected.fail("L4", text)

    def _done(self) -> bool:
        settled = not self._producer.unsettled and not self._operator.busy
        checker = self.cluster.checker
        return settled and checker.stores.quiet() and checker.complete()
