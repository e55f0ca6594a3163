"""An offsets replica set in one process: real disks, a real etcd, real gRPC between the nodes.

A test can cut a node off from etcd, block its followers, and kill it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from baton.offsets.v1 import replication_service_pb2_grpc as replication_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.channels import OPTIONS, connect
from batonmq.errors import BatonError, NoQuorum
from batonmq_server.etcd_api.rpc_pb2 import WatchResponse
from batonmq_server.offsets.app import served
from batonmq_server.offsets.config import OffsetsSettings
from batonmq_server.offsets.disk import LmdbDisk, StoredEntry
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue, Lease
from batonmq_server.runtime.interceptor import EdgeInterceptor
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord, decode_record
from batonmq_server.runtime.service_runtime import Runtime
from tests.offsets.service_calls import run
from tests.support.clock import MovableClock
from tests.support.conditions import until

TIMEOUT_S = 20.0
LEASE_MS = 8_000
"""Longer than any pause of a loaded machine. A test waits for it only if it tests the expiry."""
LAG_MS_MAX = 4_000
TERM = 1
NOT_LEADER = {"NOT_LEADER", "NOT_SERVING", "NO_QUORUM", "UNREACHABLE"}


class CuttableEtcdSession(EtcdSession):
    """A connection to etcd that can be cut, or whose lease renewals get no answer.

    The clock of its node can be moved ahead. A node that is cut off may still see changes of the
    mirrored keys; after `lose` it sees none.
    """

    cut = silent = False

    def __init__(self, endpoint: str, cluster: str) -> None:
        self.node_clock = MovableClock()
        self._connected = asyncio.Event()
        self._connected.set()
        super().__init__(endpoint, cluster, self.node_clock)

    def another(self) -> EtcdSession:
        """Return another connection, for the test."""
        cluster = self.prefix.strip("/").rpartition("/")[2]
        return EtcdSession(self._endpoint, cluster, Clock())

    def lose(self) -> None:
        """Cut the connection in both directions: watches get no more answers either."""
        self.cut = True
        self._connected.clear()

    def restore(self) -> None:
        """End the cut."""
        self.cut = False
        self._connected.set()

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[WatchResponse]:
        async with aclosing(super().watch(prefix, revision)) as answers:
            async for answer in answers:
                await self._connected.wait()
                yield answer

    async def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        if not self._connected.is_set():
            raise NoQuorum("cut off")
        return await super().get_prefix(prefix)

    async def lease(self, ttl_ms: int) -> Lease:
        if not self._connected.is_set():
            raise NoQuorum("cut off")
        return await super().lease(ttl_ms)

    async def txn(self, **parts: Any) -> int | None:
        self._check()
        return await super().txn(**parts)

    async def get(self, key: str) -> KeyValue | None:
        self._check()
        return await super().get(key)

    async def keep_alive(self, lease_id: int) -> bool:
        self._check()
        if self.silent:
            await asyncio.Event().wait()
        return await super().keep_alive(lease_id)

    async def revoke(self, lease_id: int) -> None:
        self._check()
        await super().revoke(lease_id)

    def _check(self) -> None:
        if self.cut:
            raise NoQuorum("cut off")


Proceed = Callable[[], Awaitable[Any]]
Rule = Callable[[Any, Proceed], Awaitable[Any]]


class CallGate(grpc.aio.ServerInterceptor):
    """Blocks at the leader the calls of the followers that a test has shut out.

    Attributes:
        rules: Handlers of other calls, by method.
    """

    def __init__(self) -> None:
        self.shut: set[str] = set()
        self.rules: dict[str, Rule] = {}

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        method = details.method.rpartition("/")[2]
        if method in self.rules:

            async def ruled(request: Any, context: Any) -> Any:
                rule = self.rules.get(method)
                if rule is None:
                    return await handler.unary_unary(request, context)
                return await rule(request, lambda: handler.unary_unary(request, context))

            return grpc.unary_unary_rpc_method_handler(
                ruled, handler.request_deserializer, handler.response_serializer
            )
        if method != "Fetch":
            return handler

        async def fetch(request: Any, context: Any) -> Any:
            if request.node_id in self.shut:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "shut out")
            answer = await handler.unary_unary(request, context)
            if request.node_id in self.shut:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "shut out")
            return answer

        return grpc.unary_unary_rpc_method_handler(
            fetch, handler.request_deserializer, handler.response_serializer
        )


@dataclass
class Replica:
    """A running node."""

    name: str
    replica_set: str
    session: CuttableEtcdSession
    disk: LmdbDisk
    stub: pb_grpc.OffsetsServiceAsyncStub
    replication: replication_grpc.ReplicationServiceAsyncStub
    gate: CallGate
    stopping: asyncio.Event
    caught_up: Callable[[], Awaitable[bool]]
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def serves(self) -> bool:
        """Return whether the node is the leader and answers."""
        try:
            await self.stub.ListResets(pb.ListResetsRequest(group="readers"), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            assert from_rpc_error(error).reason in NOT_LEADER
            return False
        return True

    async def crash(self) -> None:
        """Kill the node; its leases in etcd expire."""
        self.session.cut = True
        await self.stop()
        await leases_end(self.session, "offsets", self.replica_set, self.name)

    async def stop(self) -> None:
        """Stop the node."""
        self.stopping.set()
        await self.ended.wait()

    def stored(self) -> list[StoredEntry]:
        """Return all entries of the node."""
        return list(self.disk.read())


class ReplicaSet:
    """The nodes of one replica set, by name."""

    def __init__(
        self, endpoint: str, etcd: EtcdSession, cluster: str, folder: Path, tasks: asyncio.TaskGroup
    ) -> None:
        self.endpoint, self.cluster, self.folder = endpoint, cluster, folder
        self._etcd, self._tasks = etcd, tasks
        self.nodes: dict[str, Replica] = {}
        self.settings: dict[str, Any] = {}

    async def start(self, *names: str) -> list[Replica]:
        """Start nodes of the set a, b, c."""
        for name in names:
            started: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
            common: dict[str, Any] = {
                "replicas": "a,b,c",
                "replica_lag_ms_max": LAG_MS_MAX,
                "leader_lease_ms": LEASE_MS,
                "node_lease_ms": LEASE_MS,
            }
            settings = OffsetsSettings(
                node_id=name,
                data_dir=self.folder / name,
                cluster=self.cluster,
                etcd=self.endpoint,
                **(common | self.settings),
            )
            self._tasks.create_task(_run(settings, started))
            self.nodes[name] = await started
        return [self.nodes[name] for name in names]

    async def leader(self) -> Replica:
        """Return the leader once it serves."""
        found: list[Replica] = []

        async def look() -> bool:
            for node in list(self.nodes.values()):
                if not node.ended.is_set() and await node.serves():
                    found.append(node)
                    return True
            return False

        await until(look)
        return found[0]

    async def stored_set(self) -> ReplicaSetRecord:
        """Return the record of the replica set in etcd."""
        return decode_record(await self._etcd.get("replicas/offsets/offsets"))

    async def in_sync(self, *names: str) -> None:
        """Wait until the in-sync set has exactly these nodes."""

        async def look() -> bool:
            return (await self.stored_set()).in_sync == set(names)

        await until(look)

    async def alike(self, *names: str) -> None:
        """Wait until these nodes store the same bytes."""
        first, *others = [self.nodes[name] for name in names]
        await until(lambda: all(first.stored() == other.stored() for other in others))

    async def stop(self) -> None:
        """Stop all nodes."""
        for node in self.nodes.values():
            await node.stop()


@asynccontextmanager
async def replica_set(endpoint: str, cluster: str, folder: Path) -> AsyncIterator[ReplicaSet]:
    """Return a scene without nodes."""
    async with EtcdSession(endpoint, cluster, Clock()) as etcd, asyncio.TaskGroup() as tasks:
        scene = ReplicaSet(endpoint, etcd, cluster, folder, tasks)
        try:
            yield scene
        finally:
            await scene.stop()


async def _run(settings: OffsetsSettings, started: asyncio.Future[Replica]) -> None:
    gate, stopping, ended = CallGate(), asyncio.Event(), asyncio.Event()
    try:
        async with CuttableEtcdSession(settings.etcd, settings.cluster) as session:
            runtime = Runtime("offsets", settings, session)
            with LmdbDisk(settings.data_dir) as disk:
                async with served(settings, runtime, disk) as app:
                    edge = EdgeInterceptor(runtime.clock, runtime.registry, app.long_polls)
                    server = grpc.aio.server(interceptors=[edge, gate], options=OPTIONS)
                    for add in app.servicers.values():
                        add(server)
                    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
                    runtime.node_entry.set_addresses(address, "")
                    await server.start()
                    async with connect(address) as channel, asyncio.TaskGroup() as tasks:
                        loops: list[Callable[[], Any]] = [
                            *app.loops,
                            runtime.nodes.run,
                            runtime.node_entry.keep,
                        ]
                        if app.leader:
                            await runtime.node_entry.write(
                                epoch=app.epoch, replica_set=app.replica_set
                            )
                        running = [tasks.create_task(loop()) for loop in loops]
                        started.set_result(
                            Replica(
                                settings.node_id,
                                settings.replica_set,
                                session,
                                disk,
                                pb_grpc.OffsetsServiceStub(channel),
                                replication_grpc.ReplicationServiceStub(channel),
                                gate,
                                stopping,
                                app.caught_up,
                                ended,
                            )
                        )
                        await stopping.wait()
                        await server.stop(None)
                        await runtime.node_entry.remove()
                        for task in running:
                            task.cancel()
    finally:
        ended.set()


async def leases_end(ended: CuttableEtcdSession, service: str, replica_set: str, name: str) -> None:
    """Revoke the leases of a node, as etcd does when they expire."""
    async with ended.another() as etcd:
        for key in (f"nodes/{service}/{name}", f"elections/{service}/{replica_set}"):
            stored = await etcd.get(key)
            if stored is not None and (key.startswith("nodes/") or stored.value == name.encode()):
                await etcd.attach(stored.lease_id).revoke()


def queue(queue_id: int = 0) -> queue_pb2.GroupQueue:
    """Return a queue of the one group."""
    inner = queue_pb2.QueueRef(topic="news", broker="broker-a", queue_id=queue_id)
    return queue_pb2.GroupQueue(group="readers", queue=inner)


async def hold(node: Replica, *queue_ids: int) -> None:
    """Fence queues without progress for a holder, and deliver 100 messages of each."""
    await node.stub.Announce(pb.AnnounceRequest(term=TERM), timeout=TIMEOUT_S)
    holder = queue_pb2.Incarnation(client_id="client-a", incarnation_id=1)
    fences = [
        pb.FenceItem(
            queue=queue(queue_id),
            attempt="attempt-1",
            condition=pb.FENCE_CONDITION_CLOSED_OR_DRAINED,
            holder=holder,
        )
        for queue_id in queue_ids
    ]
    await node.stub.Fence(pb.FenceRequest(term=TERM, items=fences), timeout=TIMEOUT_S)
    deliveries = [
        pb.DeliveryItem(queue=queue(queue_id), token=1, first_offset=0, next_offset=100)
        for queue_id in queue_ids
    ]
    await node.stub.RecordDelivered(pb.RecordDeliveredRequest(items=deliveries), timeout=TIMEOUT_S)


async def commit(
    node: Replica, committed: int, *acked: tuple[int, int], queue_id: int = 0, timeout_s: float = 0
) -> None:
    """Ack all offsets below `committed`, and ranges above.

    Raises:
        BatonError: the node rejected the call or did not answer.
    """
    item = pb.CommitItem(
        queue=queue(queue_id),
        token=1,
        committed_offset=committed,
        acked=[run(*each) for each in acked],
    )
    try:
        answer = await node.stub.Commit(
            pb.CommitRequest(items=[item]), timeout=timeout_s or TIMEOUT_S
        )
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    if answer.outcomes[0].HasField("error"):
        raise error_from_pb(answer.outcomes[0].error)


async def committed(node: Replica, queue_id: int = 0) -> int:
    """Return the committed offset that the node answers."""
    answer = await node.stub.Query(pb.QueryRequest(queues=[queue(queue_id)]), timeout=TIMEOUT_S)
    return answer.outcomes[0].progress.committed_offset


async def rejection(node: Replica, committed_offset: int) -> BatonError:
    """Return the error with which the node rejects an ack."""
    try:
        await commit(node, committed_offset)
    except BatonError as error:
        return error
    raise AssertionError("it was taken")
