"""Leaders that fail in two steps: first the other nodes can't reach them, then they may die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from batonmq_server.testing.processes import SimulatedService
from tests.simulation.offsets_replica_checks import OffsetsReplicaChecks
from tests.simulation.run_context import RunContext

SUCCESSOR_S = 30
"""Within this time another node must serve: silence, its proof by etcd, the resignation, the expiry
of a lease, and an election, each of them slowed down by lost messages."""


class TwoStepFailure:
    """The failure of one leader of three, and the check that the other two serve instead.

    Args:
        running: The running processes, by name.
        names: The nodes of the replica set.
        kill: Kills a process for good.
    """

    def __init__(
        self,
        context: RunContext,
        checks: OffsetsReplicaChecks,
        running: Mapping[str, SimulatedService],
        names: Sequence[str],
        kill: Callable[[SimulatedService], None],
    ) -> None:
        self._context, self._checks, self._running = context, checks, running
        self._names, self._kill = names, kill

    async def happen(self, leader: SimulatedService) -> None:
        """Cut the leader off, perhaps kill it, and wait until another node serves."""
        random, network = self._context.random, self._context.cluster.network
        others = [name for name in self._names if name != leader.name]
        processes = [self._running[name] for name in others]
        # A follower whose calls arrive, without answers, is cut off only if something is written.
        pairs = {(other, leader.name) for other in others}
        if random.random() < 0.5:
            pairs |= {(leader.name, other) for other in others}
        epoch, must_serve = self._checks.epoch, self._must_serve()
        network.cut |= pairs
        self._context.note(f"{leader.name} is cut off {sorted(pairs)}", "two-step failures")
        await asyncio.sleep(random.uniform(0, 8))
        if not pairs <= network.cut:
            return  # the faults of the run have ended
        if random.random() < 0.6 and leader.alive and self._running[leader.name] is leader:
            self._context.note(f"{leader.name} is killed, and stays so for a while")
            self._kill(leader)
        end_s = self._now_s() + SUCCESSOR_S
        while pairs <= network.cut and self._now_s() < end_s:
            if self._checks.served_since(epoch, leader.name):
                self._context.counts["successors"] += must_serve
                break
            must_serve = must_serve and self._undisturbed(processes)
            await asyncio.sleep(0.1)
        else:
            if must_serve and pairs <= network.cut:
                self._checks.fail(f"no node serves {SUCCESSOR_S} s after {leader.name} failed")
        network.cut -= pairs

    def _must_serve(self) -> bool:
        """Return whether each of the others could be elected, and stays so by the rules.

        If one member is enough for a write, lost messages may leave the leader alone in the set.
        """
        options = self._context.options
        keeps = options.min_in_sync > 1 or not options.faults.loss
        return keeps and self._checks.all_electable(self._names)

    def _undisturbed(self, processes: Sequence[SimulatedService]) -> bool:
        """Return whether these processes work, and reach each other and etcd."""
        cluster = self._context.cluster
        names = [process.name for process in processes]
        there = {*names, "etcd"}
        broken = {
            name
            for name in names
            if name in cluster.storage_disks and cluster.storage_disks[name].fails
        }
        return (
            not broken
            and not any(
                source in there and target in there for source, target in cluster.network.cut
            )
            and all(
                self._running[process.name] is process
                and process.alive
                and not process.frozen
                and not process.leaving
                for process in processes
            )
        )

    def _now_s(self) -> float:
        return self._context.cluster.loop.time()
