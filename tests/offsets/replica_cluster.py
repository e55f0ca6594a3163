"""A replica set of offsets in one process, with the faults of tests/support/replica_nodes.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
from batonmq.errors import BatonError
from batonmq_server.offsets.app import served
from batonmq_server.offsets.config import OffsetsSettings
from batonmq_server.offsets.disk import LmdbDisk, StoredEntry
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.service_runtime import Runtime
from tests.offsets.service_calls import run
from tests.support.replica_nodes import (
    LEASES,
    TIMEOUT_S,
    CallGate,
    CuttableEtcdSession,
    NodeSet,
    RunningNode,
    serving_app,
)

TERM = 1


@dataclass(kw_only=True)
class Replica(RunningNode):
    """A running node of offsets."""

    disk: LmdbDisk
    stub: pb_grpc.OffsetsServiceAsyncStub
    replication: replication_grpc.ReplicationServiceAsyncStub
    caught_up: Callable[[], Awaitable[bool]]

    async def call_leader(self) -> None:
        await self.stub.ListResets(pb.ListResetsRequest(group="readers"), timeout=TIMEOUT_S)

    def stored(self) -> list[StoredEntry]:
        return list(self.disk.read())


class ReplicaSet(NodeSet[Replica]):
    """The nodes of one replica set of offsets."""

    def __init__(
        self, endpoint: str, etcd: EtcdSession, cluster: str, folder: Path, tasks: asyncio.TaskGroup
    ) -> None:
        super().__init__("replicas/offsets/offsets", etcd, tasks)
        self.endpoint, self.cluster, self.folder = endpoint, cluster, folder
        self.settings: dict[str, Any] = {}

    async def start(self, *names: str) -> list[Replica]:
        """Start nodes of the set a, b, c."""
        for name in names:
            settings = OffsetsSettings(
                node_id=name,
                data_dir=self.folder / name,
                cluster=self.cluster,
                etcd=self.endpoint,
                **(LEASES | {"replicas": "a,b,c"} | self.settings),
            )
            await self.run_node(_running(settings))
        return [self.nodes[name] for name in names]


@asynccontextmanager
async def replica_set(endpoint: str, cluster: str, folder: Path) -> AsyncIterator[ReplicaSet]:
    """Return a scene without nodes."""
    async with EtcdSession(endpoint, cluster, Clock()) as etcd, asyncio.TaskGroup() as tasks:
        scene = ReplicaSet(endpoint, etcd, cluster, folder, tasks)
        try:
            yield scene
        finally:
            await scene.stop()


@asynccontextmanager
async def _running(settings: OffsetsSettings) -> AsyncIterator[Replica]:
    gate = CallGate()
    async with CuttableEtcdSession(settings.etcd, settings.cluster) as session:
        runtime = Runtime("offsets", settings, session)
        with LmdbDisk(settings.data_dir) as disk:
            async with (
                served(settings, runtime, disk) as app,
                serving_app(app, runtime, gate) as serving,
            ):
                yield Replica(
                    name=settings.node_id,
                    service="offsets",
                    replica_set=settings.replica_set,
                    session=session,
                    gate=gate,
                    disk=disk,
                    stub=pb_grpc.OffsetsServiceStub(serving.channel),
                    replication=replication_grpc.ReplicationServiceStub(serving.channel),
                    caught_up=app.caught_up,
                )


async def three(scene: ReplicaSet) -> Replica:
    """Wait until all three nodes are in sync; return the leader."""
    await scene.start("a", "b", "c")
    leader = await scene.leader()
    await scene.wait_in_sync("a", "b", "c")
    return leader


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
    raise AssertionError("the ack was accepted")
