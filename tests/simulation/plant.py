"""The services of a run, and what is between all processes: they die, stand still, are cut off."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from batonmq.testing.processes import LoopClock, Service, ServiceProcess
from tests.simulation.cluster import BROKER, REPLICAS, services
from tests.simulation.crew import Crew
from tests.simulation.stage import Later, Stage

STOP_S = 30
"""A service that was told to stop is killed after this time, as a supervisor does."""


class Plant:
    """Makes things happen to services, links and clocks."""

    def __init__(self, stage: Stage, crew: Crew) -> None:
        self._stage, self._crew = stage, crew
        self._services = services(stage.world, stage.random, stage.options)
        self._running: dict[str, ServiceProcess] = {}
        self._lives: Counter[str] = Counter()

    def start(self) -> None:
        """All services begin."""
        for service in self._services:
            self._start(service)

    def settle(self) -> None:
        """Everything is whole again."""
        self._stage.world.network.cut.clear()
        for process in self._running.values():
            if process.alive:
                process.thaw()
        for service in self._services:
            if not self._running[service.name].alive:
                self._start(service)

    def kill(self) -> Later:
        """One dies, and is started again."""
        if not self._up():
            return None
        return self._kill(self._stage.random.choice(self._up()))

    def _kill(self, process: ServiceProcess) -> Later:
        process.kill(noticed=self._stage.random.random() < 0.7)
        self._stage.note(f"{process.name} is killed", "service kills")
        if process.service.kind == "storage":
            self._crash_disk()
        return self._start_again(process)

    def pause(self) -> Later:
        """One stands still for a while."""
        up = self._up()
        if not up:
            return None
        return self._stage.freeze(self._stage.random.choice(up), "service pauses")

    def restart(self) -> Later:
        """One is stopped in good order, and started again."""
        if not self._up():
            return None
        process = self._stage.random.choice(self._up())
        process.stop()
        self._stage.note(f"{process.name} is stopped", "service restarts")
        return self._replace(process)

    def cut(self) -> Later:
        """A link is down, in one direction or both, or all links of a process."""
        random = self._stage.random
        names = ["etcd", *self._running, *self._crew.names]
        one = random.choice(names)
        others = names if random.random() < 0.3 else [random.choice(names)]
        pairs = {(one, other) for other in others if other != one}
        if random.random() < 0.7:
            pairs |= {(other, one) for one, other in pairs}
        return self._apart(one, pairs)

    def deafen(self) -> Later:
        """A member reaches storage and offsets, and no lock manager, or no nameserver."""
        random, present = self._stage.random, self._crew.present()
        if not present:
            return None
        member = random.choice(present).name
        locks, names = ("lock-a", "lock-b"), ("ns-a", "ns-b")
        unheard = random.choice([locks, names, locks + names])
        pairs = {(member, one) for one in unheard} | {(one, member) for one in unheard}
        return self._apart(member, pairs)

    def fail_master(self) -> Later:
        """The acting master of offsets dies, stands still, or is cut off."""
        master = next((one for one in self._up() if one.name == self._stage.world.master()), None)
        if master is None:
            return None
        fault = self._stage.random.choice(["kill", "freeze", "cut"])
        if fault == "freeze":
            return self._stage.freeze(master, "master faults")
        self._stage.counts["master faults"] += 1
        if fault == "kill":
            return self._kill(master)
        return self._split(master.name, alone=self._stage.random.random() < 0.5)

    def split(self) -> Later:
        """A node of offsets reaches some others, or etcd, no more, or is not reached."""
        return self._split(self._stage.random.choice(REPLICAS))

    def lose_disk(self) -> Later:
        """A node of offsets comes back with an empty disk."""
        up = [process for process in self._up() if process.name in REPLICAS]
        if not up:
            return None
        process = self._stage.random.choice(up)
        process.kill()
        self._stage.note(f"{process.name} is killed")
        return self._come_back_empty(process)

    def jump(self) -> None:
        """A wall clock jumps."""
        random = self._stage.random
        process = random.choice([*self._all_processes()])
        assert isinstance(process.clock, LoopClock)
        process.clock.ahead_ms += random.choice([-1, 1]) * random.randint(1, 7_200_000)
        self._stage.note(f"wall clock of {process.name} jumps", "jumps")

    def _all_processes(self) -> Iterable[ServiceProcess]:
        yield from self._running.values()
        yield from self._crew.processes  # type: ignore[misc]

    def _start(self, service: Service) -> None:
        self._lives[service.name] += 1
        life = self._lives[service.name]
        self._running[service.name] = ServiceProcess(self._stage.world, service, life)
        self._stage.note(f"{service.name} starts")

    def _up(self) -> list[ServiceProcess]:
        return [
            process
            for process in self._running.values()
            if process.alive and not process.frozen and not process.leaving
        ]

    def _crash_disk(self) -> None:
        world, random = self._stage.world, self._stage.random
        disk = world.storage_disks[BROKER]
        if self._stage.options.power_cuts and random.random() < 0.5:
            survives = random.choice([0.0, 0.5, 1.0])
            world.storage_disks[BROKER] = disk.power_cut(
                lambda size: size if random.random() < survives else random.randint(0, size)
            )
            self._stage.counts["power cuts"] += 1
        else:
            world.storage_disks[BROKER] = disk.killed()

    async def _start_again(self, process: ServiceProcess) -> None:
        random = self._stage.random
        await asyncio.sleep(random.choice([0.2, 2, 10]) * random.random())
        if self._running[process.name] is process:
            self._start(process.service)

    async def _come_back_empty(self, process: ServiceProcess) -> None:
        """Once etcd has heard all that it said; unless nobody but it has everything."""
        world = self._stage.world
        await asyncio.sleep(world.network.faults.slow_ms_max / 1000 + 0.1)
        if self._running[process.name] is not process:
            return
        if world.checker.replicas.may_lose(process.name):
            world.lose_offsets_disk(process.name)
            self._stage.note(f"{process.name} has lost its disk", "lost disks")
        self._start(process.service)

    async def _replace(self, process: ServiceProcess) -> None:
        await self._stage.until(lambda: not process.alive, STOP_S)
        if process.alive:
            process.kill()
            self._stage.note(f"{process.name} does not stop, and is killed", "stops that hang")
            if process.service.kind == "storage":
                self._crash_disk()
        await self._start_again(process)

    def _split(self, node: str, *, alone: bool = False) -> Later:
        random = self._stage.random
        others = [name for name in (*REPLICAS, "etcd") if name != node]
        chosen = others if alone else random.sample(others, random.randint(1, len(others)))
        ways = random.choice(["from", "to", "both"])
        pairs = {(node, other) for other in chosen if ways != "from"}
        return self._apart(node, pairs | {(other, node) for other in chosen if ways != "to"})

    async def _apart(self, one: str, pairs: set[tuple[str, str]]) -> None:
        network = self._stage.world.network
        network.cut |= pairs
        self._stage.note(f"{one} is cut off {sorted(pairs)}", "cuts")
        await asyncio.sleep(self._stage.time_s())
        network.cut -= pairs
