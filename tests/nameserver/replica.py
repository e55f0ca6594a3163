"""A nameserver replica in this process, on a real etcd, behind a real gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as pb_grpc
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from prometheus_client import CollectorRegistry

from batonmq.channels import connect
from batonmq.common.clock import Clock
from batonmq.common.errors import BatonError
from batonmq.common.rpc import from_rpc_error
from services.nameserver.__main__ import build
from services.nameserver.catalog import Catalog
from services.nameserver.config import NameserverSettings
from services.nameserver.progress import Progress
from services.nameserver.server import NameserverServicer
from services.nameserver.store import Store
from services.nameserver.telemetry import Telemetry
from services.offsets.app import Offsets, opened
from services.offsets.core.calls import Limits
from services.runtime.etcd import EtcdSession
from services.runtime.events import EventHub
from services.runtime.peers import Peer
from services.runtime.process import Runtime
from tests.support.serving import serving_at

CALL_TIMEOUT_S = 10


@dataclass(frozen=True)
class Replica:
    """A running nameserver and what a test may look at."""

    stub: pb_grpc.NameserverServiceAsyncStub
    runtime: Runtime
    address: str

    async def join(self, group: str, client_id: str, expression: str = "*") -> pb.Group:
        """Send a heartbeat for the topic `flights`."""
        request = heartbeat(group, client_id, expression)
        return (await self.stub.Heartbeat(request, timeout=CALL_TIMEOUT_S)).group

    async def leave(self, group: str, client_id: str) -> bool:
        request = pb.LeaveRequest(group=group, incarnation=incarnation(client_id))
        return (await self.stub.Leave(request, timeout=CALL_TIMEOUT_S)).left

    async def create(self, topic: str, queue_count: int = 0) -> pb.CreateTopicResponse:
        request = pb.CreateTopicRequest(topic=topic, queue_count=queue_count)
        return await self.stub.CreateTopic(request, timeout=CALL_TIMEOUT_S)

    async def delete(self, topic: str) -> None:
        await self.stub.DeleteTopic(pb.DeleteTopicRequest(topic=topic), timeout=CALL_TIMEOUT_S)

    async def route(self, topic: str) -> pb.Route:
        request = pb.QueryRouteRequest(topic=topic)
        return (await self.stub.QueryRoute(request, timeout=CALL_TIMEOUT_S)).route

    async def group(self, name: str) -> pb.Group:
        request = pb.DescribeGroupRequest(group=name)
        return (await self.stub.DescribeGroup(request, timeout=CALL_TIMEOUT_S)).group

    def metric(self, name: str, **labels: str) -> float:
        return self.runtime.registry.get_sample_value(f"baton_nameserver_{name}", labels) or 0

    @contextmanager
    def watch_group(self, name: str) -> Iterator[Any]:
        call = self.stub.WatchGroup(pb.WatchGroupRequest(group=name))
        try:
            yield call
        finally:
            call.cancel()

    @contextmanager
    def watch_route(self, name: str) -> Iterator[Any]:
        call = self.stub.WatchRoute(pb.WatchRouteRequest(topic=name))
        try:
            yield call
        finally:
            call.cancel()


class Direct:
    """A replica's servicer, to be called without gRPC's buffers between; it may be made to lag."""

    def __init__(self, runtime: Runtime, tasks: asyncio.TaskGroup) -> None:
        assert isinstance(runtime.settings, NameserverSettings)
        self.catalog = Catalog(runtime.etcd, runtime.nodes, watchers_max=1)
        store = Store(runtime.etcd, runtime.random, member_lease_ms=30_000)
        telemetry = Telemetry(CollectorRegistry(), runtime.hub, self.catalog)
        self.offsets = Peer(runtime.nodes, "offsets", offsets_grpc.OffsetsServiceStub)
        self.servicer = NameserverServicer(
            runtime.settings, self.catalog, store, telemetry, Progress(self.offsets.stub)
        )
        self._tasks = tasks
        self._following: list[asyncio.Task[None]] = []

    def follow(self) -> None:
        """Follow etcd from now on."""
        self._following = [self._tasks.create_task(m.run()) for m in self.catalog.mirrors]

    def stop_following(self) -> None:
        """Know of no change until `follow`."""
        for task in self._following:
            task.cancel()


@asynccontextmanager
async def replica(
    etcd_endpoint: str, cluster: str, *, follow_nodes: bool = True, **settings: Any
) -> AsyncIterator[Replica]:
    """A nameserver that runs until the block ends; it then just stops, as a crash would."""
    configured = NameserverSettings(cluster=cluster, etcd=etcd_endpoint, **settings)
    async with EtcdSession(etcd_endpoint, cluster, Clock()) as etcd:
        runtime = Runtime("nameserver", configured, etcd)
        async with build(configured, runtime) as app, asyncio.TaskGroup() as tasks:
            loops = [*app.loops, *([runtime.nodes.run] if follow_nodes else [])]
            running = [tasks.create_task(loop()) for loop in loops]
            async with serving_at(*app.servicers.values()) as address, connect(address) as channel:
                stub = pb_grpc.NameserverServiceStub(channel)
                if follow_nodes:
                    await _serves(stub)
                yield Replica(stub, runtime, address)
            for task in running:
                task.cancel()


async def _serves(stub: pb_grpc.NameserverServiceAsyncStub) -> None:
    """Until the replica has read etcd."""
    async with asyncio.timeout(20):
        while True:
            try:
                await stub.ListTopics(pb.ListTopicsRequest(), timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if from_rpc_error(error).reason != "NOT_SERVING":
                    raise
                await asyncio.sleep(0.01)
            else:
                return


@asynccontextmanager
async def offsets_service(etcd: EtcdSession, folder: Path) -> AsyncIterator[Offsets]:
    """The real offsets service, registered; it keeps in `folder` what outlives the block."""
    clock, registry = Clock(), CollectorRegistry()
    hub = EventHub("offsets/offsets-0", 1, clock)
    with opened(folder, Limits(), clock, registry, hub) as offsets:
        async with asyncio.TaskGroup() as tasks, serving_at(offsets.add) as address:
            writer = tasks.create_task(offsets.commits.run())
            await register_offsets(etcd, address, offsets.table.epoch)
            yield offsets
            writer.cancel()


async def register_offsets(etcd: EtcdSession, address: str, epoch: int) -> int:
    """Do what an offsets node does when it starts; the revision of its key."""
    node = pb.Node(
        service=pb.SERVICE_KIND_OFFSETS,
        node_id="offsets-0",
        address=address,
        epoch=epoch,
        leader=True,
    )
    return await etcd.put(etcd.key("nodes", "offsets", "offsets-0"), node.SerializeToString())


async def register_broker(etcd: EtcdSession, name: str, address: str = "127.0.0.1:1") -> None:
    """Do what a storage node does when it starts."""
    node = pb.Node(
        service=pb.SERVICE_KIND_STORAGE, node_id=name, address=address, epoch=1, leader=True
    )
    await etcd.put(etcd.key("nodes", "storage", name), node.SerializeToString())


def incarnation(client_id: str, incarnation_id: int = 1) -> queue_pb2.Incarnation:
    return queue_pb2.Incarnation(client_id=client_id, incarnation_id=incarnation_id)


def heartbeat(
    group: str, client_id: str, expression: str = "*", incarnation_id: int = 1
) -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(
        group=group,
        incarnation=incarnation(client_id, incarnation_id),
        subscriptions=[pb.Subscription(topic="flights", expression=expression)],
        host=f"host-of-{client_id}",
    )


def ids(group: pb.Group) -> list[str]:
    return [member.incarnation.client_id for member in group.members]


async def refusal(call: Awaitable[object]) -> BatonError:
    """The error a call fails with."""
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            answer = await call
    except grpc.aio.AioRpcError as error:
        found = from_rpc_error(error)
        assert error.code().name == found.kind, f"{error.code()} for {found.reason}"
        return found
    raise AssertionError(f"not refused: {answer}")
