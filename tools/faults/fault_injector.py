"""Injects the scheduled faults and undoes them."""

from __future__ import annotations

import asyncio
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
    LEASE_S,
    MEMBER,
    NETWORK,
    SPLITS,
    Fault,
)
from tools.faults.file_damage import flip, tear
from tools.faults.history import MemberOutage
from tools.faults.member_pool import MemberPool, PoolMember
from tools.faults.network import HUB, Network, Pair, both_ways, bridge, halves, ring
from tools.faults.process_faults import NO_FAULT, ProcessFault

_MARGIN_S = 5
"""A client that is cut off for a lease minus this long keeps its queues."""
_FAILED_S = 30.0


@dataclass(slots=True)
class FaultInjector:
    """Injects faults into the services, the consumers and the network of a cluster.

    Attributes:
        network: None if the network cannot be cut.
        process_faults: Folder of the fault files of the processes.
        notes: Details of the injected faults, for the report.
        problems: Faults that could not be injected or undone.
    """

    cluster: LocalCluster
    pool: MemberPool
    network: Network | None
    process_faults: Path
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def inject(self, fault: Fault, name: str) -> None:
        """Inject a fault into the named process; return when it is undone."""
        try:
            if fault.part == MEMBER:
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
            self.cluster.pause(name)
            await _for_ms(fault.hold_ms)
            self.cluster.resume(name)
        else:
            await self.cluster.kill(name)
            await _for_ms(fault.hold_ms)
            await self.cluster.start(name)

    async def _damage(self, fault: Fault, name: str) -> None:
        await self.cluster.kill(name)
        harm = tear if fault.kind == "torn file" else flip
        done = harm(self.cluster.data_dir / name, Random(fault.amount))
        self.notes.append(f"{name}: {done}")
        await _for_ms(fault.hold_ms)
        await self.cluster.start(name)

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


async def _for_ms(hold_ms: int) -> None:
    await asyncio.sleep(hold_ms / 1000)
