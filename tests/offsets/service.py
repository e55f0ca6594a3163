"""Calls of the offsets service, and the service itself, for tests over a channel."""

from __future__ import annotations

from dataclasses import dataclass

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from prometheus_client import CollectorRegistry

from services.offsets.app import Offsets
from services.offsets.disk import Entry
from services.runtime.events import EventHub

TERM = 7
TIMEOUT_S = 20


def queue(group: str = "readers", queue_id: int = 3) -> queue_pb2.GroupQueue:
    inner = queue_pb2.Queue(topic="news", broker="broker-a", queue_id=queue_id)
    return queue_pb2.GroupQueue(group=group, queue=inner)


def run(first_offset: int, next_offset: int) -> queue_pb2.OffsetRange:
    return queue_pb2.OffsetRange(first_offset=first_offset, next_offset=next_offset)


def wish(**fields: object) -> pb.FenceItem:
    """A fence that passes on a queue without progress, with other `fields`."""
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
    offsets: Offsets
    hub: EventHub
    registry: CollectorRegistry

    def stored(self) -> list[Entry]:
        return list(self.offsets.disk.read())

    async def held(self, queue_id: int = 3, delivered: int = 10) -> None:
        """client-a gets token 1 and has [0, delivered) in flight."""
        await self.stub.Announce(pb.AnnounceRequest(term=TERM), timeout=TIMEOUT_S)
        item = wish(queue=queue(queue_id=queue_id))
        answer = await self.stub.Fence(pb.FenceRequest(term=TERM, items=[item]), timeout=TIMEOUT_S)
        assert answer.outcomes[0].fenced.token == 1
        if delivered:
            delivery = pb.DeliveryItem(
                queue=queue(queue_id=queue_id), token=1, next_offset=delivered
            )
            done = await self.stub.RecordDelivered(
                pb.RecordDeliveredRequest(items=[delivery]), timeout=TIMEOUT_S
            )
            assert done.outcomes[0].HasField("delivered")
