"""In-process stand-ins for the lock manager, offsets and brokers, as the nameserver calls them.

Each returns the answers that a test has set, and counts its calls; it can refuse a call or never
answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc.aio

from baton.common.v1 import queue_pb2
from baton.gateway.v1 import gateway_service_pb2 as gateway_pb
from baton.gateway.v1 import gateway_service_pb2_grpc as gateway_grpc
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.lockmgr.v1 import lockmgr_service_pb2_grpc as lockmgr_grpc
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import query_service_pb2_grpc as query_grpc
from baton.storage.v1 import storage_service_pb2 as storage_pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_to_pb
from batonmq._connection.channels import connect
from batonmq._core.queues import QueueRef
from batonmq._core.records import (
    BatchBuilder,
    Message,
    encode_record,
    read_header,
    stamped_head,
    tag_hashes,
)
from batonmq._core.subscription import TagFilter
from batonmq.errors import BatonError, QueueNotFound
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.groups import Group, Member, Subscription, Terms, assign_topics
from batonmq_server.nameserver.core.topics import QueueSpread, Topic
from batonmq_server.nameserver.inspector import QueueInspector
from batonmq_server.nameserver.queue_queries import NodeChannels, QueueQueries
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.support.grpc_server import serving_at

Context = grpc.aio.ServicerContext[Any, Any]
TIMEOUT_S = 3.0
"""Deadline of each query: long enough for a slow machine."""
BATCH_COUNT = 10
"""Messages in a stored batch."""


class TwinBehavior:
    """Behavior of a service: it raises `refusal` if set, and never answers if `mute` is set."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.refusal: BatonError | None = None
        self.mute = False

    async def called(self, call: str) -> None:
        self.calls[call] += 1
        if self.mute:
            await asyncio.Event().wait()
        if self.refusal is not None:
            raise self.refusal


class LockmgrTwin(TwinBehavior, lockmgr_grpc.LockmgrServiceServicer):
    """Lists `entries`; `described` has the details of some."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[lockmgr_pb.LockEntry] = []
        self.described: dict[str, lockmgr_pb.DescribeResponse] = {}

    async def List(
        self, request: lockmgr_pb.ListRequest, context: Context
    ) -> lockmgr_pb.ListResponse:
        await self.called("List")
        return lockmgr_pb.ListResponse(
            entries=[e for e in self.entries if request.group in ("", e.queue.group)]
        )

    async def Describe(
        self, request: lockmgr_pb.DescribeRequest, context: Context
    ) -> lockmgr_pb.DescribeResponse:
        await self.called("Describe")
        entry = next((e for e in self.entries if e.queue == request.queue), None)
        description = self.described.get(str(request.queue.queue.queue_id))
        return description or lockmgr_pb.DescribeResponse(
            entry=entry or lockmgr_pb.LockEntry(queue=request.queue)
        )


class OffsetsTwin(TwinBehavior, offsets_grpc.OffsetsServiceServicer):
    """`queues` is the progress of all groups."""

    def __init__(self) -> None:
        super().__init__()
        self.queues: list[offsets_pb.Progress] = []
        self.on_query: Callable[[], None] = lambda: None

    async def QueryGroup(
        self, request: offsets_pb.QueryGroupRequest, context: Context
    ) -> offsets_pb.QueryGroupResponse:
        await self.called("QueryGroup")
        self.on_query()
        return offsets_pb.QueryGroupResponse(
            queues=[p for p in self.queues if p.queue.group == request.group]
        )


class GatewayTwin(TwinBehavior, gateway_grpc.GatewayServiceServicer):
    """A member of every group as `gateway-0-1`; `held` are the messages that it has started."""

    def __init__(self) -> None:
        super().__init__()
        self.member = "gateway-0-1"
        self.held: list[gateway_pb.HeldMessage] = []

    async def ListHeldMessages(
        self, request: gateway_pb.ListHeldMessagesRequest, context: Context
    ) -> gateway_pb.ListHeldMessagesResponse:
        await self.called("ListHeldMessages")
        held = [one for one in self.held if one.queue == request.queue]
        return gateway_pb.ListHeldMessagesResponse(
            messages=held[: request.page_size], member_client_id=self.member, waiting_call_count=2
        )


class BrokerTwin(
    TwinBehavior, storage_grpc.StorageServiceServicer, query_grpc.QueryServiceServicer
):
    """`logs` are the queues, each a list of stored batches of ten messages from offset 0 on."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[tuple[str, int], list[bytes]] = {}
        self.damage: BatonError | None = None

    def store(self, topic: str, queue_id: int, tag: str, store_unix_ms: int) -> None:
        """Append a batch of ten messages with a tag."""
        log = self.logs.setdefault((topic, queue_id), [])
        message, builder = Message(b"", tag), BatchBuilder()
        for _ in range(BATCH_COUNT):
            builder.add(message, encode_record(message))
        batch = builder.encode(topic=topic, queue_id=queue_id)
        offset = BATCH_COUNT * len(log)
        head = stamped_head(
            batch,
            position=0x1000 + offset,
            first_offset=offset,
            store_unix_ms=store_unix_ms,
            topic_id=1,
            epoch=1,
        )
        log.append(head + batch[len(head) :])

    async def QueryOffsets(
        self, request: storage_pb.QueryOffsetsRequest, context: Context
    ) -> storage_pb.QueryOffsetsResponse:
        await self.called("QueryOffsets")
        return storage_pb.QueryOffsetsResponse(
            outcomes=[self._ends(q.topic, q.queue_id) for q in request.queues]
        )

    async def Read(self, request: query_pb.ReadRequest, context: Context) -> query_pb.ReadResponse:
        await self.called("Read")
        if self.damage is not None:
            raise self.damage
        log = self.logs[request.queue.topic, request.queue.queue_id]
        hashes = TagFilter.parse(request.expression).hashes
        end, batches = BATCH_COUNT * len(log), []
        for batch in log[request.offset // BATCH_COUNT :]:
            header = read_header(batch)
            if hashes is None or set(tag_hashes(batch, header)) & hashes:
                batches, end = [batch], header.next_offset
                break
        return query_pb.ReadResponse(
            batches=batches, next_offset=end, queue_next_offset=BATCH_COUNT * len(log)
        )

    def _ends(self, topic: str, queue_id: int) -> storage_pb.QueryOffsetsOutcome:
        log = self.logs.get((topic, queue_id))
        if log is None:
            error = QueueNotFound(f"queue {queue_id} of {topic} is not here")
            return storage_pb.QueryOffsetsOutcome(error=error_to_pb(error))
        ends = storage_pb.QueueOffsets(first_offset=0, next_offset=BATCH_COUNT * len(log))
        return storage_pb.QueryOffsetsOutcome(offsets=ends)


@dataclass
class Scene:
    """An inspector and the services that it calls. `brokers` are "a" and "b"."""

    inspector: QueueInspector
    catalog: Catalog
    nodes: EtcdMirror
    clock: Clock
    lockmgr: LockmgrTwin
    offsets: OffsetsTwin
    brokers: dict[str, BrokerTwin]
    gateway: GatewayTwin
    refused: list[pb.RefusedClient]

    def topic(self, name: str, queue_count: int, *, batches: int = 0, age_ms: int = 60_000) -> None:
        """Add a topic with that many queues on each broker, and batches without tag in each."""
        spread = tuple(QueueSpread(broker, queue_count) for broker in sorted(self.brokers))
        self.catalog.topics[name] = Topic(name=name, topic_id=1, spread=spread, create_unix_ms=0)
        for twin in self.brokers.values():
            for queue_id in range(queue_count):
                twin.logs[name, queue_id] = []
                for _ in range(batches):
                    twin.store(name, queue_id, "", self.clock.unix_ms() - age_ms)

    def group(self, name: str, *members: str, expression: str = "*", **terms: Any) -> Group:
        """Add a group whose members subscribe to all topics; every queue is assigned."""
        subscriptions = tuple(Subscription(t, expression) for t in sorted(self.catalog.topics))
        group = Group(
            name=name,
            generation=1,
            members=tuple(Member(m, 1, "", 0) for m in sorted(members)),
            terms=Terms(subscriptions=subscriptions, **terms),
        )
        return self.with_assignment(group)

    def with_assignment(self, group: Group) -> Group:
        """Return the group with its queues assigned."""
        topics = [self.catalog.topics[s.topic] for s in group.terms.subscriptions]
        assigned = replace(group, assignments=assign_topics(group, topics, group))
        self.catalog.groups[group.name] = assigned
        return assigned

    def own(self, group: Group, owner: str, **entry: Any) -> None:
        """Make `owner` the owner of all queues of the group, with token 1."""
        for queue in self.inspector.queues_of(group):
            self.lockmgr.entries.append(
                lockmgr_pb.LockEntry(
                    queue=queue_to_pb(group.name, queue),
                    state=entry.get("state", lockmgr_pb.LOCK_STATE_HELD),
                    owner=queue_pb2.Incarnation(client_id=owner, incarnation_id=1),
                    token=1,
                    **{k: v for k, v in entry.items() if k != "state"},
                )
            )

    def progress(self, group: Group, committed_offset: int, **fields: Any) -> None:
        """Set the committed offset of the group on each queue, with token 1.

        All of `unacked_count` are in flight for sure unless `unacked_count_min` says otherwise.
        """
        fields.setdefault("unacked_count_min", fields.get("unacked_count", 0))
        self.offsets.queues = [p for p in self.offsets.queues if p.queue.group != group.name]
        self.offsets.queues += [
            offsets_pb.Progress(
                queue=queue_to_pb(group.name, queue),
                token=1,
                committed_offset=committed_offset,
                **fields,
            )
            for queue in self.inspector.queues_of(group)
        ]

    def calls(self) -> Counter[str]:
        """Number of calls to all services, by name."""
        twins: Sequence[TwinBehavior] = [
            *(self.lockmgr, self.offsets, self.gateway),
            *self.brokers.values(),
        ]
        return sum((twin.calls for twin in twins), Counter[str]())


@asynccontextmanager
async def open_scene() -> AsyncIterator[Scene]:
    """Yield an inspector and its services in this process, over real gRPC; without etcd."""
    clock = Clock()
    etcd = EtcdSession("127.0.0.1:1", "inspector", clock)
    nodes = EtcdMirror(etcd, "nodes/")
    catalog = Catalog(etcd, nodes, watchers_max=1)
    async with AsyncExitStack() as stack:
        lockmgr, offsets = LockmgrTwin(), OffsetsTwin()  # type: ignore[abstract]
        twins = {"a": BrokerTwin(), "b": BrokerTwin()}  # type: ignore[abstract]
        address = await stack.enter_async_context(
            serving_at(
                partial(lockmgr_grpc.add_LockmgrServiceServicer_to_server, lockmgr),
                partial(offsets_grpc.add_OffsetsServiceServicer_to_server, offsets),
            )
        )
        channel = await stack.enter_async_context(connect(address))
        addresses = {
            name: await stack.enter_async_context(
                serving_at(
                    partial(storage_grpc.add_StorageServiceServicer_to_server, twin),
                    partial(query_grpc.add_QueryServiceServicer_to_server, twin),
                )
            )
            for name, twin in twins.items()
        }
        gateway = GatewayTwin()  # type: ignore[abstract]
        gateways = {
            "gateway-0": await stack.enter_async_context(
                serving_at(partial(gateway_grpc.add_GatewayServiceServicer_to_server, gateway))
            )
        }
        channels = NodeChannels(lambda: addresses, lambda: gateways, connect)
        stack.push_async_callback(channels.close)
        refused: list[pb.RefusedClient] = []
        queries = QueueQueries(
            lambda: lockmgr_grpc.LockmgrServiceStub(channel),
            lambda _: offsets_grpc.OffsetsServiceStub(channel),
            channels,
            timeout_s=TIMEOUT_S,
        )
        inspector = QueueInspector(catalog, lambda _: refused, queries, clock)
        yield Scene(inspector, catalog, nodes, clock, lockmgr, offsets, twins, gateway, refused)


def queue_to_pb(group: str, queue: QueueRef) -> queue_pb2.GroupQueue:
    return queue_pb2.GroupQueue(
        group=group,
        queue=queue_pb2.QueueRef(topic=queue.topic, broker=queue.broker, queue_id=queue.queue_id),
    )
