"""One broker of three storage nodes, for runs in which followers take over."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random

from batonmq.errors import BatonError
from batonmq_server.testing import MemoryBroker
from batonmq_server.testing.memory_network import Faults

SET, NODES = "broker-set", 3
LEADER_KEY = f"elections/storage/{SET}"
REPLICATED: Mapping[str, object] = {
    "broker": SET,
    "replicas": ",".join(f"broker-{number}" for number in range(NODES)),
    "leader_lease_ms": 4_000,
    "replica_lag_ms_max": 1_500,
}
FAULT_S_MAX = 9
FAULTS = Faults(loss=0.01, duplicate=0.02, slow=0.01, slow_ms_max=4_000)


class BrokerSet(MemoryBroker):
    """One broker of three storage nodes, whose leader a run lets fail.

    Args:
        storage: Settings of the nodes, beside those of a replica set.
        cluster: Name of the cluster.
    """

    def __init__(
        self,
        seed: str,
        random: Random,
        storage: Mapping[str, object],
        *,
        cluster: str = "baton",
    ) -> None:
        settings: dict[str, Mapping[str, object]] = {
            service: {"cluster": cluster} for service in ("nameserver", "lockmgr", "offsets")
        }
        replicated = {**REPLICATED, "min_in_sync": random.choice((1, 2))}
        settings["storage"] = {"cluster": cluster, **storage, **replicated}
        super().__init__(broker_count=NODES, seed=seed, faults=FAULTS, settings=settings)
        self._draws, self._led_by = random, ""
        self.takeovers = 0

    def leader(self) -> str:
        """Return the node that leads, or that led last; count the changes."""
        stored = self._environment.etcd.get(LEADER_KEY)
        name = stored.value.decode() if stored is not None else self._led_by
        if name != self._led_by:
            self.takeovers += bool(self._led_by)
            self._led_by = name
        return name

    async def fail(self) -> str:
        """Kill, freeze or cut off a node for a while, mostly the leader; return what was done."""
        random = self._draws
        leader = self.leader()
        failing_leader = random.random() < 0.8 and leader
        name = failing_leader or f"broker-{random.randrange(NODES)}"
        process, while_s = self._running[name], random.uniform(0.5, FAULT_S_MAX)
        kind = random.choice(("killed", "frozen", "cut off"))
        if kind == "killed":
            await self._kill([name])
            await asyncio.sleep(while_s)
            self._start(process.service)
        elif kind == "frozen":
            process.freeze()
            await asyncio.sleep(while_s)
            process.thaw()
        else:
            with self._disconnected(name):
                await asyncio.sleep(while_s)
        self.leader()
        return f"{'leader' if name == leader else 'follower'} {kind}"

    async def _registered(self) -> None:
        """Wait until the other services and one node of storage are registered as leaders."""
        others = {f"{name}:1" for name in self._running if not name.startswith("broker-")}
        while True:
            try:
                nodes = (await self._admin.cluster()).nodes
            except BatonError:
                nodes = ()
            leaders = {node.address for node in nodes if node.leader}
            if others <= leaders and any(each.startswith("broker-") for each in leaders):
                return
            await asyncio.sleep(0.1)
