"""Makes what the director has drawn, and undoes it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from batonmq_server.local.child_process import NotReady
from batonmq_server.local.cluster import LocalCluster
from tests.support.member import now_us
from tools.faults.crowd import Crowd, Member
from tools.faults.damage import flip, tear
from tools.faults.director import (
    BYTES,
    CLOCK,
    CUTS,
    DISK,
    LEASE_S,
    MEMBER,
    NETWORK,
    SPLITS,
    Strike,
)
from tools.faults.history import Crash
from tools.faults.network import HUB, Network, Pair, both_ways, bridge, halves, ring
from tools.faults.upsets import FINE, Upset

_MARGIN_S = 5
"""A client that hears nothing for so much less than a lease is still far from losing anything."""
_FAILED_S = 30.0


@dataclass(slots=True)
class Striker:
    """Has the cluster, its consumers and its network in hand.

    Attributes:
        network: None if it can't be cut.
        upsets: Where processes look for what is wrong with them.
        told: What exactly was done, for the log of the run.
        problems: What could not be done or undone.
    """

    cluster: LocalCluster
    crowd: Crowd
    network: Network | None
    upsets: Path
    told: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def strike(self, strike: Strike, name: str) -> None:
        """Do it to the process of this name, and undo it; return when that is done."""
        try:
            if strike.part == MEMBER:
                await self._strike_member(strike, name)
            elif strike.part == NETWORK or strike.kind in CUTS:
                await self._cut_for(strike, name)
            elif strike.kind in BYTES:
                await self._damage(strike, name)
            elif strike.kind in (*DISK, *CLOCK):
                await self._upset(strike, name)
            else:
                await self._stop(strike, name)
        except NotReady as error:
            self.problems.append(str(error))

    async def _stop(self, strike: Strike, name: str) -> None:
        if strike.kind == "restart":
            await self.cluster.restart(name)
        elif strike.kind == "pause":
            self.cluster.pause(name)
            await _for_ms(strike.hold_ms)
            self.cluster.resume(name)
        else:
            await self.cluster.kill(name)
            await _for_ms(strike.hold_ms)
            await self.cluster.start(name)

    async def _damage(self, strike: Strike, name: str) -> None:
        await self.cluster.kill(name)
        harm = tear if strike.kind == "torn file" else flip
        done = harm(self.cluster.data_dir / name, Random(strike.amount))
        self.told.append(f"{name}: {done}")
        await _for_ms(strike.hold_ms)
        await self.cluster.start(name)

    async def _upset(self, strike: Strike, name: str) -> None:
        upset = {
            "slow sync": Upset(sync_ms=strike.amount),
            "failed sync": Upset(sync_fails=True),
            "full disk": Upset(full=True),
            "clock jump": Upset(clock_ms=strike.amount),
            "clock strobe": Upset(strobe_ms=strike.amount),
        }[strike.kind]
        [node_id] = (one.node_id for one in self.cluster.options.instances if one.name == name)
        upset.tell(self.upsets, node_id)
        if upset.sync_fails and not await self._fails(node_id):
            self.problems.append(f"{name} has synced nothing for {_FAILED_S:g} s")
        await _for_ms(strike.hold_ms)
        FINE.tell(self.upsets, node_id)
        if upset.sync_fails and self.cluster.pid(name) is None:  # it may end, or mend itself
            await self.cluster.start(name)

    async def _fails(self, node_id: str) -> bool:
        try:
            async with asyncio.timeout(_FAILED_S):
                while not Upset.has_failed(self.upsets, node_id):
                    await _for_ms(50)
        except TimeoutError:
            return False
        return True

    # ---- the network

    async def _cut_for(self, strike: Strike, name: str) -> None:
        assert self.network is not None
        if strike.kind == "unplug":
            await self._unplug(self.network, name, strike.hold_ms)
            return
        pairs = self._pairs(strike, name)
        await self.network.cut(pairs)
        await _for_ms(strike.hold_ms)
        await self.network.heal(pairs)

    def _pairs(self, strike: Strike, name: str) -> set[Pair]:
        nodes = [one.name for one in self.cluster.endpoints()]
        clients = [HUB, *(one.client_id for one in self.crowd.members)]
        if strike.kind in SPLITS:
            Random(strike.rank).shuffle(nodes)
            return {"halves": halves, "bridge": bridge, "ring": ring}[strike.kind](nodes)
        rest = [one for one in nodes if one != name]
        if strike.kind == "isolate":
            return both_ways([name], rest)
        if strike.kind == "no etcd":
            return both_ways([name], [one for one in rest if one.startswith("etcd")])
        everybody = [*rest, *clients]
        if strike.kind == "mute":
            return {(name, one) for one in everybody}
        return {(one, name) for one in everybody}

    async def _unplug(self, network: Network, name: str, hold_ms: int) -> None:
        network.unplug(name)
        await _for_ms(hold_ms)
        network.plug(name)

    # ---- consumers

    async def _strike_member(self, strike: Strike, name: str) -> None:
        member = next((one for one in self.crowd.members if one.client_id == name), None)
        if member is None:
            return
        if strike.kind == "kill":
            await self.crowd.kill(member, strike.hold_ms)
        elif strike.kind == "pause":
            await self.crowd.pause(member, strike.hold_ms)
        else:
            member.busy = True
            await self._cut_member(strike, member)
            member.busy = False

    async def _cut_member(self, strike: Strike, member: Member) -> None:
        assert self.network is not None
        begin_us = now_us()
        if strike.kind == "unplug":
            await self._unplug(self.network, member.client_id, strike.hold_ms)
            if strike.hold_ms > 1_000 * (LEASE_S - _MARGIN_S):
                cut_off = Crash(member.client_id, begin_us, now_us(), stood_still=False)
                self.crowd.crashes.append(cut_off)
            return
        services = ("storage",) if strike.kind == "no broker" else ("lockmgr", "nameserver")
        names = [name for one in services for name in self.cluster.options.names_of(one)]
        pairs = both_ways([member.client_id], names)
        await self.network.cut(pairs)
        await _for_ms(strike.hold_ms)
        await self.network.heal(pairs)


async def _for_ms(hold_ms: int) -> None:
    await asyncio.sleep(hold_ms / 1000)
