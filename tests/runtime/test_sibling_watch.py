"""The watch over the processes of one service.

Goal: the leases of a process that is gone are ended at once; a process that accepts connections
keeps them, however long it is silent; a process is declared gone at most once.
Method: a real etcd, and real servers in place of the siblings: one with health checks, which a test
stops, and a bare socket that accepts connections and sends no bytes, as a paused process does.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import grpc.aio
import pytest

from baton.nameserver.v1.stored_node_pb2 import StoredNode
from batonmq_server.lockmgr.config import LockmgrSettings
from batonmq_server.runtime import sibling_watch
from batonmq_server.runtime.election import Election
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue, Lease
from batonmq_server.runtime.health import Health
from batonmq_server.runtime.refusal import refuses
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.runtime.sibling_watch import SiblingWatch
from tests.support.conditions import until

LEASE_MS = 600_000
"""Longer than any test: a lease that ends was ended by the watch."""
LEADER_KEY = "elections/lockmgr"


class Sibling:
    """Another process of the service: its server, its node entry and its leadership."""

    def __init__(self, etcd: EtcdSession, name: str) -> None:
        self._etcd, self.name = etcd, name
        self.address = ""
        self.server: grpc.aio.Server | None = None
        self.entry: Lease
        self.leadership: Lease | None = None

    async def serve(self) -> None:
        """Serve health checks at a free port."""
        status = Health()
        self.server = grpc.aio.server()
        status.add(self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        await status.set_live()

    async def register(self, *, life: int = 1) -> None:
        """Write the node entry, under a lease of its own."""
        self.entry = await self._etcd.lease(LEASE_MS)
        node = StoredNode(node_id=self.name, address=self.address, start_unix_ms=life)
        key = self._etcd.key("nodes", "lockmgr", self.name)
        await self._etcd.put(key, node.SerializeToString(), self.entry)

    async def lead(self, lease_ms: int = LEASE_MS) -> None:
        """Take the election key, under a lease that is not kept alive."""
        self.leadership = await self._etcd.lease(lease_ms)
        await self._etcd.put(LEADER_KEY, self.name.encode(), self.leadership)

    async def stop(self) -> None:
        """Close the port, as when the process is killed."""
        assert self.server is not None
        await self.server.stop(None)

    async def stored(self) -> KeyValue | None:
        """Return the node entry in etcd."""
        return await self._etcd.get(f"nodes/lockmgr/{self.name}")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sibling_watch, "RETRY_S", 0.05)
    monkeypatch.setattr(sibling_watch, "FIRST_ANSWER_S", 0.3)


class Watch:
    """The watch of node `own`.

    Attributes:
        probes: Answers to the question whether an address refuses connections.
    """

    def __init__(self, etcd: EtcdSession) -> None:
        self.probes: list[bool] = []
        settings: dict[str, Any] = {"node_id": "own"}
        self.runtime = Runtime("lockmgr", LockmgrSettings(**settings), etcd, refuses=self._refuses)
        self.siblings = SiblingWatch(self.runtime, LEADER_KEY)

    async def _refuses(self, address: str) -> bool:
        self.probes.append(await refuses(address))
        return self.probes[-1]


@asynccontextmanager
async def watched(etcd: EtcdSession) -> AsyncIterator[Watch]:
    watch = Watch(etcd)
    async with asyncio.TaskGroup() as tasks:
        loops = [
            tasks.create_task(watch.runtime.nodes.run()),
            tasks.create_task(watch.siblings.run()),
        ]
        yield watch
        for loop in loops:
            loop.cancel()


async def gone(sibling: Sibling) -> None:
    """Wait until the entry of a sibling is gone."""

    async def look() -> bool:
        return await sibling.stored() is None

    await until(look)


@asynccontextmanager
async def silent_process(sibling: Sibling) -> AsyncIterator[None]:
    """Accept connections at the sibling's address, and send no bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sibling.address = f"127.0.0.1:{listening.getsockname()[1]}"
        yield


async def test_leases_of_a_leader_that_is_gone_are_ended_at_once(etcd: EtcdSession) -> None:
    sibling = Sibling(etcd, "other")
    await sibling.serve()
    await sibling.register()
    await sibling.lead()
    async with watched(etcd) as watch:
        await until(lambda: watch.siblings._watching)
        assert await etcd.get(LEADER_KEY) is not None
        await sibling.stop()
        await gone(sibling)
        assert await etcd.get(LEADER_KEY) is None


async def test_leadership_of_another_node_stays_when_a_follower_is_gone(etcd: EtcdSession) -> None:
    leader, follower = Sibling(etcd, "leader"), Sibling(etcd, "follower")
    for sibling in (leader, follower):
        await sibling.serve()
        await sibling.register()
    await leader.lead()
    async with watched(etcd):
        await follower.stop()
        await gone(follower)
        assert await etcd.get(LEADER_KEY) is not None
        assert await leader.stored() is not None
    await leader.stop()


async def test_process_that_accepts_connections_and_is_silent_keeps_its_leases(
    etcd: EtcdSession,
) -> None:
    sibling = Sibling(etcd, "other")
    async with silent_process(sibling):
        await sibling.register()
        await sibling.lead()
        async with watched(etcd) as watch:
            await until(lambda: len(watch.probes) >= 3)
            assert not any(watch.probes)
            assert await sibling.stored() is not None
            assert await etcd.get(LEADER_KEY) is not None


@contextmanager
def unreachable_address() -> Iterator[str]:
    """Yield an address at which connections are neither made nor refused: its queue is full."""
    with ExitStack() as sockets:
        listening = sockets.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(3):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield f"127.0.0.1:{listening.getsockname()[1]}"


async def test_election_waits_no_longer_than_a_lease_for_a_process_that_is_never_reached(
    etcd: EtcdSession,
) -> None:
    """As behind a service address without endpoints, which drops connections."""
    sibling, led = Sibling(etcd, "other"), asyncio.Event()

    async def lead(_: int) -> None:
        led.set()
        await asyncio.Event().wait()

    with unreachable_address() as sibling.address:
        await sibling.register()
        await sibling.lead(lease_ms=3_000)
        election = Election(etcd, "lockmgr", "own", ttl_ms=60_000)
        async with watched(etcd) as watch, asyncio.TaskGroup() as tasks:
            campaign = tasks.create_task(election.run(lead))
            async with asyncio.timeout(30):
                await led.wait()
            await until(lambda: watch.probes)
            assert not any(watch.probes)
            assert await sibling.stored() is not None, "its other lease is not ended"
            campaign.cancel()


async def test_process_that_is_declared_gone_and_registers_again_is_not_watched_again(
    etcd: EtcdSession,
) -> None:
    """Behind a firewall that rejects connections, two nodes would take the lead from each other."""
    sibling = Sibling(etcd, "other")
    await sibling.serve()
    await sibling.stop()
    async with watched(etcd) as watch:
        await sibling.register()
        await gone(sibling)
        await sibling.register()
        await watch.runtime.nodes.reached((await registered(sibling)).mod_revision)
        await until(lambda: not watch.siblings._watching)
        assert await sibling.stored() is not None
        await sibling.register(life=2)
        await gone(sibling)


async def test_restarted_leader_at_another_address_keeps_its_lease(etcd: EtcdSession) -> None:
    """A process that was restarted at another address is elected before it is registered."""
    sibling, again = Sibling(etcd, "other"), Sibling(etcd, "other")
    await sibling.serve()
    await again.serve()
    await sibling.register()
    async with watched(etcd) as watch:
        await until(lambda: watch.siblings._watching)
        await again.register(life=2)
        await again.lead()
        await watch.runtime.nodes.reached((await registered(again)).mod_revision)
        await sibling.stop()
        await until(lambda: len(watch.siblings._watching) == 1)
        assert await etcd.get(LEADER_KEY) is not None
        assert await again.stored() is not None
    await again.stop()


async def registered(sibling: Sibling) -> KeyValue:
    """Return the node entry of a registered sibling."""
    stored = await sibling.stored()
    assert stored is not None
    return stored


async def test_only_a_refused_connection_counts_as_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert not await refuses(address)
    assert await refuses(address)
    assert await refuses(address.replace("127.0.0.1", "localhost"))
    for unknown in ("", "no-such-host.invalid:1", "127.0.0.1:"):
        assert not await refuses(unknown), unknown
