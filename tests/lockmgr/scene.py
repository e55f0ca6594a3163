"""A lock manager and the offsets service in one process, with a real etcd.

A test can move a clock, cut a lock manager off from etcd, and set a rule for each call to offsets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as pb_grpc
from baton.lockmgr.v1 import stored_lock_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from baton.nameserver.v1.stored_group_pb2 import StoredGroup
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.channels import OPTIONS, connect
from batonmq.errors import BatonError, NoQuorum
from batonmq_server.lockmgr.app import build as build_lockmgr
from batonmq_server.lockmgr.config import LockmgrSettings
from batonmq_server.offsets.app import build as build_offsets
from batonmq_server.offsets.config import OffsetsSettings
from batonmq_server.runtime.app import App
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue, Put
from batonmq_server.runtime.group_record import changed_parts, record_key, split_record
from batonmq_server.runtime.interceptor import EdgeInterceptor
from batonmq_server.runtime.service_runtime import Runtime
from tests.support.clock import MovableClock
from tests.support.conditions import until

if TYPE_CHECKING:
    from baton.lockmgr.v1.lockmgr_service_pb2_grpc import LockmgrServiceAsyncStub as Stub

GROUP, TOPIC, BROKER = "group", "topic", "broker-a"
QUEUE_COUNT = 2_000
"""Queues of each topic."""
HOLD_MS = 15_000
"""How long an Acquire waits in a test that expects a grant."""
TIMEOUT_S = 20.0
LEADER_LEASE_MS = 10_000
"""Longer than any pause of a loaded machine. No test waits for it: see
`Node.cut_until_leases_expire`."""
OPEN: dict[str, Any] = {
    "subscription_generation": 1,
    "model": nameserver_pb.MESSAGE_MODEL_CLUSTERING,
    "bound": True,
}
"""A gate under which every request is admitted."""
Proceed = Callable[[], Awaitable[Any]]
Rule = Callable[[Any, Proceed], Awaitable[Any]]


class Session(EtcdSession):
    """A connection to etcd that can be cut, before or after a transaction is applied."""

    cut = False
    lose_txn_answers = False

    def __init__(self, endpoint: str, cluster: str) -> None:
        self.lease_clock = MovableClock()
        super().__init__(endpoint, cluster, self.lease_clock)
        self.stopped: list[dict[str, Any]] = []
        """Transactions that did not reach etcd."""

    def cut_until_leases_expire(self) -> None:
        """Cut the connection, and move the clock by the length of the leader's lease."""
        self.cut = True
        self.lease_clock.ahead_ms += LEADER_LEASE_MS

    async def txn(self, **parts: Any) -> int | None:
        if self.cut:
            self.stopped.append(parts)
        self._check()
        revision = await super().txn(**parts)
        if self.lose_txn_answers and any(p.key.startswith("locks/") for p in parts["put"]):
            raise NoQuorum("the answer is lost")
        self._check()
        return revision

    async def get(self, key: str) -> KeyValue | None:
        self._check()
        return await super().get(key)

    async def keep_alive(self, lease_id: int) -> bool:
        self._check()
        return await super().keep_alive(lease_id)

    async def revoke(self, lease_id: int) -> None:
        self._check()
        await super().revoke(lease_id)

    def _check(self) -> None:
        if self.cut:
            raise NoQuorum("cut off")


class Rules(grpc.aio.ServerInterceptor):
    """Calls `rules[method](request, proceed)` in place of the method, if a test has set a rule."""

    def __init__(self) -> None:
        self.rules: dict[str, Rule] = {}
        self.seen: list[tuple[str, Any]] = []

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        method = details.method.rpartition("/")[2]

        async def call(request: Any, context: Any) -> Any:
            self.seen.append((method, request))
            rule = self.rules.get(method)
            if rule is None:
                return await handler.unary_unary(request, context)
            return await rule(request, lambda: handler.unary_unary(request, context))

        return grpc.unary_unary_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )

    def fences(self) -> list[offsets_pb.FenceItem]:
        """Return all fences that have arrived."""
        return [item for method, r in self.seen if method == "Fence" for item in r.items]


@dataclass
class Node:
    """A running lock manager, with the parts that a test observes or breaks."""

    session: Session
    clock: MovableClock
    runtime: Runtime
    stub: Stub
    stop: asyncio.Event
    ended: asyncio.Event

    async def leads(self) -> bool:
        try:
            await self.stub.List(pb.ListRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            return False
        return True

    async def crash(self) -> None:
        """Stop without another call to etcd, and expire its leases there."""
        self.session.cut = True
        self.stop.set()
        await self.ended.wait()
        await self._leases_end()

    async def cut_until_leases_expire(self) -> None:
        """Cut the node off from etcd until its leader lease has expired, here and then in etcd."""
        self.session.cut_until_leases_expire()
        await until(self._refuses)
        await self._leases_end()

    async def _refuses(self) -> bool:
        return not await self.leads()

    async def _leases_end(self) -> None:
        """Revoke the leases of a node, as etcd does when they are not refreshed."""
        settings = self.runtime.settings
        async with EtcdSession(settings.etcd, settings.cluster, Clock()) as etcd:
            name = settings.node_id
            for key in (f"nodes/lockmgr/{name}", "elections/lockmgr"):
                stored = await etcd.get(key)
                if stored is not None and (name in key or stored.value == name.encode()):
                    await etcd.attach(stored.lease_id).revoke()


@dataclass
class Scene:
    """A cluster of one offsets service and any number of lock managers."""

    endpoint: str
    cluster: str
    etcd: EtcdSession
    offsets: offsets_grpc.OffsetsServiceAsyncStub
    offsets_clock: MovableClock
    rules: Rules
    tasks: asyncio.TaskGroup
    generation: int = 0
    gate: bytes = b"none"
    parts: Mapping[str, bytes] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    async def lockmgr(self, **settings: Any) -> Node:
        """Start a lock manager, which need not become the leader."""
        name = f"lockmgr-{len(self.nodes)}"
        started: asyncio.Future[Node] = asyncio.get_running_loop().create_future()
        lease: dict[str, Any] = {"leader_lease_ms": LEADER_LEASE_MS}
        kind = LockmgrSettings(
            node_id=name, cluster=self.cluster, etcd=self.endpoint, **(lease | settings)
        )
        self.tasks.create_task(_lockmgr(kind, started))
        self.nodes.append(await started)
        return self.nodes[-1]

    async def leader(self, **settings: Any) -> Node:
        """Start a lock manager and wait until it leads."""
        node = await self.lockmgr(**settings)
        await until(node.leads)
        return node

    async def set_group(
        self,
        *members: Member,
        topics: Sequence[str] = (TOPIC,),
        queue_count: int = QUEUE_COUNT,
        **gate: Any,
    ) -> int:
        """Write the group record, and its gate if that has changed; return the new generation.

        All queues are assigned to the last one of the members.
        """
        self.generation += 1
        assignment = nameserver_pb.BrokerAssignment(
            broker=BROKER, member_numbers=[len(members)] * queue_count
        )
        group = StoredGroup(
            name=GROUP,
            generation=self.generation,
            members=[nameserver_pb.Member(incarnation=m.incarnation) for m in members],
            subscriptions=[nameserver_pb.Subscription(topic=t, expression="*") for t in topics],
            assignments=[
                nameserver_pb.TopicAssignment(topic=t, brokers=[assignment]) for t in topics
            ],
        )
        parts = split_record(group, 0, {})
        changed, vanished = changed_parts(self.parts, parts)
        put = [Put(record_key(GROUP, part), value) for part, value in changed.items()]
        delete = [record_key(GROUP, part) for part in vanished]
        opened = StoredGate(**(OPEN | gate)).SerializeToString()
        if opened != self.gate:
            put.append(Put(f"gates/{GROUP}", opened))
        assert await self.etcd.txn(compare=(), put=put, delete=delete)
        self.gate, self.parts = opened, parts
        return self.generation

    async def stored(self, queue_id: int = 0) -> stored_lock_pb2.StoredLock | None:
        """Return the queue's entry in etcd."""
        entry = await self.etcd.get(f"locks/{GROUP}/{TOPIC}/{BROKER}/{queue_id}")
        return stored_lock_pb2.StoredLock.FromString(entry.value) if entry else None

    async def stored_count(self) -> int:
        """Return the number of entries in etcd."""
        return len((await self.etcd.get_prefix("locks/"))[0])

    async def registered(self, service: str) -> list[StoredNode]:
        """Return the registered nodes of a service, by name."""
        nodes, _ = await self.etcd.get_prefix(f"nodes/{service}/")
        return [StoredNode.FromString(stored.value) for stored in nodes]

    async def progress(self, queue_id: int = 0) -> offsets_pb.Progress:
        """Return the progress of the queue at offsets."""
        request = offsets_pb.QueryRequest(queues=[queue(queue_id)])
        answer = await self.offsets.Query(request, timeout=TIMEOUT_S)
        assert answer.outcomes[0].HasField("progress"), answer
        return answer.outcomes[0].progress

    async def recreate_topic(self, topic_id: int = 2) -> None:
        """Delete the progress on the topic, as a nameserver does before it recreates the topic."""
        request = offsets_pb.DeleteTopicRequest(topic=TOPIC, topic_id=topic_id)
        await self.offsets.DeleteTopic(request, timeout=TIMEOUT_S)

    async def deliver(
        self, token: int, first: int, next_: int, queue_id: int = 0, generation: int = 1
    ) -> None:
        """Record a delivery under the subscription of `generation`, as storage does."""
        item = offsets_pb.DeliveryItem(
            queue=queue(queue_id),
            token=token,
            first_offset=first,
            next_offset=next_,
            subscription_generation=generation,
        )
        request = offsets_pb.RecordDeliveredRequest(items=[item])
        answer = await self.offsets.RecordDelivered(request, timeout=TIMEOUT_S)
        _raise(answer.outcomes[0])

    async def commit(self, token: int, committed: int, queue_id: int = 0) -> None:
        """Acknowledge all offsets below `committed`."""
        item = offsets_pb.CommitItem(queue=queue(queue_id), token=token, committed_offset=committed)
        answer = await self.offsets.Commit(
            offsets_pb.CommitRequest(items=[item]), timeout=TIMEOUT_S
        )
        _raise(answer.outcomes[0])

    async def close(self, token: int, committed: int = 0, queue_id: int = 0) -> None:
        """Close the queue under the token."""
        item = offsets_pb.CloseItem(queue=queue(queue_id), token=token, committed_offset=committed)
        answer = await self.offsets.Close(offsets_pb.CloseRequest(items=[item]), timeout=TIMEOUT_S)
        _raise(answer.outcomes[0])

    async def reset(self, to: int, queue_id: int = 0) -> None:
        """Reset the progress, as an operator does."""
        item = offsets_pb.ResetItem(queue=queue(queue_id), to_offset=to)
        request = offsets_pb.ResetRequest(op_id="op-1", by="operator", reason="test", items=[item])
        _raise((await self.offsets.Reset(request, timeout=TIMEOUT_S)).outcomes[0])


@dataclass
class Member:
    """A client of the lock manager."""

    client_id: str
    incarnation_id: int = 1
    seq: int = 0

    @property
    def incarnation(self) -> queue_pb2.Incarnation:
        return queue_pb2.Incarnation(client_id=self.client_id, incarnation_id=self.incarnation_id)

    async def acquire_each(
        self,
        at: Node | Stub,
        generation: int,
        queue_ids: Sequence[int] = (0,),
        *,
        hold_ms: int = 0,
        seq: int = 0,
        resume: Sequence[tuple[int, int]] = (),
    ) -> dict[int, pb.Grant | BatonError]:
        """Send one Acquire and return its outcomes by queue; `seq` 0 stands for the next number."""
        self.seq = seq or self.seq + 1
        ranges = [queue_pb2.OffsetRange(first_offset=a, next_offset=b) for a, b in resume]
        request = pb.AcquireRequest(
            incarnation=self.incarnation,
            acquire_seq=self.seq,
            generation=generation,
            items=[pb.AcquireItem(queue=queue(q), resume=ranges) for q in queue_ids],
            hold_ms=hold_ms,
        )
        outcomes: dict[int, pb.Grant | BatonError] = {}
        async for answer in stub_of(at).Acquire(request, timeout=TIMEOUT_S):
            granted = answer.HasField("grant")
            outcomes[answer.queue.queue.queue_id] = (
                answer.grant if granted else error_from_pb(answer.error)
            )
        return outcomes

    async def acquire(self, at: Node | Stub, generation: int, **options: Any) -> pb.Grant:
        """Acquire queue 0; raise the error if it is refused."""
        outcome = (await self.acquire_each(at, generation, **options))[0]
        if isinstance(outcome, BatonError):
            raise outcome
        return outcome

    @asynccontextmanager
    async def waiting(self, at: Node, generation: int) -> AsyncIterator[asyncio.Task[pb.Grant]]:
        """Acquire queue 0: the block begins when the request waits; it is answered at the end."""
        async with asyncio.TaskGroup() as tasks:
            acquiring = tasks.create_task(self.acquire(at, generation, hold_ms=HOLD_MS))
            await until(lambda: waits(at, self.client_id))
            yield acquiring

    async def refusal(self, at: Node | Stub, generation: int, **options: Any) -> BatonError:
        """Return the error of an Acquire of queue 0, or of the whole call."""
        try:
            outcome = (await self.acquire_each(at, generation, **options))[0]
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        assert isinstance(outcome, BatonError), "granted"
        return outcome

    async def keep_alive(
        self, at: Node | Stub, *tokens: int, seq: int | None = None
    ) -> list[pb.HoldReport]:
        """Send a keep-alive with the tokens of queues 0, 1, ...; 0 leaves a queue out."""
        holds = [pb.Hold(queue=queue(q), token=t) for q, t in enumerate(tokens) if t]
        request = pb.KeepAliveRequest(
            incarnation=self.incarnation,
            acquire_seq=self.seq if seq is None else seq,
            holds=holds,
        )
        return list((await stub_of(at).KeepAlive(request, timeout=TIMEOUT_S)).reports)

    async def state(self, at: Node | Stub, token: int) -> str:
        """Return the state of queue 0 from a keep-alive."""
        (report,) = await self.keep_alive(at, token)
        return pb.HoldState.Name(report.state).removeprefix("HOLD_STATE_")

    async def release(self, at: Node | Stub, token: int, queue_id: int = 0) -> int:
        """Release a queue; return how many entries were freed."""
        request = pb.ReleaseRequest(
            incarnation=self.incarnation, holds=[pb.Hold(queue=queue(queue_id), token=token)]
        )
        return (await stub_of(at).Release(request, timeout=TIMEOUT_S)).released_count

    async def release_all(
        self, at: Node | Stub, group: str = "", *, drained: bool = False
    ) -> pb.ReleaseAllResponse:
        """Release all queues that are closed, or also those that are drained."""
        request = pb.ReleaseAllRequest(incarnation=self.incarnation, group=group, drained=drained)
        return await stub_of(at).ReleaseAll(request, timeout=TIMEOUT_S)

    @asynccontextmanager
    async def watching(self, at: Node | Stub) -> AsyncIterator[Watched]:
        """Open a Watch stream for the block."""
        call = stub_of(at).Watch(pb.WatchRequest(incarnation=self.incarnation))
        watched = Watched()
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(watched.read(call))
            try:
                yield watched
            finally:
                reading.cancel()
                call.cancel()


class Watched:
    """The notices of one stream; `ended` has the reason once the stream has ended."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[Any] = asyncio.Queue(10_000)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read(self, call: Any) -> None:
        try:
            async for response in call:
                self._arrived.put_nowait(getattr(response, response.WhichOneof("event")))
        except grpc.aio.AioRpcError as error:
            self.ended.set_result(from_rpc_error(error).reason)
        else:
            self.ended.set_result("OK")

    async def wanted(self) -> tuple[int, int, str, str]:
        """Return queue, token, waiter and reason of the next notice, which must be a Wanted."""
        notice = await self._next()
        assert isinstance(notice, pb.Wanted), notice
        reason = pb.WantedReason.Name(notice.reason).removeprefix("WANTED_REASON_")
        return notice.queue.queue.queue_id, notice.token, notice.by, reason

    async def freed(self) -> int:
        """Return the queue of the next notice, which must be a Freed."""
        notice = await self._next()
        assert isinstance(notice, pb.Freed), notice
        return notice.queue.queue.queue_id

    def nothing(self) -> bool:
        """Return whether there is no unread notice."""
        return self._arrived.empty()

    async def _next(self) -> Any:
        async with asyncio.timeout(TIMEOUT_S / 2):
            return await self._arrived.get()


def stub_of(at: Node | Stub) -> Stub:
    """Return the stub of a node, or the stub itself."""
    return at.stub if isinstance(at, Node) else at


def queue(queue_id: int = 0) -> queue_pb2.GroupQueue:
    """Return a queue of the scene's group and topic."""
    inner = queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=queue_id)
    return queue_pb2.GroupQueue(group=GROUP, queue=inner)


async def entries(node: Node) -> list[pb.LockEntry]:
    """Return the entries that the node lists."""
    return list((await node.stub.List(pb.ListRequest(), timeout=TIMEOUT_S)).entries)


async def describe(node: Node, queue_id: int = 0) -> pb.DescribeResponse:
    """Return the node's description of a queue."""
    request = pb.DescribeRequest(queue=queue(queue_id))
    return await node.stub.Describe(request, timeout=TIMEOUT_S)


async def waits(node: Node, client_id: str) -> bool:
    """Return whether the client waits for a queue."""
    return any(client_id in entry.waiters for entry in await entries(node))


@asynccontextmanager
async def open_scene(endpoint: str, folder: Path) -> AsyncIterator[Scene]:
    """Yield an empty cluster with offsets running, without a lock manager."""
    cluster = f"test-{Random().getrandbits(64):x}"
    clock, rules = MovableClock(), Rules()
    values: dict[str, Any] = {"cluster": cluster, "etcd": endpoint}
    settings = OffsetsSettings(data_dir=folder / "offsets", **values)
    async with EtcdSession(endpoint, cluster, Clock()) as etcd:
        runtime = Runtime("offsets", settings, etcd)
        runtime.clock = clock
        async with (
            build_offsets(settings, runtime) as app,
            _served(app, runtime, rules) as channel,
            asyncio.TaskGroup() as tasks,
        ):
            stub = offsets_grpc.OffsetsServiceStub(channel)
            scene = Scene(endpoint, cluster, etcd, stub, clock, rules, tasks)
            yield scene
            for node in scene.nodes:
                node.stop.set()


async def _lockmgr(settings: LockmgrSettings, started: asyncio.Future[Node]) -> None:
    clock, stop, ended = MovableClock(), asyncio.Event(), asyncio.Event()
    session = Session(settings.etcd, settings.cluster)
    try:
        async with session:
            runtime = Runtime("lockmgr", settings, session)
            runtime.clock = clock
            async with (
                build_lockmgr(settings, runtime) as app,
                _served(app, runtime) as channel,
            ):
                stub = pb_grpc.LockmgrServiceStub(channel)
                started.set_result(Node(session, clock, runtime, stub, stop, ended))
                await stop.wait()
    finally:
        ended.set()


@asynccontextmanager
async def _served(
    app: App, runtime: Runtime, rules: Rules | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    """Serve the app and run its loops until the block ends."""
    edge = EdgeInterceptor(Clock(), runtime.registry, app.long_polls)
    interceptors = [edge, rules] if rules else [edge]
    server = grpc.aio.server(interceptors=interceptors, options=OPTIONS)
    for add in app.servicers.values():
        add(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    runtime.node_entry.set_addresses(address, "")
    await server.start()
    try:
        async with asyncio.TaskGroup() as tasks, connect(address) as channel:
            loops = [runtime.nodes.run, *app.loops]
            running = [tasks.create_task(loop()) for loop in loops]
            if not runtime.node_entry.defined:
                await runtime.node_entry.write(replica_set=app.replica_set)
            running.append(tasks.create_task(runtime.node_entry.keep()))
            yield channel
            for task in running:
                task.cancel()
    finally:
        await server.stop(None)


def _raise(outcome: Any) -> None:
    if outcome.HasField("error"):
        raise error_from_pb(outcome.error)
