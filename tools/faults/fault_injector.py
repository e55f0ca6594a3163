"""Injects the scheduled faults and undoes them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from batonmq_server.local.child_process import NotReady
from batonmq_server.local.cluster import LocalCluster
from tests.support.member import now_us
from tools.faults.fault_schedule import (
    BYTES,
    CLOCK,
    CUTS,
    DISK,
    ETCD,
    EVERYTHING,
    GATEWAY,
    LEASE_S,
    MEMBER,
    NETWORK,
    ONE_WAY,
    POWER,
    RUNNING_FLIP,
    SPLITS,
    TWO_STEPS,
    Fault,
)
from tools.faults.file_damage import flip, tear
from tools.faults.history import MemberOutage
from tools.faults.member_pool import MemberPool, PoolMember
from tools.faults.network import HUB, Network, Pair, both_ways, bridge, halves, ring
from tools.faults.power import PowerDisks
from tools.faults.process_faults import NO_FAULT, ProcessFault

_MARGIN_S = 5
"""A client that is cut off for a lease minus this long keeps its queues."""
_FAILED_S = 30.0
SERVES_S = 30.0
"""While the leader of a set is dead, the other nodes serve after at most this long."""


@dataclass(slots=True)
class FaultInjector:
    """Injects faults into the services, the consumers and the network of a cluster.

    Attributes:
        network: None if the network cannot be cut.
        process_faults: Folder of the fault files of the processes.
        serves_since: Returns whether a message that was sent after this time was stored, and
            progress was committed since.
        disks: None if the power cannot be cut.
        notes: Details of the injected faults, for the report.
        problems: Faults that could not be injected or undone.
        gateway_outages: Kills and pauses of gateways.
    """

    cluster: LocalCluster
    pool: MemberPool
    network: Network | None
    process_faults: Path
    serves_since: Callable[[int], Awaitable[bool]]
    disks: PowerDisks | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    gateway_outages: list[MemberOutage] = field(default_factory=list)

    async def inject(self, fault: Fault, name: str) -> None:
        """Inject a fault into the named process; return when it is undone."""
        try:
            if fault.kind == ONE_WAY:
                await self._cut_one_way(fault, name)
            elif fault.kind == POWER:
                await self._cut_power(fault)
            elif fault.kind == TWO_STEPS:
                await self._fail_in_two_steps(fault, name)
            elif fault.kind == RUNNING_FLIP:
                await self._damage_running(fault, name)
            elif fault.part == MEMBER:
                await self._inject_into_member(fault, name)
            elif fault.part == NETWORK or fault.kind in CUTS:
                await self._cut_for(fault, name)
            elif fault.kind in BYTES:
                await self._damage(fault, name)
            elif fault.kind in (*DISK, *CLOCK):
                await self._inject_process_fault(fault, name)
            else:
                await self._stop(fault, name)
        except NotReady as error:
            self.problems.append(str(error))

    async def _stop(self, fault: Fault, name: str) -> None:
        if fault.kind == "restart":
            await self.cluster.restart(name)
        elif fault.kind == "pause":
            begin_us = now_us()
            self.cluster.pause(name)
            await _for_ms(fault.hold_ms)
            if fault.part == GATEWAY:
                self.gateway_outages.append(MemberOutage(name, begin_us, now_us()))
            self.cluster.resume(name)
        else:
            await self.cluster.kill(name)
            if fault.part == GATEWAY:
                self.gateway_outages.append(MemberOutage(name, now_us(), None))
            await _for_ms(fault.hold_ms)
            await self.cluster.start(name)

    async def _damage(self, fault: Fault, name: str) -> None:
        await self.cluster.kill(name)
        folder, random = self.cluster.data_dir / name, Random(fault.amount)
        done = (
            tear(folder, random)
            if fault.kind == "torn file"
            else flip(folder, random, fault.target)
        )
        self._note_damage(fault, name, done)
        await _for_ms(fault.hold_ms)
        await self.cluster.start(name)

    async def _damage_running(self, fault: Fault, name: str) -> None:
        """Flip a bit, let the process go on, then restart it from what it has on disk."""
        done = flip(self.cluster.data_dir / name, Random(fault.amount), fault.target)
        self._note_damage(fault, name, done)
        await _for_ms(fault.hold_ms)
        await self.cluster.kill(name)
        await self.cluster.start(name)

    def _note_damage(self, fault: Fault, name: str, done: str) -> None:
        self.notes.append(f"{fault.kind}, {name}: {done or f'there is no {fault.target}'}")

    async def _fail_in_two_steps(self, fault: Fault, name: str) -> None:
        """Cut the leader off from its set, kill it, and require that the others serve."""
        assert self.network is not None
        pairs = both_ways(
            [name], [one for one in replica_sets(self.cluster)[fault.part] if one != name]
        )
        await self.network.cut(pairs)
        await _for_ms(fault.hold_ms)
        killed_us = now_us()
        await self.cluster.kill(name)
        await self.network.heal(pairs)
        try:
            async with asyncio.timeout(SERVES_S):
                while not await self.serves_since(killed_us):
                    await _for_ms(50)
        except TimeoutError:
            self.problems.append(f"{fault.part} did not serve {SERVES_S:g} s after {name} had died")
        else:
            served_ms = (now_us() - killed_us) // 1000
            self.notes.append(f"{fault.part} served {served_ms} ms after {name} had died")
        await _for_ms(fault.amount)
        await self.cluster.start(name)

    async def _each(self, call: Callable[[str], Awaitable[None]], names: Sequence[str]) -> None:
        """Call for every name at once; return when all calls have ended."""

        async def called(name: str) -> None:
            try:
                await call(name)
            except NotReady as error:
                self.problems.append(str(error))

        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(called(name))

    async def _cut_power(self, fault: Fault) -> None:
        """End processes and lose what they had not synced; start them again."""
        assert self.disks is not None
        sets = replica_sets(self.cluster)
        whole = fault.part == EVERYTHING
        names = [one for those in sets.values() for one in those] if whole else sets[fault.part]
        with_disk = [one for one in names if one.startswith(("storage", "offsets", ETCD))]
        for name in names:
            self.cluster.pause(name)
        await asyncio.to_thread(self.disks.cut, with_disk)
        await self._each(self.cluster.kill, names)
        survived = await asyncio.to_thread(self.disks.restore, with_disk)
        if survived:
            self.problems.append(f"an unsynced file survived the power cut of {survived}")
        lost = len(with_disk) - len(survived)
        self.notes.append(
            f"{fault.kind}: an unsynced file was lost on {lost} of {len(with_disk)} disks"
        )
        await _for_ms(fault.hold_ms)
        etcds = [one for one in names if one.startswith(ETCD)]
        await self._each(self.cluster.start, etcds)
        await self._each(self.cluster.start, [one for one in names if one not in etcds])

    async def _inject_process_fault(self, fault: Fault, name: str) -> None:
        process_fault = {
            "slow sync": ProcessFault(sync_ms=fault.amount),
            "failed sync": ProcessFault(sync_fails=True),
            "full disk": ProcessFault(full=True),
            "clock jump": ProcessFault(clock_ms=fault.amount),
            "clock strobe": ProcessFault(strobe_ms=fault.amount),
        }[fault.kind]
        [node_id] = (one.node_id for one in self.cluster.options.instances if one.name == name)
        process_fault.write(self.process_faults, node_id)
        if process_fault.sync_fails and not await self._fails(node_id):
            self.problems.append(f"{name} did not sync within {_FAILED_S:g} s")
        await _for_ms(fault.hold_ms)
        NO_FAULT.write(self.process_faults, node_id)
        if (
            process_fault.sync_fails and self.cluster.pid(name) is None
        ):  # the process may end or recover
            await self.cluster.start(name)

    async def _fails(self, node_id: str) -> bool:
        try:
            async with asyncio.timeout(_FAILED_S):
                while not ProcessFault.has_failed(self.process_faults, node_id):
                    await _for_ms(50)
        except TimeoutError:
            return False
        return True

    # ---- the network

    async def _cut_for(self, fault: Fault, name: str) -> None:
        assert self.network is not None
        if fault.kind == "unplug":
            await self._unplug(self.network, name, fault.hold_ms)
            return
        pairs = self._pairs(fault, name)
        await self.network.cut(pairs)
        await _for_ms(fault.hold_ms)
        await self.network.heal(pairs)

    async def _cut_one_way(self, fault: Fault, sender: str) -> None:
        assert self.network is not None
        receiver = fault.target
        if receiver == MEMBER:
            member = self.pool.pick(fault.rank)
            if member is None:
                return
            receiver = member.client_id
        await self.network.cut({(sender, receiver)})
        await _for_ms(fault.hold_ms)
        await self.network.heal({(sender, receiver)})

    def _pairs(self, fault: Fault, name: str) -> set[Pair]:
        nodes = [one.name for one in self.cluster.endpoints()]
        clients = [HUB, *(one.client_id for one in self.pool.members)]
        if fault.kind in SPLITS:
            Random(fault.rank).shuffle(nodes)
            return {"halves": halves, "bridge": bridge, "ring": ring}[fault.kind](nodes)
        rest = [one for one in nodes if one != name]
        if fault.kind == "isolate":
            return both_ways([name], rest)
        if fault.kind == "no etcd":
            return both_ways([name], [one for one in rest if one.startswith("etcd")])
        peers = [*rest, *clients]
        if fault.kind == "mute":
            return {(name, one) for one in peers}
        return {(one, name) for one in peers}

    async def _unplug(self, network: Network, name: str, hold_ms: int) -> None:
        network.unplug(name)
        await _for_ms(hold_ms)
        network.plug(name)

    # ---- consumers

    async def _inject_into_member(self, fault: Fault, name: str) -> None:
        member = next((one for one in self.pool.members if one.client_id == name), None)
        if member is None:
            return
        if fault.kind == "kill":
            await self.pool.kill(member, fault.hold_ms)
        elif fault.kind == "pause":
            await self.pool.pause(member, fault.hold_ms)
        else:
            member.busy = True
            await self._cut_member(fault, member)
            member.busy = False

    async def _cut_member(self, fault: Fault, member: PoolMember) -> None:
        assert self.network is not None
        begin_us = now_us()
        if fault.kind == "unplug":
            await self._unplug(self.network, member.client_id, fault.hold_ms)
            if fault.hold_ms > 1_000 * (LEASE_S - _MARGIN_S):
                cut_off = MemberOutage(member.client_id, begin_us, now_us(), paused=False)
                self.pool.outages.append(cut_off)
            return
        services = ("storage",) if fault.kind == "no broker" else ("lockmgr", "nameserver")
        names = [name for one in services for name in self.cluster.options.names_of(one)]
        pairs = both_ways([member.client_id], names)
        await self.network.cut(pairs)
        await _for_ms(fault.hold_ms)
        await self.network.heal(pairs)


def replica_sets(cluster: LocalCluster) -> dict[str, list[str]]:
    """Return the process names of each part."""
    sets = defaultdict(list)
    for member in cluster.options.instances:
        sets[f"{member.service} {member.settings.get('broker', '')}".strip()].append(member.name)
    etcds = [one.name for one in cluster.endpoints() if one.name.startswith(ETCD)]
    return {**sets, ETCD: etcds}


async def _for_ms(hold_ms: int) -> None:
    await asyncio.sleep(hold_ms / 1000)
