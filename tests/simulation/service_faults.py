"""Faults of the services, links and clocks of a run."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from batonmq_server.testing.processes import LoopClock, ServiceSpec, SimulatedService
from tests.simulation.cluster import LOCKMGR_KEY, REPLICAS, STORES, services
from tests.simulation.lone_drains import LoneDrain
from tests.simulation.offsets_replica_checks import LEADER_KEY
from tests.simulation.run_context import Later, RunContext
from tests.simulation.simulated_members import SimulatedMembers
from tests.simulation.storage_replica_checks import LEADER_KEY as STORE_LEADER_KEY
from tests.simulation.two_step_failures import TwoStepFailure

STOP_S = 30
"""A service that does not stop within this time is killed, as by a supervisor."""


class ServiceFaults:
    """Injects faults into services, links and clocks."""

    def __init__(self, context: RunContext, members: SimulatedMembers) -> None:
        self._context, self._members = context, members
        self._services = services(context.cluster, context.random, context.options)
        self._running: dict[str, SimulatedService] = {}
        self._lives: Counter[str] = Counter()
        self._stranded = False
        self._fails_in_two_steps = self._drains_alone = self._settled = False

    def start(self) -> None:
        """Start all services."""
        for service in self._services:
            self._start(service)

    def settle(self) -> None:
        """Undo all faults."""
        self._settled = True
        self._context.cluster.network.cut.clear()
        for process in self._running.values():
            self._mend_disk(process.name)
            if process.alive:
                process.thaw()
        for service in self._services:
            if not self._running[service.name].alive:
                self._start(service)

    async def make_unreachable(self, duration_ms: int) -> None:
        """Make all services unreachable for a while; until `settle` if they are killed."""
        random, network = self._context.random, self._context.cluster.network
        if random.random() < 0.7:
            self._context.note("all services are killed", "outages")
            for process in self._running.values():
                process.kill(noticed=random.random() < 0.7)
                self._crash_disk(process)
            await asyncio.sleep(duration_ms / 1000)
            return
        self._context.note("no member reaches a service", "outages")
        pairs = [(member, name) for member in self._members.names for name in self._running]
        links = {*pairs, *((name, member) for member, name in pairs)}
        network.cut |= links
        await asyncio.sleep(duration_ms / 1000)
        network.cut -= links

    async def switch_on_identities(self) -> None:
        """Restart the services one by one, in any order, each with access control."""
        for service in self._context.random.sample(self._services, len(self._services)):
            process = self._running[service.name]
            await self._context.until(lambda alive=process: alive.alive, STOP_S)  # type: ignore[misc]
            self._context.cluster.knowing_identities.add(service.name)
            self._context.note(f"{service.name} gets access control", "identities on")
            process = self._running[service.name]
            process.stop()
            await self._replace(process)
            await asyncio.sleep(self._context.random.choice([0, 1, 5]))

    def kill(self) -> Later:
        """Kill a service and restart it."""
        if not self._up():
            return None
        return self._kill(self._context.random.choice(self._up()))

    def _kill(self, process: SimulatedService) -> Later:
        self._kill_for_good(process)
        return self._start_again(process)

    def _kill_for_good(self, process: SimulatedService) -> None:
        process.kill(noticed=self._context.random.random() < 0.7)
        self._context.note(f"{process.name} is killed", "service kills")
        self._crash_disk(process)

    def pause(self) -> Later:
        """Freeze a service for a while."""
        up = self._up()
        if not up:
            return None
        return self._context.freeze(self._context.random.choice(up), "service pauses")

    def restart(self) -> Later:
        """Stop a service gracefully and restart it."""
        if not self._up():
            return None
        process = self._context.random.choice(self._up())
        self._mend_disk(process.name)
        process.stop()
        self._context.note(f"{process.name} is stopped", "service restarts")
        return self._replace(process)

    def cut(self) -> Later:
        """Cut a link in one direction or both, or all links of a process."""
        random = self._context.random
        names = ["etcd", *self._running, *self._members.names]
        one = random.choice(names)
        others = names if random.random() < 0.3 else [random.choice(names)]
        pairs = {(one, other) for other in others if other != one}
        if random.random() < 0.7:
            pairs |= {(other, one) for one, other in pairs}
        return self._apart(one, pairs)

    def deafen(self) -> Later:
        """Cut a member from the lock managers or from the nameservers."""
        random, present = self._context.random, self._members.present()
        if not present:
            return None
        member = random.choice(present).name
        locks, names = ("lock-a", "lock-b"), ("ns-a", "ns-b")
        unheard = random.choice([locks, names, locks + names])
        pairs = {(member, one) for one in unheard} | {(one, member) for one in unheard}
        return self._apart(member, pairs)

    def fail_leader(self) -> Later:
        """Kill, freeze or cut off the acting leader of offsets or storage."""
        leader = self._leader_of(self._replicas())
        if leader is None:
            return None
        fault = self._context.random.choice(["kill", "freeze", "cut"])
        if fault == "freeze":
            return self._context.freeze(leader, "leader faults")
        self._context.counts["leader faults"] += 1
        if fault == "kill":
            return self._kill(leader)
        return self._split(leader.name, alone=self._context.random.random() < 0.5)

    def fail_in_two_steps(self) -> Later:
        """Cut the leader of three nodes from the others, not from etcd; it may die then."""
        names = self._replicas()
        leader = self._leader_of(names) if len(names) == 3 else None
        if leader is None or self._fails_in_two_steps:
            return None
        checker = self._context.cluster.checker
        checks = checker.replicas if names is REPLICAS else checker.stores
        failure = TwoStepFailure(self._context, checks, self._running, names, self._kill_for_good)
        self._fails_in_two_steps = True
        return self._fail_in_two_steps(failure, leader)

    def drain_alone(self) -> Later:
        """Drain the leader of three nodes while its followers are frozen."""
        names = self._replicas()
        leader = self._leader_of(names) if len(names) == 3 else None
        if leader is None or self._drains_alone:
            return None
        of_offsets = names is REPLICAS
        checker = self._context.cluster.checker
        checks = checker.replicas if of_offsets else checker.stores
        key = LEADER_KEY if of_offsets else STORE_LEADER_KEY
        self._drains_alone = True
        return self._drain_alone(
            LoneDrain(self._context, checks, self._running, names, key), leader
        )

    def restart_node(self, name: str) -> Later:
        """Stop a node gracefully and restart it, as in a maintenance."""
        process = self._running[name]
        if process not in self._up():
            return None
        self._mend_disk(name)
        process.stop()
        self._context.note(f"{name} is stopped for maintenance", "maintenances")
        return self._replace(process)

    def node_to_drain(self) -> tuple[str, str] | None:
        """Return service and name of a node of a replica set, as a rule of its leader."""
        names = self._replicas()
        if len(names) < 2:
            return None
        service = "offsets" if names is REPLICAS else "storage"
        leader = self._leader_of(names)
        if leader is not None and self._context.random.random() < 0.7:
            return service, leader.name
        return service, self._context.random.choice(names)

    def end_lease(self) -> None:
        """End the lease of a running leader, as a sibling does that considers the leader gone."""
        random, cluster = self._context.random, self._context.cluster
        keys = (LEADER_KEY, STORE_LEADER_KEY, LOCKMGR_KEY)
        led = [key for key in keys if cluster.leader(key)]
        if not led:
            return
        key = random.choice(led)
        self._context.note(f"the lease of {cluster.leader(key)} is ended", "ended leases")
        cluster.end_lease(key)

    def split(self) -> Later:
        """Cut a node of a replica set from some others or from etcd, in one direction or both."""
        return self._split(self._context.random.choice(self._replicas()))

    def strand(self) -> Later:
        """Cut all storage nodes from etcd; later end that for all but one, perhaps the leader."""
        stores = STORES[: self._context.options.stores]
        if self._stranded:
            return None
        self._stranded = True
        leader = self._context.cluster.leader(STORE_LEADER_KEY)
        one = self._context.random.choice([*stores, leader or stores[0]])
        return self._strand(stores, one)

    async def _strand(self, stores: Sequence[str], one: str) -> None:
        cut = self._context.cluster.network.cut
        links = {pair for name in stores for pair in ((name, "etcd"), ("etcd", name))}
        alone = {(one, "etcd"), ("etcd", one), *((one, name) for name in stores if name != one)}
        if self._settled:
            return
        cut |= links
        self._context.note(f"storage is cut off from etcd, {one} for longer", "strandings")
        await asyncio.sleep(self._context.random.uniform(3, 9))
        cut -= links
        if self._settled:
            return
        cut |= alone
        await asyncio.sleep(self._context.random.uniform(15, 40))
        cut -= alone
        self._stranded = False

    def lose_disk(self) -> Later:
        """Restart a node of a replica set with an empty disk."""
        return self._come_back_poorer(self._replicas(), self._lose_disk)

    def rot(self) -> Later:
        """Restart a storage node with a damaged log."""
        return self._come_back_poorer(STORES, self._rot)

    def fail_disk(self) -> Later:
        """Fail the writes to the disk of a storage node for a while."""
        up = [process for process in self._up() if process.name in STORES]
        if not up:
            return None
        return self._fail_disk(self._context.random.choice(up).name)

    def jump(self) -> None:
        """Move a wall clock by hours."""
        random = self._context.random
        process = random.choice([*self._all_processes()])
        assert isinstance(process.clock, LoopClock)
        process.clock.ahead_ms += random.choice([-1, 1]) * random.randint(1, 7_200_000)
        self._context.note(f"wall clock of {process.name} jumps", "jumps")

    def _all_processes(self) -> Iterable[SimulatedService]:
        yield from self._running.values()
        yield from self._members.processes  # type: ignore[misc]

    def _start(self, service: ServiceSpec) -> None:
        self._mend_disk(service.name)
        self._lives[service.name] += 1
        life = self._lives[service.name]
        self._running[service.name] = SimulatedService(self._context.cluster, service, life)
        self._context.note(f"{service.name} starts")

    def _up(self) -> list[SimulatedService]:
        return [
            process
            for process in self._running.values()
            if process.alive and not process.frozen and not process.leaving
        ]

    def _crash_disk(self, process: SimulatedService) -> None:
        cluster, random = self._context.cluster, self._context.random
        disk = cluster.storage_disks.get(process.name)
        if disk is None:
            return
        if self._context.options.power_cuts and random.random() < 0.5:
            survives = random.choice([0.0, 0.5, 1.0])
            cluster.storage_disks[process.name] = disk.power_cut(
                lambda size: size if random.random() < survives else random.randint(0, size)
            )
            self._context.counts["power cuts"] += 1
        else:
            cluster.storage_disks[process.name] = disk.killed()

    async def _start_again(self, process: SimulatedService) -> None:
        random = self._context.random
        await asyncio.sleep(random.choice([0.2, 2, 10]) * random.random())
        if self._running[process.name] is process:
            self._start(process.service)

    def _replicas(self) -> Sequence[str]:
        """Return the nodes of a replica set."""
        options = self._context.options
        stores = STORES[: options.stores]
        if options.replicated and len(stores) > 1:
            return self._context.random.choice([REPLICAS, stores])
        return REPLICAS if options.replicated else stores

    def _leader_of(self, names: Sequence[str]) -> SimulatedService | None:
        """Return the acting leader of a replica set, if it is up."""
        name = self._context.cluster.leader(LEADER_KEY if names is REPLICAS else STORE_LEADER_KEY)
        return next((one for one in self._up() if one.name == name), None)

    async def _fail_in_two_steps(self, failure: TwoStepFailure, leader: SimulatedService) -> None:
        if self._settled:
            return
        await failure.happen(leader)
        self._fails_in_two_steps = False
        if not leader.alive and self._running[leader.name] is leader:
            self._start(leader.service)

    async def _drain_alone(self, drain: LoneDrain, leader: SimulatedService) -> None:
        if not self._settled:
            await drain.happen(leader)
        self._drains_alone = False

    def _come_back_poorer(self, names: Sequence[str], lose: Callable[[str], None]) -> Later:
        """Kill a node and damage its data, after its last write to etcd, unless it has the only
        complete copy.
        """
        up = [process for process in self._up() if process.name in names]
        if not up:
            return None
        process = self._context.random.choice(up)
        process.kill()
        self._context.note(f"{process.name} is killed")
        self._context.cluster.crash_disk(process.name)
        return self._lose_and_start(process, lose)

    async def _lose_and_start(self, process: SimulatedService, lose: Callable[[str], None]) -> None:
        cluster, name = self._context.cluster, process.name
        await asyncio.sleep(cluster.network.faults.slow_ms_max / 1000 + 0.1)
        if self._running[name] is not process:
            return
        checks = cluster.checker.replicas if name in REPLICAS else cluster.checker.stores
        if checks.may_lose(name):
            lose(name)
        self._start(process.service)

    def _lose_disk(self, name: str) -> None:
        cluster = self._context.cluster
        (cluster.lose_offsets_disk if name in REPLICAS else cluster.lose_store_disk)(name)
        self._context.note(f"{name} has lost its disk", "lost disks")

    def _rot(self, name: str) -> None:
        cluster = self._context.cluster
        if cluster.checker.stores.rot(name, cluster.storage_disks[name], self._context.random):
            self._context.note(f"the log of {name} rots", "rots")

    async def _fail_disk(self, name: str) -> None:
        self._context.cluster.storage_disks[name].fail(OSError(errno.EIO, "input/output error"))
        self._context.note(f"the disk of {name} fails", "disk failures")
        await asyncio.sleep(self._context.time_s())
        self._mend_disk(name)

    def _mend_disk(self, name: str) -> None:
        """End the fault of a disk before its node stops or starts: the node would only exit."""
        disk = self._context.cluster.storage_disks.get(name)
        if disk is not None:
            disk.fail(None)

    async def _replace(self, process: SimulatedService) -> None:
        await self._context.until(lambda: not process.alive, STOP_S)
        if process.alive:
            process.kill()
            self._context.note(f"{process.name} does not stop, and is killed", "stops that hang")
            self._crash_disk(process)
        await self._start_again(process)

    def _split(self, node: str, *, alone: bool = False) -> Later:
        random = self._context.random
        names = REPLICAS if node in REPLICAS else STORES[: self._context.options.stores]
        others = [name for name in (*names, "etcd") if name != node]
        chosen = others if alone else random.sample(others, random.randint(1, len(others)))
        ways = random.choice(["from", "to", "both"])
        pairs = {(node, other) for other in chosen if ways != "from"}
        return self._apart(node, pairs | {(other, node) for other in chosen if ways != "to"})

    async def _apart(self, one: str, pairs: set[tuple[str, str]]) -> None:
        network = self._context.cluster.network
        if self._settled:  # the last fault was drawn, and its task began after the end of faults
            return
        network.cut |= pairs
        self._context.note(f"{one} is cut off {sorted(pairs)}", "cuts")
        await asyncio.sleep(self._context.time_s())
        network.cut -= pairs
