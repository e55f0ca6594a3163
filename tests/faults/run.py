"""Plays a run: a real cluster under load, the director's faults, and then the history of it all."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from batonmq.admin import Admin
from batonmq.common.errors import BatonError
from batonmq.local.child import NotReady
from batonmq.local.cluster import LocalCluster
from batonmq.local.etcd import is_healthy
from batonmq.replication import replicas_of
from tests.e2e.member import now_us
from tests.faults.crowd import Crowd, crowd_at
from tests.faults.director import ETCD, MEMBER, Director, Fault, Strike
from tests.faults.history import History, Struck
from tests.faults.load import HASTY, PATIENT, Load
from tests.faults.member import GROUP, TOPIC
from tests.support.cluster import local_cluster

QUEUES = 8
_HEAL_S = 90.0
_DONE_S = 120.0
_LOOK_S = 0.1
_WARM_UP = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be played.

    Attributes:
        duration_s: No fault begins later than this after the first.
        faults: These, in place of what the seed gives.
        churns: Whether members come and go.
    """

    seed: int
    duration_s: float
    faults: tuple[Fault, ...] = ()
    churns: bool = True


@dataclass(slots=True)
class Stage:
    """The cluster and its members, while faults are made."""

    cluster: LocalCluster
    admin: Admin
    crowd: Crowd
    say: Callable[[str], None]
    sets: dict[str, list[str]]
    struck: list[Struck] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def make(self, fault: Fault) -> bool:
        """Make a fault and wait until the cluster has healed; whether it has."""
        victims = [(one, await self._victim(one)) for one in fault.strikes]
        what = ", ".join(f"{one.kind} {name}" for one, name in victims)
        self.say(f"{what} for {max(one.hold_ms for one in fault.strikes)} ms")
        struck = Struck(what=what, begin_us=now_us())
        self.struck.append(struck)
        async with asyncio.TaskGroup() as tasks:
            for strike, name in victims:
                tasks.create_task(self._strike(strike, name))
        struck.end_us = now_us()
        healed = await _within(_HEAL_S, self._is_whole)
        if not healed:
            self.problems.append(f"not healed {_HEAL_S:g} s after: {what}")
            return False
        struck.healed_us = now_us()
        await asyncio.sleep(fault.rest_ms / 1000)
        return True

    async def _victim(self, strike: Strike) -> str:
        """Who plays the part now."""
        if strike.part == MEMBER:
            await _within(_HEAL_S, lambda: self.crowd.pick(0) is not None)
            member = self.crowd.pick(strike.rank)
            return member.client_id if member else ""
        names = self.sets[strike.part]
        if strike.part != ETCD:
            leading = await self._leader(strike.part)
            names = [*leading, *(name for name in names if name not in leading)]
        return names[strike.rank % len(names)]

    async def _leader(self, part: str) -> list[str]:
        service, _, broker = part.partition(" ")
        with suppress(BatonError):
            nodes = (await self.admin.cluster()).nodes
            leading = [
                node
                for node in nodes
                if node.service == service and node.leader and broker in ("", node.replica_set)
            ]
            newest = max(leading, key=lambda node: node.epoch, default=None)
            if newest is not None:
                addresses = self.cluster.addresses
                return [name for name in self.sets[part] if addresses[name] == newest.address]
        return []

    async def _strike(self, strike: Strike, name: str) -> None:
        if strike.part == MEMBER:
            member = next((one for one in self.crowd.members if one.client_id == name), None)
            if member is not None:
                await (self.crowd.kill if strike.kind == "kill" else self.crowd.pause)(
                    member, strike.hold_ms
                )
            return
        try:
            if strike.kind == "restart":
                await self.cluster.restart(name)
            elif strike.kind == "pause":
                self.cluster.pause(name)
                await asyncio.sleep(strike.hold_ms / 1000)
                self.cluster.resume(name)
            else:
                await self.cluster.kill(name)
                await asyncio.sleep(strike.hold_ms / 1000)
                await self.cluster.start(name)
        except NotReady as error:
            self.problems.append(str(error))

    async def _is_whole(self) -> bool:
        """Whether everybody serves, somebody leads each set, and all could be elected."""
        await self._raise_the_dead()
        if not all([await is_healthy(one) for one in self.cluster.addresses["etcd"].split(",")]):
            return False
        try:
            nodes = (await self.admin.cluster()).nodes
            brokers = {node.replica_set for node in nodes if node.service == "storage"}
            sets = [*(("storage", one) for one in sorted(brokers)), ("offsets", "")]
            copies = [await replicas_of(self.admin, *one) for one in sets]
        except BatonError:
            return False
        there, addresses = {node.address for node in nodes}, self.cluster.addresses
        return (
            there.issuperset(addresses[name] for name in self.cluster.options.names)
            and any(node.service == "lockmgr" and node.leader for node in nodes)
            and all(found and all(one.in_sync for one in found) for found in copies)
        )

    async def _raise_the_dead(self) -> None:
        """Nobody should be dead by now; who is gets started again, and is told of."""
        for endpoint in self.cluster.endpoints():
            if endpoint.pid is None:
                self.problems.append(f"{endpoint.name} ended by itself")
                with suppress(NotReady):
                    await self.cluster.start(endpoint.name)


async def play(plan: Plan, folder: Path, say: Callable[[str], None]) -> History:
    """Play a run, in a folder of its own."""
    async with local_cluster(
        folder / "cluster", available=True, auto_restart=False, report=say
    ) as cluster:
        say("the cluster serves")
        sets = replica_sets(cluster)
        load = Load(cluster.nameserver)
        async with (
            Admin(cluster.nameserver) as admin,
            crowd_at(cluster.nameserver, folder) as crowd,
        ):
            await admin.create_topic(TOPIC, QUEUES)
            stage = Stage(cluster, admin, crowd, say, sets)
            history = History(begin_us=now_us())
            async with asyncio.TaskGroup() as tasks:
                sampling = tasks.create_task(load.sample())
                await _work(plan, stage, load)
                say("no more faults; the rest is handled")
                if not await _within(_DONE_S, lambda: _is_done(admin)):
                    stage.problems.append(f"not everything was handled after {_DONE_S:g} s")
                history.end_us = now_us()
                sampling.cancel()
            await crowd.disperse()
            history.sends, history.samples = load.sends, load.samples
            history.handlings, history.crashes = crowd.handlings(), crowd.crashes
            history.faults, history.problems = stage.struck, [*stage.problems, *crowd.problems]
    return history


def replica_sets(cluster: LocalCluster) -> dict[str, list[str]]:
    """Names of processes by part."""
    sets = defaultdict(list)
    for member in cluster.options.members:
        sets[f"{member.service} {member.settings.get('broker', '')}".strip()].append(member.name)
    etcds = [one.name for one in cluster.endpoints() if one.name.startswith(ETCD)]
    return {**sets, ETCD: etcds}


async def _work(plan: Plan, stage: Stage, load: Load) -> None:
    """Send and handle while faults are made; return when every send has its outcome."""
    director = Director(Random(plan.seed), [name for name in stage.sets if name != ETCD])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.produce("keyed", PATIENT, keyed=True))
        tasks.create_task(load.produce("free", PATIENT, keyed=False))
        tasks.create_task(load.produce("hasty", HASTY, keyed=True))
        churning = []
        if plan.churns:
            churning = [tasks.create_task(stage.crowd.churn(Random(f"{plan.seed}/members")))]
        if await _within(_HEAL_S, lambda: _has_begun(stage.crowd, load)):
            end_us = now_us() + int(plan.duration_s * 1_000_000)
            faults = iter(plan.faults)
            while now_us() < end_us:
                fault = next(faults, None) if plan.faults else director.draw()
                if fault is None or not await stage.make(fault):
                    break
        else:
            stage.problems.append(f"nothing was handled {_HEAL_S:g} s after the start")
        load.stop.set()
        for task in churning:
            task.cancel()


def _has_begun(crowd: Crowd, load: Load) -> bool:
    return len(load.sends) >= _WARM_UP and len(crowd.handlings()) >= _WARM_UP


async def _is_done(admin: Admin) -> bool:
    try:
        queues = (await admin.group_progress(GROUP)).queues
    except BatonError:
        return False
    return len(queues) == QUEUES and all(queue.lag == 0 for queue in queues)


async def _within(timeout_s: float, condition: Callable[[], bool | Awaitable[bool]]) -> bool:
    """Whether `condition` came true in time."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                answer = condition()
                if answer if isinstance(answer, bool) else await answer:
                    return True
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        return False
