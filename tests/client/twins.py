"""A simulated cluster for clients: a nameserver and storage nodes with lists for queues.

They run in this process behind real gRPC servers and the services' own edge, and fail when a test
says so. Storage checks sequences with the real producer table, and batches with the real checks.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import grpc.aio

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1 import nameserver_service_pb2_grpc as nameserver_grpc
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq._common.rpc import error_to_pb
from batonmq._core.records import Header, check_batch, decode_records
from batonmq.errors import BatonError, LimitExceeded, TopicNotFound
from batonmq_server.storage.core.producers import ProducerTable, StoreReceipt
from tests.support.grpc_server import serving_at

BROKER, OTHER_BROKER = "broker-a", "broker-b"
NOWHERE = "127.0.0.1:1"
"""An address without a server."""
Context = grpc.aio.ServicerContext[Any, Any]
Hook = Callable[[Sequence[bytes]], Awaitable[None]]


async def _nothing(_: Sequence[bytes]) -> None:
    return


def bodies(batch: bytes) -> list[bytes]:
    """Return the bodies of the messages of a batch."""
    header = check_batch(batch, stamped=False)
    return [record.body for record in decode_records(batch, header, range(header.count))]


class NameserverTwin(nameserver_grpc.NameserverServiceServicer):
    """Topics on one broker, or on two brokers with the same number of queues on each.

    Attributes:
        other_address: Address of the other broker; empty if there is none.
        epoch: Of the topics; None as from a nameserver of an earlier version.
        route_queries: Topic of each QueryRoute.
    """

    def __init__(self) -> None:
        self.queue_counts: dict[str, int] = {}
        self.epoch: int | None = 0
        self.storage_address = NOWHERE
        self.other_address = ""
        self.route_queries: list[str] = []
        self.generation = 1
        self._changed = asyncio.Event()

    def set_topic(self, topic: str, queue_count: int) -> None:
        """Create or change a topic; 0 deletes it."""
        self.queue_counts[topic] = queue_count
        self.generation += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def route(self, topic: str) -> nameserver_pb.Route:
        queue_count = self.queue_counts.get(topic, 0)
        if not queue_count:
            raise TopicNotFound(f"no topic {topic}")
        spread = [
            nameserver_pb.QueueSpread(broker=broker, queue_count=queue_count)
            for broker in self._addresses()
        ]
        brokers = [
            nameserver_pb.BrokerAddress(broker=broker, address=address)
            for broker, address in self._addresses().items()
        ]
        return nameserver_pb.Route(
            topic=nameserver_pb.Topic(name=topic, topic_id=1, spread=spread, epoch=self.epoch),
            brokers=brokers,
            generation=self.generation,
        )

    def _addresses(self) -> dict[str, str]:
        other = {OTHER_BROKER: self.other_address} if self.other_address else {}
        return {BROKER: self.storage_address} | other

    async def QueryRoute(
        self, request: nameserver_pb.QueryRouteRequest, context: Context
    ) -> nameserver_pb.QueryRouteResponse:
        self.route_queries.append(request.topic)
        return nameserver_pb.QueryRouteResponse(route=self.route(request.topic))

    async def WatchRoute(
        self, request: nameserver_pb.WatchRouteRequest, context: Context
    ) -> AsyncIterator[nameserver_pb.WatchRouteResponse]:
        while True:
            changed = self._changed
            yield nameserver_pb.WatchRouteResponse(route=self.route(request.topic))
            await changed.wait()

    async def DescribeCluster(
        self, request: nameserver_pb.DescribeClusterRequest, context: Context
    ) -> nameserver_pb.DescribeClusterResponse:
        nodes = [
            nameserver_pb.Node(
                service=nameserver_pb.SERVICE_KIND_STORAGE,
                node_id=broker,
                address=address,
                leader=True,
            )
            for broker, address in self._addresses().items()
        ]
        return nameserver_pb.DescribeClusterResponse(nodes=nodes)


class StorageTwin(pb_grpc.StorageServiceServicer):
    """A storage node whose queues are lists.

    Attributes:
        requests: The batches of each Append, in the order of arrival.
        topic_epochs: Of each Append.
        queues: Bodies by topic and queue.
        log: Bodies in the order of storing.
        headers: Headers of the stored batches, in order.
        before: Awaited by each Append before it stores its batches; may raise.
        after: Awaited by each Append between storing and its answer; may raise.
        refusal: Returns the error for a batch, or None if it is stored.
    """

    def __init__(self) -> None:
        self.requests: list[list[bytes]] = []
        self.topic_epochs: list[list[int]] = []
        self.durabilities: list[int] = []
        self.queues: defaultdict[tuple[str, int], list[bytes]] = defaultdict(list)
        self.log: list[bytes] = []
        self.headers: list[Header] = []
        self.before: Hook = _nothing
        self.after: Hook = _nothing
        self.refusal: Callable[[Header], BatonError | None] = lambda _: None
        self._table = ProducerTable()

    @property
    def stored(self) -> list[bytes]:
        """Return the bodies of all queues."""
        return [body for queue in self.queues.values() for body in queue]

    def has(self, count: int) -> bool:
        """Return whether at least `count` messages are stored."""
        return len(self.log) >= count

    async def Append(self, request: pb.AppendRequest, context: Context) -> pb.AppendResponse:
        self.requests.append(list(request.batches))
        self.durabilities.append(request.durability)
        self.topic_epochs.append(list(request.topic_epochs))
        if len(request.batches) > 1_024:
            raise LimitExceeded(f"{len(request.batches)} batches")
        await self.before(request.batches)
        outcomes = [self._append(batch, request.durability) for batch in request.batches]
        await self.after(request.batches)
        return pb.AppendResponse(outcomes=outcomes)

    def _append(self, batch: bytes, durability: pb.Durability.ValueType) -> pb.AppendOutcome:
        try:
            receipt = self._store(batch)
        except BatonError as error:
            return pb.AppendOutcome(error=error_to_pb(error))
        return pb.AppendOutcome(
            receipt=pb.AppendReceipt(
                first_offset=receipt.first_offset,
                position=receipt.position,
                store_unix_ms=receipt.store_unix_ms,
                durability=durability,
                duplicate=receipt.duplicate,
            )
        )

    def _store(self, batch: bytes) -> StoreReceipt:
        header = check_batch(batch, stamped=False)
        refusal = self.refusal(header)
        if refusal is not None:
            raise refusal
        key = (hash(header.topic), header.queue_id)
        earlier = self._table.check(header, key)
        if earlier is not None:
            return earlier
        queue = self.queues[header.topic, header.queue_id]
        receipt = StoreReceipt(len(queue), 4_096 * len(self.headers), 0, 1_700_000_000_000)
        self._table.record(header, key, receipt)
        batch_bodies = bodies(batch)
        queue += batch_bodies
        self.log += batch_bodies
        self.headers.append(header)
        return receipt


class Twins:
    """The simulated services, and the address of the nameserver."""

    def __init__(self) -> None:
        self.nameserver = NameserverTwin()  # type: ignore[abstract]
        self.storage = StorageTwin()  # type: ignore[abstract]
        self.other = StorageTwin()  # type: ignore[abstract]
        self.address = NOWHERE


@asynccontextmanager
async def two_brokers(**queue_counts: int) -> AsyncIterator[Twins]:
    """Run a cluster of two brokers; each has the given number of queues of each topic."""
    async with twins(**queue_counts) as cluster:
        add_other: Any = partial(pb_grpc.add_StorageServiceServicer_to_server, cluster.other)
        async with serving_at(add_other) as cluster.nameserver.other_address:
            yield cluster


@asynccontextmanager
async def twins(**queue_counts: int) -> AsyncIterator[Twins]:
    """Run a cluster of one broker with these topics until the block ends."""
    cluster = Twins()
    for topic, queue_count in queue_counts.items():
        cluster.nameserver.set_topic(topic, queue_count)
    add_storage: Any = partial(pb_grpc.add_StorageServiceServicer_to_server, cluster.storage)
    add_nameserver: Any = partial(
        nameserver_grpc.add_NameserverServiceServicer_to_server, cluster.nameserver
    )
    async with AsyncExitStack() as servers:
        cluster.nameserver.storage_address = await servers.enter_async_context(
            serving_at(add_storage)
        )
        cluster.address = await servers.enter_async_context(serving_at(add_nameserver))
        yield cluster


def failing(error: BatonError, times: int = 1) -> Hook:
    """Return a hook that raises `error` the first `times` times."""
    left = [error] * times

    async def fail(_: Sequence[bytes]) -> None:
        if left:
            raise left.pop()

    return fail


class Gate:
    """Holds every request until it is opened."""

    def __init__(self) -> None:
        self.arrived = 0
        self._open = asyncio.Event()

    async def __call__(self, _: Sequence[bytes]) -> None:
        self.arrived += 1
        await self._open.wait()

    def open(self) -> None:
        self._open.set()
