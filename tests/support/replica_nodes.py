"""A replica set in one process: real disks, a real etcd, real gRPC between the nodes.

A test can cut a node off from etcd, block its followers or its other calls, and kill it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import grpc
import grpc.aio

from batonmq._common.clock import Clock
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.channels import OPTIONS, connect
from batonmq.errors import NoQuorum
from batonmq_server.etcd_api.rpc_pb2 import WatchResponse
from batonmq_server.runtime.app import App
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue, Lease
from batonmq_server.runtime.interceptor import EdgeInterceptor
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord, decode_record
from batonmq_server.runtime.service_runtime import Runtime
from tests.support.clock import MovableClock
from tests.support.conditions import until

TIMEOUT_S = 20.0
LEASE_MS = 8_000
"""Longer than any pause of a loaded machine. A test waits for it only if it tests the expiry."""
LAG_MS_MAX = 4_000
LEASES: dict[str, Any] = {
    "replica_lag_ms_max": LAG_MS_MAX,
    "leader_lease_ms": LEASE_MS,
    "node_lease_ms": LEASE_MS,
}
"""Settings of a node; a test may change them."""
NOT_LEADER = {"NOT_LEADER", "NOT_SERVING", "NO_QUORUM", "UNREACHABLE"}


class CuttableEtcdSession(EtcdSession):
    """A connection to etcd that can be cut, or whose lease renewals get no answer.

    The clock of its node can be moved ahead. A node that is cut off may still see changes of the
    mirrored keys; after `lose` it sees none.

    Attributes:
        topics_arrive: While it is not set, changes of topics are still on their way.
    """

    cut = silent = False

    def __init__(self, endpoint: str, cluster: str) -> None:
        self.node_clock = MovableClock()
        self._connected = asyncio.Event()
        self._connected.set()
        self.topics_arrive = asyncio.Event()
        self.topics_arrive.set()
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
                if prefix == "topics/":
                    await self.topics_arrive.wait()
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


class ServedApp(NamedTuple):
    """The server of an app, and a channel to it."""

    edge: EdgeInterceptor
    server: grpc.aio.Server
    channel: grpc.aio.Channel


@asynccontextmanager
async def serving_app(app: App, runtime: Runtime, gate: CallGate) -> AsyncIterator[ServedApp]:
    """Serve the app, run its loops, and register the node until the block ends."""
    edge = EdgeInterceptor(runtime.clock, runtime.registry, app.long_polls)
    server = grpc.aio.server(interceptors=[edge, gate], options=OPTIONS)
    for add in app.servicers.values():
        add(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    runtime.node_entry.set_addresses(address, "")
    await server.start()
    async with connect(address) as channel, asyncio.TaskGroup() as tasks:
        if app.leader:
            await runtime.node_entry.write(epoch=app.epoch, replica_set=app.replica_set)
        loops = [*app.loops, runtime.nodes.run, runtime.node_entry.keep]
        running = [tasks.create_task(loop()) for loop in loops]
        yield ServedApp(edge, server, channel)
        await server.stop(None)
        await runtime.node_entry.remove()
        for task in running:
            task.cancel()


@dataclass(kw_only=True)
class RunningNode(ABC):
    """A running node of a replica set."""

    name: str
    service: str
    replica_set: str
    session: CuttableEtcdSession
    gate: CallGate
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @abstractmethod
    async def call_leader(self) -> None:
        """Make a call that only a serving leader answers."""

    @abstractmethod
    def stored(self) -> object:
        """Return all data of the node, to compare it with another node's."""

    async def serves(self) -> bool:
        """Return whether the node is the leader and answers."""
        try:
            await self.call_leader()
        except grpc.aio.AioRpcError as error:
            assert from_rpc_error(error).reason in NOT_LEADER, error
            return False
        return True

    async def crash(self) -> None:
        """Stop without a call to etcd, where the leases of the node then expire."""
        self.session.cut = True
        await self.stop()
        await self._leases_end()

    async def stop(self) -> None:
        """Stop cleanly."""
        self.stopping.set()
        await self.ended.wait()

    async def _leases_end(self) -> None:
        """Revoke the leases of the node, as etcd does when they expire."""
        node, election = f"nodes/{self.service}/{self.name}", f"elections/{self.service}"
        async with self.session.another() as etcd:
            for key in (node, f"{election}/{self.replica_set}"):
                stored = await etcd.get(key)
                if stored is not None and (key == node or stored.value == self.name.encode()):
                    await etcd.attach(stored.lease_id).revoke()


AnyNode = TypeVar("AnyNode", bound=RunningNode)


class NodeSet(Generic[AnyNode]):
    """The nodes of one replica set, by name."""

    def __init__(self, record: str, etcd: EtcdSession, tasks: asyncio.TaskGroup) -> None:
        self._record, self._etcd, self._tasks = record, etcd, tasks
        self.nodes: dict[str, AnyNode] = {}

    async def run_node(self, running: AbstractAsyncContextManager[AnyNode]) -> AnyNode:
        """Run a node in a task of its own until it is stopped; return it once it is started."""
        started: asyncio.Future[AnyNode] = asyncio.get_running_loop().create_future()
        self._tasks.create_task(_run_until_stopped(running, started))
        node = await started
        self.nodes[node.name] = node
        return node

    async def leader(self) -> AnyNode:
        """Wait for a serving leader and return it."""
        serving: list[AnyNode] = []

        async def look() -> bool:
            for node in list(self.nodes.values()):
                if not node.ended.is_set() and await node.serves():
                    serving.append(node)
                    return True
            return False

        await until(look)
        return serving[0]

    async def set_record(self) -> ReplicaSetRecord:
        """Return the record of the replica set in etcd."""
        return decode_record(await self._etcd.get(self._record))

    async def wait_in_sync(self, *names: str) -> None:
        """Wait until the in-sync set has exactly these nodes."""
        await self._wait_for(lambda record: record.in_sync == set(names))

    async def _wait_for(self, holds: Callable[[ReplicaSetRecord], bool]) -> None:
        """Wait until the record is as it should be; an etcd that is late is asked again."""

        async def look() -> bool:
            try:
                return holds(await self.set_record())
            except NoQuorum:
                return False

        await until(look)

    async def wait_equal(self, *names: str) -> None:
        """Wait until these nodes, or all, have stored the same bytes."""
        first, *others = [self.nodes[name] for name in names or self.nodes]
        await until(lambda: all(first.stored() == other.stored() for other in others))

    async def crash_all(self) -> None:
        """Kill all nodes at once, so that none of them removes another one from the in-sync set."""
        nodes = list(self.nodes.values())
        for node in nodes:
            node.session.cut = True
        for node in nodes:
            await node.crash()

    async def wait_epoch_above(self, epoch: int) -> None:
        """Wait until a leader of a higher epoch is elected; it need not serve yet."""
        await self._wait_for(lambda record: record.epoch > epoch)

    async def stop(self) -> None:
        """Stop all nodes."""
        for node in self.nodes.values():
            await node.stop()


async def _run_until_stopped(
    running: AbstractAsyncContextManager[AnyNode], started: asyncio.Future[AnyNode]
) -> None:
    try:
        async with running as node:
            started.set_result(node)
            await node.stopping.wait()
    except Exception as error:
        if not started.done():
            started.set_exception(error)
        raise
    finally:
        if started.done() and not started.cancelled() and started.exception() is None:
            started.result().ended.set()
