"""A storage replica set in one process: real folders, a real etcd, real gRPC between the nodes.

A node can be cut off from etcd, its answers to followers can be delayed, and it can crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import query_service_pb2_grpc as query_grpc
from baton.storage.v1 import replication_service_pb2 as replication_pb
from baton.storage.v1 import replication_service_pb2_grpc as replication_grpc
from baton.storage.v1 import schedule_service_pb2_grpc as schedule_grpc
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.channels import OPTIONS, connect
from batonmq._core.records import decode_records, read_header
from batonmq.errors import BatonError
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.interceptor import EdgeInterceptor
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord, decode_record
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.storage.app import build
from batonmq_server.storage.config import StorageSettings
from tests.offsets.replica_cluster import (
    LAG_MS_MAX,
    LEASE_MS,
    NOT_LEADER,
    TIMEOUT_S,
    CallGate,
    CuttableEtcdSession,
    leases_end,
)
from tests.storage.batches import TOPIC, TOPIC_ID
from tests.storage.running_node import WATERMARKS
from tests.support.conditions import until

BROKER = "broker-a"
SEGMENT_BYTES = 64 * 1024


def queue(queue_id: int) -> queue_pb2.QueueRef:
    """Return a queue of the topic of the set."""
    return queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=queue_id)


@dataclass
class Replica:
    """A running node of the replica set."""

    name: str
    folder: Path
    session: CuttableEtcdSession
    stub: pb_grpc.StorageServiceAsyncStub
    queries: query_grpc.QueryServiceAsyncStub
    scheduling: schedule_grpc.ScheduleServiceAsyncStub
    replication: replication_grpc.ReplicationServiceAsyncStub
    gate: CallGate
    stopping: asyncio.Event
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def serves(self) -> bool:
        """Return whether the node is the leader and serves."""
        try:
            request = pb.QueryOffsetsRequest(queues=[queue(7)])
            await self.stub.QueryOffsets(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            assert from_rpc_error(error).reason in NOT_LEADER, error
            return False
        return True

    async def crash(self) -> None:
        """Stop without a call to etcd, where its leases then expire."""
        self.session.cut = True
        await self.stop()
        await leases_end(self.session, "storage", BROKER, self.name)

    async def stop(self) -> None:
        """Stop cleanly."""
        self.stopping.set()
        await self.ended.wait()

    async def append(
        self,
        *batches: bytes,
        durability: pb.Durability.ValueType = pb.DURABILITY_UNSPECIFIED,
        timeout_s: float = TIMEOUT_S,
    ) -> list[pb.AppendReceipt]:
        """Append batches and return their receipts.

        Raises:
            BatonError: the first item error, or the error of the call.
        """
        request = pb.AppendRequest(batches=batches, durability=durability)
        try:
            answer = await self.stub.Append(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        for outcome in answer.outcomes:
            if outcome.HasField("error"):
                raise error_from_pb(outcome.error)
        return [outcome.receipt for outcome in answer.outcomes]

    async def rejection(self, *batches: bytes, **options: Any) -> BatonError:
        """Return the error with which the node rejects these batches."""
        try:
            await self.append(*batches, **options)
        except BatonError as error:
            return error
        raise AssertionError("they were taken")

    async def read(
        self, queue_id: int = 0, offset: int = 0, timeout_s: float = TIMEOUT_S
    ) -> query_pb.ReadResponse:
        """Read a queue once."""
        request = query_pb.ReadRequest(queue=queue(queue_id), offset=offset)
        try:
            return await self.queries.Read(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def bodies(self, queue_id: int = 0) -> list[bytes]:
        """Read all visible bodies of a queue."""
        found: list[bytes] = []
        offset = 0
        while True:
            answer = await self.read(queue_id, offset)
            if answer.next_offset == offset:
                return found
            for batch in answer.batches:
                header = read_header(batch)
                found += [
                    record.body for record in decode_records(batch, header, range(header.count))
                ]
            offset = answer.next_offset

    async def describe(self) -> pb.DescribeResponse:
        """Describe the node, leader or follower."""
        return await self.stub.Describe(pb.DescribeRequest(), timeout=TIMEOUT_S)

    async def replicas(self) -> replication_pb.DescribeReplicasResponse:
        """Describe the replica set; the node must be the leader."""
        request = replication_pb.DescribeReplicasRequest()
        return await self.replication.DescribeReplicas(request, timeout=TIMEOUT_S)

    def log(self) -> dict[str, bytes]:
        """Return the segment files that are not all zeros."""
        folder = self.folder / "log"
        paths = folder.iterdir() if folder.exists() else ()
        found = {path.name: path.read_bytes() for path in paths if path.name.isdecimal()}
        return {name: content for name, content in found.items() if any(content)}


class Scene:
    """The running nodes of one replica set, by name."""

    def __init__(
        self, endpoint: str, etcd: EtcdSession, cluster: str, folder: Path, tasks: asyncio.TaskGroup
    ) -> None:
        self.endpoint, self.cluster, self.folder = endpoint, cluster, folder
        self._etcd, self._tasks = etcd, tasks
        self.nodes: dict[str, Replica] = {}
        self.members: tuple[str, ...] = ("a", "b", "c")
        self.settings: dict[str, Any] = {}

    async def start(self, *names: str, **settings: Any) -> list[Replica]:
        """Start nodes of the set."""
        for name in names:
            started: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
            chosen: dict[str, Any] = {
                "segment_bytes": SEGMENT_BYTES,
                "replica_lag_ms_max": LAG_MS_MAX,
                "leader_lease_ms": LEASE_MS,
                "node_lease_ms": LEASE_MS,
                "replicas": ",".join(self.members),
            }
            chosen |= WATERMARKS | self.settings | settings
            own = StorageSettings(
                node_id=name,
                broker=BROKER,
                data_dir=self.folder / name,
                cluster=self.cluster,
                etcd=self.endpoint,
                **chosen,
            )
            self._tasks.create_task(_run(own, started))
            self.nodes[name] = await started
        return [self.nodes[name] for name in names]

    async def put_topic(self) -> None:
        """Write the topic as the nameserver does."""
        spread = [nameserver_pb.QueueSpread(broker=BROKER, queue_count=8)]
        topic = StoredTopic(name=TOPIC, topic_id=TOPIC_ID, spread=spread)
        await self._etcd.put(self._etcd.key("topics", TOPIC), topic.SerializeToString())

    async def leader(self) -> Replica:
        """Wait for a serving leader and return it."""
        found: list[Replica] = []

        async def look() -> bool:
            for node in list(self.nodes.values()):
                if not node.ended.is_set() and await node.serves():
                    found.append(node)
                    return True
            return False

        await until(look)
        return found[0]

    async def set_record(self) -> ReplicaSetRecord:
        """Return the state of the set in etcd."""
        return decode_record(await self._etcd.get(f"replicas/storage/{BROKER}"))

    async def wait_vacant(self) -> None:
        """Wait until the last leader's lease has expired and no node is elected."""

        async def look() -> bool:
            return not await self.has_leader()

        await until(look)

    async def has_leader(self) -> bool:
        """Return whether etcd has an elected leader."""
        return await self._etcd.get(self._etcd.key("elections", "storage", BROKER)) is not None

    async def wait_in_sync(self, *names: str) -> None:
        """Wait until exactly these nodes are in sync."""

        async def look() -> bool:
            return (await self.set_record()).in_sync == set(names)

        await until(look)

    async def wait_equal(self, *names: str) -> None:
        """Wait until the logs of these nodes have the same bytes."""
        first, *others = [self.nodes[name] for name in names or self.nodes]
        await until(lambda: all(first.log() == other.log() for other in others))

    async def stop(self) -> None:
        """Stop all nodes."""
        for node in self.nodes.values():
            await node.stop()


@asynccontextmanager
async def replica_set(endpoint: str, cluster: str, folder: Path) -> AsyncIterator[Scene]:
    """Yield a scene with a topic and no running node."""
    async with EtcdSession(endpoint, cluster, Clock()) as etcd, asyncio.TaskGroup() as tasks:
        scene = Scene(endpoint, etcd, cluster, folder, tasks)
        await scene.put_topic()
        try:
            yield scene
        finally:
            await scene.stop()


async def _run(settings: StorageSettings, started: asyncio.Future[Replica]) -> None:
    gate, stopping, ended = CallGate(), asyncio.Event(), asyncio.Event()
    try:
        async with CuttableEtcdSession(settings.etcd, settings.cluster) as session:
            runtime = Runtime("storage", settings, session)
            async with build(settings, runtime) as app:
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
                    running = [tasks.create_task(loop()) for loop in loops]
                    started.set_result(
                        Replica(
                            settings.node_id,
                            settings.data_dir,
                            session,
                            pb_grpc.StorageServiceStub(channel),
                            query_grpc.QueryServiceStub(channel),
                            schedule_grpc.ScheduleServiceStub(channel),
                            replication_grpc.ReplicationServiceStub(channel),
                            gate,
                            stopping,
                            ended,
                        )
                    )
                    await stopping.wait()
                    if not session.cut:  # as the runtime does
                        app.resign()
                        edge.drain()
                        await runtime.node_entry.remove()
                        await server.stop(settings.shutdown_grace_ms / 1000)
                        await app.drain()
                    await server.stop(None)
                    await runtime.node_entry.remove()
                    for task in running:
                        task.cancel()
    except Exception as error:
        if not started.done():
            started.set_exception(error)
        raise
    finally:
        ended.set()
