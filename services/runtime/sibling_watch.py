"""Notices at once that a process of the same service is gone, and ends its leases in etcd.

A killed process leaves its leases behind: without this they expire after 3 to 5 s, and only then is
another leader elected. So each node keeps a health watch open to each of its siblings. When the
watch breaks, and nothing listens at the sibling's address any more, its process is gone.

A process that is paused or busy keeps its connections, and accepts new ones by its kernel; a
machine that is gone does not refuse connections. In both cases the leases expire by themselves.
Nothing relies on the verdict: a leader whose lease is ended although it lives loses nothing
(protocol section 12), and each process is declared gone at most once by each sibling.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.nameserver.v1.stored_node_pb2 import StoredNode
from batonmq._common import timeouts
from batonmq.errors import NoQuorum
from batonmq_server.runtime.health import LIVE
from batonmq_server.runtime.service_runtime import Runtime

log = logging.getLogger(__name__)

RETRY_S = 0.5
FIRST_ANSWER_S = 5.0
"""A watch that gets no answer within this time is opened anew."""


@dataclass(frozen=True, slots=True)
class SiblingProcess:
    """One life of a sibling: a restarted process is another one."""

    node_id: str
    address: str
    start_unix_ms: int


class SiblingWatch:
    """Watches the other nodes of a service, or of a replica set.

    Args:
        election_key: Key of the election in which the siblings stand.
        replica_set: Only nodes of this replica set are siblings; empty for all of the service.
    """

    def __init__(self, runtime: Runtime, election_key: str, *, replica_set: str = "") -> None:
        self._runtime, self._election_key = runtime, election_key
        self._replica_set = replica_set
        self._watching: dict[SiblingProcess, asyncio.Task[None]] = {}
        self._gone: set[SiblingProcess] = set()

    async def run(self) -> None:
        """Watch all siblings until cancelled; run as one task."""
        async with asyncio.TaskGroup() as tasks:
            async for _ in self._runtime.nodes.watch():
                present = self._siblings()
                for sibling in [*self._watching]:
                    if sibling not in present:
                        self._watching.pop(sibling).cancel()
                newest = {one.node_id: one.start_unix_ms for one in present}
                self._gone = {
                    one
                    for one in self._gone
                    if newest.get(one.node_id, one.start_unix_ms) == one.start_unix_ms
                }
                for sibling in present:
                    if sibling not in self._watching and sibling not in self._gone:
                        self._watching[sibling] = tasks.create_task(self._watch(sibling))

    def _siblings(self) -> dict[SiblingProcess, int]:
        """Return the registered siblings, with the leases of their node entries."""
        service, own = self._runtime.service, self._runtime.settings.node_id
        leases = {}
        for key, stored in sorted(self._runtime.nodes.values.items()):
            kind, _, name = key.partition("/")
            if kind != service or name == own:
                continue
            node = StoredNode.FromString(stored.value)
            if self._replica_set in ("", node.replica_set):
                process = SiblingProcess(name, node.address, node.start_unix_ms)
                leases[process] = stored.lease_id
        return leases

    async def _watch(self, sibling: SiblingProcess) -> None:
        """Return once the sibling is gone and its leases are ended."""
        channel = self._runtime.connect(sibling.address)
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                await self._follow(stub)
                try:
                    if await self._end_if_gone(sibling):
                        return
                except NoQuorum as error:
                    log.warning("leases not ended node_id=%s error=%s", sibling.node_id, error)
                await asyncio.sleep(RETRY_S)
        finally:
            await channel.close()

    @staticmethod
    async def _follow(stub: health_pb2_grpc.HealthStub) -> None:
        """Return when the health watch has ended or could not be opened."""
        request = health_pb2.HealthCheckRequest(service=LIVE)
        watch = stub.Watch(request)  # type: ignore[attr-defined]
        try:
            async with timeouts.timeout(FIRST_ANSWER_S) as first:
                async for _ in watch:
                    first.reschedule(None)
        except (grpc.aio.AioRpcError, TimeoutError):
            return
        finally:
            watch.cancel()

    async def _end_if_gone(self, sibling: SiblingProcess) -> bool:
        """End the leases of a sibling if nothing listens at its address.

        What is read before the connection is refused belongs to the process that is gone, and not
        to the next one of the same name.

        Raises:
            NoQuorum: it is not known whether the leases were ended.
        """
        etcd = self._runtime.etcd
        leader = await etcd.get(self._election_key)
        entry_lease = self._siblings().get(sibling)
        if entry_lease is None or not await self._runtime.refuses(sibling.address):
            return False
        self._gone.add(sibling)
        log.warning(
            "process is gone, ends its leases node_id=%s address=%s",
            sibling.node_id,
            sibling.address,
        )
        if leader is not None and leader.value == sibling.node_id.encode():
            await etcd.revoke(leader.lease_id)
        await etcd.revoke(entry_lease)
        return True
