"""Leaders that are drained while no other node could lead: they lead on, and hand over later."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from batonmq_server.runtime.etcd.session import Put
from batonmq_server.testing.processes import SimulatedService
from tests.simulation.offsets_replica_checks import OffsetsReplicaChecks
from tests.simulation.run_context import RunContext

LATE_S = 2.5
"""After this time a leader knows that frozen followers lag."""
ALONE_S = 2.0
"""A drained leader is watched this long while no other node could lead."""
HANDOVER_S = 20
"""Within this time after the followers go on another node must lead: they catch up and join the
in-sync set, the leader resigns, and one of them is elected."""


class LoneDrain:
    """The drain of one leader of three whose followers have just been frozen.

    A nameserver would refuse it; the mark is written as one whose followers failed right after.

    Args:
        running: The running processes, by name.
        names: The nodes of the replica set.
        key: Key of its election.
    """

    def __init__(
        self,
        context: RunContext,
        checks: OffsetsReplicaChecks,
        running: Mapping[str, SimulatedService],
        names: Sequence[str],
        key: str,
    ) -> None:
        self._context, self._checks, self._running = context, checks, running
        self._names, self._key = names, key

    async def happen(self, leader: SimulatedService) -> None:
        """Freeze the followers, drain the leader, and judge what it does before and after."""
        cluster, name = self._context.cluster, leader.name
        mark = f"{self._key}/drained/{name}"
        followers = [self._running[one] for one in self._names if one != name]
        if not all(map(self._works, followers)):
            return
        for one in followers:
            one.freeze()
        await asyncio.sleep(LATE_S)
        if self._leads(leader) and all(one.frozen for one in followers):
            self._context.note(f"{name} is drained, and its followers are frozen", "lone drains")
            cluster.etcd.txn((), [Put(mark, b"")], ())
            if await self._holds(leader, ALONE_S) is False and all(one.frozen for one in followers):
                self._checks.fail(f"{name} resigns, and no other node could lead", "drain")
        for one in followers:
            one.thaw()
        self._context.note(f"the followers of {name} go on")
        if cluster.etcd.get(mark) is not None:
            if await self._holds(leader, HANDOVER_S):
                self._checks.fail(f"{name} leads {HANDOVER_S} s after its drain", "drain")
            cluster.etcd.txn((), (), [mark])
            self._context.note(f"{name} is not drained any more")

    async def _holds(self, leader: SimulatedService, time_s: float) -> bool | None:
        """Return whether the leader leads for this time; None if something else disturbs it."""
        loop = self._context.cluster.loop
        end_s = loop.time() + time_s
        while loop.time() < end_s:
            if not self._works(leader):
                return None
            if not self._leads(leader):
                return False
            await asyncio.sleep(0.1)
        return True

    def _leads(self, leader: SimulatedService) -> bool:
        return self._works(leader) and self._context.cluster.leader(self._key) == leader.name

    def _works(self, process: SimulatedService) -> bool:
        running = self._running[process.name] is process
        return running and process.alive and not process.frozen and not process.leaving
