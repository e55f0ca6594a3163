"""A scripted offsets service with the calls that storage makes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._common.rpc import error_to_pb
from batonmq.errors import BatonError, FenceCause, Fenced, FencedDetail, OldEpoch, OldEpochDetail

Context = grpc.aio.ServicerContext[Any, Any]
Range = tuple[int, int]


class OffsetsTwin(pb_grpc.OffsetsServiceServicer):
    """Accepts deliveries under the current token of a (group, queue id), and records them.

    Attributes:
        tokens: Current token by group and queue id; 1 if none is set.
        rejection: Error with which every delivery is rejected, if set.
        epoch: Epoch of the answers; a request that has seen a newer one is rejected.
        claimed_epoch: If set, the epoch that the answers contain instead.
        answering: While cleared, calls get no answer.
        maybe_seen: Ranges returned as possibly seen with every delivery.
        recorded: Accepted deliveries: group, queue id, first and next offset.
        items: Accepted deliveries as protobuf messages.
        advances: Whether an advance is accepted, as far as it is asked for.
        settlements: Advance id and sent offset of the settlements.
        on_settlement: Called with each settlement.
    """

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], int] = {}
        self.rejection: BatonError | None = None
        self.epoch, self.claimed_epoch = 1, 0
        self.answering = asyncio.Event()
        self.answering.set()
        self.maybe_seen: Sequence[Range] = ()
        self.recorded: list[tuple[str, int, int, int]] = []
        self.items: list[pb.DeliveryItem] = []
        self.touched: list[tuple[str, int, int]] = []
        self.calls: list[int] = []
        self.advances = False
        self.settlements: list[tuple[int, int]] = []
        self.on_settlement: Callable[[pb.AdvanceSettlement], None] = lambda _: None

    async def RecordDelivered(
        self, request: pb.RecordDeliveredRequest, context: Context
    ) -> pb.RecordDeliveredResponse:
        self.calls.append(len(request.items))
        await self.answering.wait()
        self._check_epoch(request.offsets_epoch)
        outcomes = [self._record(item) for item in request.items]
        for settlement in request.settlements:
            self.settlements.append((settlement.advance_id, settlement.sent_offset))
            self.on_settlement(settlement)
        return pb.RecordDeliveredResponse(
            offsets_epoch=self.claimed_epoch or self.epoch, outcomes=outcomes
        )

    async def Touch(self, request: pb.TouchRequest, context: Context) -> pb.TouchResponse:
        await self.answering.wait()
        self._check_epoch(request.offsets_epoch)
        outcomes = []
        for item in request.items:
            self.touched.append((item.queue.group, item.queue.queue.queue_id, item.token))
            rejection = self._rejection(item.queue, item.token)
            outcomes.append(pb.TouchOutcome(error=error_to_pb(rejection) if rejection else None))
        return pb.TouchResponse(offsets_epoch=self.claimed_epoch or self.epoch, outcomes=outcomes)

    def _record(self, item: pb.DeliveryItem) -> pb.DeliveryOutcome:
        rejection = self.rejection or self._rejection(item.queue, item.token)
        if rejection is not None:
            return pb.DeliveryOutcome(error=error_to_pb(rejection))
        queue_id = item.queue.queue.queue_id
        self.recorded.append((item.queue.group, queue_id, item.first_offset, item.next_offset))
        self.items.append(item)
        return pb.DeliveryOutcome(
            delivered=pb.Delivered(
                maybe_seen=[
                    queue_pb2.OffsetRange(first_offset=first, next_offset=next_)
                    for first, next_ in self.maybe_seen
                ],
                advance_to=item.advance_to if self.advances else 0,
            )
        )

    def _rejection(self, queue: queue_pb2.GroupQueue, token: int) -> BatonError | None:
        current = self.tokens.get((queue.group, queue.queue.queue_id), 1)
        if token == current:
            return None
        return Fenced(
            f"token {token} is not {current}",
            detail=FencedDetail(token=token, current=current, why=FenceCause.TAKEN),
        )

    def _check_epoch(self, epoch: int) -> None:
        if epoch > self.epoch:
            detail = OldEpochDetail(epoch=self.epoch, current=epoch)
            raise OldEpoch(f"epoch {self.epoch} is over", detail=detail)
