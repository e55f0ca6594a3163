"""The offsets service and its calls, for tests over a channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from baton.common.v1 import error_pb2, queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._common.rpc import from_rpc_error
from batonmq._telemetry.event_hub import EventHub
from batonmq.errors import BatonError, Unreachable
from batonmq_server.offsets.codec import META
from batonmq_server.offsets.core.change_log import POSITION
from batonmq_server.offsets.disk import StoredEntry
from batonmq_server.offsets.epoch import OffsetsEpoch
from batonmq_server.offsets.group_importer import PlacementDirectory
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue
from batonmq_server.runtime.group_placements import (
    OFFSETS_SERVICE,
    PLACEMENTS_PREFIX,
    GroupPlacement,
)

TERM = 7
TIMEOUT_S = 20


def queue(group: str = "readers", queue_id: int = 3) -> queue_pb2.GroupQueue:
    inner = queue_pb2.QueueRef(topic="news", broker="broker-a", queue_id=queue_id)
    return queue_pb2.GroupQueue(group=group, queue=inner)


def run(first_offset: int, next_offset: int) -> queue_pb2.OffsetRange:
    return queue_pb2.OffsetRange(first_offset=first_offset, next_offset=next_offset)


def fence_item(**fields: object) -> pb.FenceItem:
    """Return a fence of a queue without progress, with `fields` replaced."""
    item = pb.FenceItem(
        queue=queue(),
        attempt="attempt-1",
        condition=pb.FENCE_CONDITION_CLOSED_OR_DRAINED,
        holder=queue_pb2.Incarnation(client_id="client-a", incarnation_id=1),
    )
    for name, value in fields.items():
        item.ClearField(name)  # type: ignore[arg-type]
        item.MergeFrom(pb.FenceItem(**{name: value}))  # type: ignore[arg-type]
    return item


@dataclass
class Service:
    """A stub of the service, and the service itself."""

    stub: pb_grpc.OffsetsServiceAsyncStub
    offsets: OffsetsEpoch
    hub: EventHub
    registry: CollectorRegistry

    def stored(self) -> list[StoredEntry]:
        """Return all entries but the position, which every change sets."""
        return [entry for entry in self.offsets.disk.read() if entry[0] != META + POSITION]

    def add_gate(self, group: str, **fields: Any) -> None:
        """Add the gate of `group` to the mirror, as if etcd had sent it."""
        gates = self.offsets.gates
        gates.revision += 1
        value = StoredGate(**fields).SerializeToString()
        gates.values[group] = KeyValue(group, value, gates.revision, gates.revision)

    async def start_owner(self, queue_id: int = 3, delivered: int = 10) -> None:
        """Give token 1 to client-a, and deliver [0, delivered) to it."""
        await self.stub.Announce(pb.AnnounceRequest(term=TERM), timeout=TIMEOUT_S)
        item = fence_item(queue=queue(queue_id=queue_id))
        answer = await self.stub.Fence(pb.FenceRequest(term=TERM, items=[item]), timeout=TIMEOUT_S)
        assert answer.outcomes[0].fenced.token == 1
        if delivered:
            delivery = pb.DeliveryItem(
                queue=queue(queue_id=queue_id), token=1, next_offset=delivered
            )
            recorded = await self.stub.RecordDelivered(
                pb.RecordDeliveredRequest(items=[delivery]), timeout=TIMEOUT_S
            )
            assert recorded.outcomes[0].HasField("delivered")


async def store_topic(
    etcd: EtcdSession,
    queue_count: int = 8,
    topic: str = "news",
    brokers: Sequence[str] = ("broker-a",),
) -> None:
    """Write a topic to etcd, as the nameserver does."""
    spread = [
        nameserver_pb.QueueSpread(broker=broker, queue_count=queue_count) for broker in brokers
    ]
    value = StoredTopic(topic_id=1, spread=spread).SerializeToString()
    await etcd.put(f"topics/{topic}", value)


def single_set_directory(etcd: EtcdSession, *groups: str) -> PlacementDirectory:
    """Return the directory of a cluster with one offsets set, where `groups` are placed."""
    placements = EtcdMirror(etcd, PLACEMENTS_PREFIX)
    for group in groups:
        placements.values[group] = KeyValue(group, GroupPlacement(OFFSETS_SERVICE).encode(), 1, 1)

    def stub(replica_set: str) -> pb_grpc.OffsetsServiceAsyncStub:
        raise AssertionError(f"there is no set {replica_set}")

    return PlacementDirectory(OFFSETS_SERVICE, etcd, placements, stub)


def no_storage(broker: str) -> storage_grpc.StorageServiceAsyncStub:
    """Return no stub: there is no storage."""
    raise Unreachable(f"broker {broker} is not registered")


async def call(service: Service, name: str, request: Any) -> Any:
    return await getattr(service.stub, name)(request, timeout=TIMEOUT_S)


async def rejection(
    service: Service, name: str, request: Any
) -> tuple[grpc.StatusCode, BatonError]:
    """Return status and error of a call; assert that it wrote nothing and created no queue."""
    before, count = service.stored(), len(service.offsets.table)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(service, name, request)
    await service.offsets.commits.wait_all_durable()
    assert (service.stored(), len(service.offsets.table)) == (before, count)
    return raised.value.code(), from_rpc_error(raised.value)


def reasons(outcomes: Sequence[Any]) -> list[str]:
    return [error_pb2.Reason.Name(outcome.error.reason) for outcome in outcomes]


VALID_ITEMS: dict[str, Callable[..., Any]] = {
    "Fence": lambda **fields: fence_item(**{"queue": queue(queue_id=9), **fields}),
    "RecordDelivered": lambda **fields: pb.DeliveryItem(
        **{"queue": queue(queue_id=9), "token": 1, "next_offset": 1, **fields}
    ),
    "Touch": lambda **fields: pb.TouchItem(**{"queue": queue(queue_id=9), "token": 1, **fields}),
    "Commit": lambda **fields: pb.CommitItem(**{"queue": queue(queue_id=9), "token": 1, **fields}),
    "Close": lambda **fields: pb.CloseItem(**{"queue": queue(queue_id=9), "token": 1, **fields}),
}
"""A valid item of each batched call, on a queue without holder, with fields replaced."""


def delete_topic_request(**fields: Any) -> pb.DeleteTopicRequest:
    return pb.DeleteTopicRequest(**{"topic": "news", "topic_id": 7, **fields})
