"""A nameserver replica in this process, on a real etcd, behind a real gRPC server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1.stored_lock_pb2 import StoredLock
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as pb_grpc
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.channels import connect
from batonmq.errors import BatonError
from batonmq_server.nameserver.app import build
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.compare_and_swap import CompareAndSwap
from batonmq_server.nameserver.config import NameserverSettings
from batonmq_server.nameserver.core.change_budget import ChangeBudget
from batonmq_server.nameserver.group_calls import GroupCalls
from batonmq_server.nameserver.group_events import GroupEvents
from batonmq_server.nameserver.group_store import GroupStore
from batonmq_server.nameserver.member_sessions import MemberSessions
from batonmq_server.nameserver.metrics import MembershipMetrics
from batonmq_server.nameserver.placement_calls import PlacementCalls
from batonmq_server.nameserver.progress_deleter import ProgressDeleter
from batonmq_server.nameserver.refused_clients import RefusedClients
from batonmq_server.nameserver.topic_calls import TopicCalls
from batonmq_server.nameserver.topic_store import TopicStore
from batonmq_server.offsets.disk import LmdbDisk
from batonmq_server.offsets.epoch import OffsetsEpoch
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.group_placements import OFFSETS_SERVICE, GroupPlacements
from batonmq_server.runtime.leader_channels import LeaderChannels
from batonmq_server.runtime.log_limiter import LogLimiter
from batonmq_server.runtime.service_runtime import Runtime
from tests.offsets.running_service import epoch_on, new_hub
from tests.support.grpc_server import serving_at

CALL_TIMEOUT_S = 20


@dataclass(frozen=True)
class Replica:
    """A running nameserver, and what a test reads of it."""

    stub: pb_grpc.NameserverServiceAsyncStub
    runtime: Runtime
    address: str

    async def join(self, group: str, client_id: str, expression: str = "*") -> pb.Group:
        """Send a heartbeat for the topic `flights`."""
        request = heartbeat(group, client_id, expression)
        return (await self.stub.Heartbeat(request, timeout=CALL_TIMEOUT_S)).group

    async def beat(
        self, group: str, client_id: str, expression: str = "*", **fields: Any
    ) -> pb.HeartbeatResponse:
        """Send a heartbeat for the topic `flights`, with more of its fields set."""
        request = heartbeat(group, client_id, expression)
        request.MergeFrom(pb.HeartbeatRequest(**fields))
        return await self.stub.Heartbeat(request, timeout=CALL_TIMEOUT_S)

    async def set_group(self, name: str, **settings: Any) -> pb.Group:
        request = pb.UpdateGroupRequest(group=name, **settings)
        return (await self.stub.UpdateGroup(request, timeout=CALL_TIMEOUT_S)).group

    async def delete_group(self, name: str) -> int:
        request = pb.DeleteGroupRequest(group=name)
        return (await self.stub.DeleteGroup(request, timeout=CALL_TIMEOUT_S)).queue_count

    async def refused(self, group: str) -> list[pb.RefusedClient]:
        request = pb.DescribeGroupRequest(group=group)
        return list((await self.stub.DescribeGroup(request, timeout=CALL_TIMEOUT_S)).refused)

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
    def watch_group(self, name: str, session: str = "") -> Iterator[Any]:
        """Yield a watch; it is the session of member `session` if given."""
        member = incarnation(session) if session else None
        call = self.stub.WatchGroup(pb.WatchGroupRequest(group=name, incarnation=member))
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
    """The calls of a replica without gRPC in between; its catalog can be made to lag."""

    def __init__(self, runtime: Runtime, tasks: asyncio.TaskGroup) -> None:
        settings, etcd = runtime.settings, runtime.etcd
        assert isinstance(settings, NameserverSettings)
        self.catalog = Catalog(etcd, runtime.nodes, watchers_max=1)
        events = GroupEvents(
            MembershipMetrics(CollectorRegistry()), runtime.hub, member_lease_ms=30_000
        )
        swap = CompareAndSwap(runtime.random)
        topic_store = TopicStore(etcd, swap)
        store = GroupStore(
            etcd, swap, topic_store, member_lease_ms=30_000, on_change=events.group_changed
        )
        self.offsets = LeaderChannels(
            runtime.nodes, OFFSETS_SERVICE, offsets_grpc.OffsetsServiceStub
        )
        places = GroupPlacements(self.catalog.places, runtime.nodes)
        progress = ProgressDeleter(self.offsets.stub, places)
        self.topics = TopicCalls(settings, self.catalog, topic_store, progress)
        self.groups = GroupCalls(
            settings=settings,
            clock=runtime.clock,
            catalog=self.catalog,
            store=store,
            topics=self.topics,
            sessions=MemberSessions(etcd, self.catalog, store, events, grace_ms=1_000),
            refused=RefusedClients(etcd, self.catalog, lease_ms=30_000),
            progress_deleter=progress,
            placement=PlacementCalls(etcd, swap, self.catalog, places, store),
            events=events,
            refusal_lines=LogLimiter(etcd.clock.monotonic_ms, 0),
            budget=ChangeBudget(1_000, 1_000),
        )
        self._tasks = tasks
        self._following: list[asyncio.Task[None]] = []

    def follow(self) -> None:
        """Follow etcd from now on."""
        self._following = [self._tasks.create_task(m.run()) for m in self.catalog.mirrors]

    def stop_following(self) -> None:
        """Receive no change until `follow`."""
        for task in self._following:
            task.cancel()


@asynccontextmanager
async def replica(
    etcd_endpoint: str, cluster: str, *, follow_nodes: bool = True, **settings: Any
) -> AsyncIterator[Replica]:
    """A nameserver that runs until the block ends; it then stops without clean-up, like a crash."""
    settings = {"metrics_stream": False} | settings
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
    """Wait until the replica has read etcd."""
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
async def offsets_service(etcd: EtcdSession, folder: Path) -> AsyncIterator[OffsetsEpoch]:
    """The real offsets service, registered; its data in `folder` survive the block."""
    with LmdbDisk(folder) as disk:
        offsets = epoch_on(disk, etcd, hub=new_hub(), registry=CollectorRegistry())
        async with asyncio.TaskGroup() as tasks, serving_at(offsets.add_to) as address:
            running = [tasks.create_task(run()) for run in (offsets.commits.run, offsets.gates.run)]
            await register_offsets(etcd, address, offsets.table.epoch)
            yield offsets
            for task in running:
                task.cancel()


async def register_offsets(etcd: EtcdSession, address: str, epoch: int) -> int:
    """Register an offsets node as it does at its start; return the revision of its key."""
    node = StoredNode(
        service=pb.SERVICE_KIND_OFFSETS,
        node_id="offsets-0",
        address=address,
        epoch=epoch,
        leader=True,
        replica_set=OFFSETS_SERVICE,
    )
    return await etcd.put(etcd.key("nodes", "offsets", "offsets-0"), node.SerializeToString())


async def register_broker(
    etcd: EtcdSession, name: str, address: str = "127.0.0.1:1", room: str = "", **fields: Any
) -> None:
    """Register a broker as a storage node does; `fields` are set in its entry."""
    values: dict[str, Any] = {"node_id": name, "address": address, "room": room}
    node = StoredNode(
        service=pb.SERVICE_KIND_STORAGE, **({"epoch": 1, "leader": True} | values | fields)
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


async def grant(etcd: EtcdSession, group: str, client_id: str = "", queue_id: int = 0) -> None:
    """Write a grant as the lock manager does; without a client, a release."""
    lock = StoredLock(owner=incarnation(client_id) if client_id else None, token=1)
    key = etcd.key("locks", group, "flights", "broker-a", str(queue_id))
    await etcd.put(key, lock.SerializeToString())


async def next_group(call: Any) -> pb.Group:
    """Return the next group of a watch."""
    async with asyncio.timeout(CALL_TIMEOUT_S):
        group: pb.Group = (await call.read()).group
        return group


async def group_with(call: Any, *client_ids: str) -> pb.Group:
    """Return the first group of a watch with exactly these members.

    A replica may start with an older state if the change was made at another one.
    """
    while ids(group := await next_group(call)) != sorted(client_ids):
        pass
    return group


def owners(group: pb.Group) -> dict[str, int]:
    """Number of assigned queues by client id; unassigned ones under the empty name."""
    names = ["", *ids(group)]
    return Counter(
        names[owner]
        for topic in group.assignments
        for part in topic.brokers
        for owner in part.member_numbers
    )


def ids(group: pb.Group) -> list[str]:
    return [member.incarnation.client_id for member in group.members]


async def refusal(call: Awaitable[object]) -> BatonError:
    """Return the error that a call fails with."""
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            answer = await call
    except grpc.aio.AioRpcError as error:
        baton_error = from_rpc_error(error)
        assert error.code().name == baton_error.kind, f"{error.code()} for {baton_error.reason}"
        return baton_error
    raise AssertionError(f"not refused: {answer}")
