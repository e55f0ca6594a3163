"""A replica set of storage in one process, with the faults of tests/support/replica_nodes.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
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
from baton.storage.v1 import transaction_service_pb2_grpc as transaction_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._core.records import decode_records, read_header
from batonmq.errors import BatonError
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.storage.app import build
from batonmq_server.storage.config import StorageSettings
from tests.storage.batches import TOPIC, TOPIC_ID
from tests.storage.running_node import WATERMARKS
from tests.support.conditions import until
from tests.support.replica_nodes import (
    LEASES,
    TIMEOUT_S,
    CallGate,
    CuttableEtcdSession,
    NodeSet,
    RunningNode,
    serving_app,
)

BROKER = "broker-a"
SEGMENT_BYTES = 64 * 1024


def queue(queue_id: int) -> queue_pb2.QueueRef:
    """Return a queue of the topic of the set."""
    return queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=queue_id)


@dataclass(kw_only=True)
class Replica(RunningNode):
    """A running node of the replica set."""

    folder: Path
    stub: pb_grpc.StorageServiceAsyncStub
    queries: query_grpc.QueryServiceAsyncStub
    scheduling: schedule_grpc.ScheduleServiceAsyncStub
    transactions: transaction_grpc.TransactionServiceAsyncStub
    replication: replication_grpc.ReplicationServiceAsyncStub

    async def call_leader(self) -> None:
        request = pb.QueryOffsetsRequest(queues=[queue(7)])
        await self.stub.QueryOffsets(request, timeout=TIMEOUT_S)

    def stored(self) -> dict[str, bytes]:
        return self.log()

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
        message_bodies: list[bytes] = []
        offset = 0
        while True:
            answer = await self.read(queue_id, offset)
            if answer.next_offset == offset:
                return message_bodies
            for batch in answer.batches:
                header = read_header(batch)
                message_bodies += [
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
        """Return the segment files that are not all zeros; the node may remove some meanwhile."""
        folder = self.folder / "log"
        segments: dict[str, bytes] = {}
        for path in list(folder.iterdir()) if folder.exists() else ():
            if path.name.isdecimal():
                with suppress(FileNotFoundError):
                    segments[path.name] = path.read_bytes()
        return {name: content for name, content in segments.items() if any(content)}


class Scene(NodeSet[Replica]):
    """The running nodes of one replica set, by name."""

    def __init__(
        self, endpoint: str, etcd: EtcdSession, cluster: str, folder: Path, tasks: asyncio.TaskGroup
    ) -> None:
        super().__init__(f"replicas/storage/{BROKER}", etcd, tasks)
        self.endpoint, self.cluster, self.folder = endpoint, cluster, folder
        self.members: tuple[str, ...] = ("a", "b", "c")
        self.settings: dict[str, Any] = {}

    async def start(self, *names: str, **settings: Any) -> list[Replica]:
        """Start nodes of the set."""
        for name in names:
            chosen = LEASES | {"segment_bytes": SEGMENT_BYTES, "replicas": ",".join(self.members)}
            chosen |= WATERMARKS | self.settings | settings
            own = StorageSettings(
                node_id=name,
                broker=BROKER,
                data_dir=self.folder / name,
                cluster=self.cluster,
                etcd=self.endpoint,
                **chosen,
            )
            await self.run_node(_running(own))
        return [self.nodes[name] for name in names]

    async def put_topic(
        self, compaction: nameserver_pb.Compaction | None = None, *, write_queue_count: int = 0
    ) -> None:
        """Write the topic as the nameserver does.

        Args:
            write_queue_count: Queues from this one on take no more messages; 0: all of them do.
        """
        spread = [
            nameserver_pb.QueueSpread(
                broker=BROKER, queue_count=8, write_queue_count=write_queue_count
            )
        ]
        topic = StoredTopic(name=TOPIC, topic_id=TOPIC_ID, spread=spread, compaction=compaction)
        await self._etcd.put(self._etcd.key("topics", TOPIC), topic.SerializeToString())

    async def wait_vacant(self) -> None:
        """Wait until the last leader's lease has expired and no node is elected."""

        async def look() -> bool:
            return not await self.has_leader()

        await until(look)

    async def has_leader(self) -> bool:
        """Return whether etcd has an elected leader."""
        return await self._etcd.get(self._etcd.key("elections", "storage", BROKER)) is not None


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


@asynccontextmanager
async def _running(settings: StorageSettings) -> AsyncIterator[Replica]:
    gate = CallGate()
    async with CuttableEtcdSession(settings.etcd, settings.cluster) as session:
        runtime = Runtime("storage", settings, session)
        async with (
            build(settings, runtime) as app,
            serving_app(app, runtime, gate) as serving,
        ):
            yield Replica(
                name=settings.node_id,
                service="storage",
                replica_set=BROKER,
                session=session,
                gate=gate,
                folder=settings.data_dir,
                stub=pb_grpc.StorageServiceStub(serving.channel),
                queries=query_grpc.QueryServiceStub(serving.channel),
                scheduling=schedule_grpc.ScheduleServiceStub(serving.channel),
                transactions=transaction_grpc.TransactionServiceStub(serving.channel),
                replication=replication_grpc.ReplicationServiceStub(serving.channel),
            )
            if not session.cut:  # as the runtime does
                app.resign()
                serving.edge.drain()
                await runtime.node_entry.remove()
                await serving.server.stop(settings.shutdown_grace_ms / 1000)
                await app.drain()
