"""Records deliveries at offsets before storage answers a pull (protocol, sections 6.3 to 6.5).

One call is in flight at a time; deliveries that arrive meanwhile, of all groups, go into the next
call. A wrong claim of one consumer must not cost the other deliveries of the call their results.
Messages leave only with a result that is fresh and from the newest known epoch of offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import grpc.aio

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._common.batcher import Batcher
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq.errors import BatonError, DeliveryUnrecorded
from batonmq_server.storage.long_polls import QueueOwner

ITEMS_MAX = 256
CALL_BYTES_MAX = 8 * 1024 * 1024
"""Maximum size of a call; a single larger item is sent alone."""
TOUCHES_MAX = 1_024


class AdvanceWish(NamedTuple):
    """The advance that a delivery asks for (protocol 6.8).

    Attributes:
        advance_id: Id of the advance; 0 for none.
        advance_to: Offset up to which to record in advance; 0 for no more than there is.
    """

    advance_id: int = 0
    advance_to: int = 0


NO_ADVANCE = AdvanceWish()


@dataclass(frozen=True, slots=True)
class Settlement:
    """What was delivered in an advance that has ended: nothing at or above `sent_offset`."""

    owner: QueueOwner
    advance_id: int
    sent_offset: int


@dataclass(frozen=True, slots=True)
class PendingDelivery:
    """A range of offsets that storage is about to deliver.

    Attributes:
        offsets_epoch: Highest epoch of `offsets_set` that the consumer has seen.
        subscription_generation: Generation of the subscription of the filter.
        progress: Acknowledgements that the pull carries.
        offsets_set: Offsets set that keeps the group, as the consumer knows it; empty if unknown.
        received_offset: Position of the consumer, stated under `offsets_epoch`; None for none.
        advance: The advance to ask for.
    """

    owner: QueueOwner
    first_offset: int
    next_offset: int
    offsets_epoch: int
    subscription_generation: int = 0
    progress: pb.Acks | None = None
    offsets_set: str = ""
    received_offset: int | None = None
    advance: AdvanceWish = NO_ADVANCE


@dataclass(frozen=True, slots=True)
class RecordedDelivery:
    """A delivery that offsets has recorded.

    Attributes:
        redelivered: Offsets that an earlier owner may have started.
        offsets_epoch: Epoch of `offsets_set` that recorded it.
        sent_ms: Monotonic time at which the request was sent.
        offsets_set: Name of the offsets set.
        advance_to: End of the advance; 0 for none.
    """

    redelivered: Sequence[queue_pb2.OffsetRange]
    offsets_epoch: int
    sent_ms: int
    offsets_set: str = ""
    advance_to: int = 0

    def between(self, first_offset: int, next_offset: int) -> RecordedDelivery:
        """Return the record with the redelivered offsets of a range only."""
        if not self.redelivered:
            return self
        ranges = (
            queue_pb2.OffsetRange(
                first_offset=max(each.first_offset, first_offset),
                next_offset=min(each.next_offset, next_offset),
            )
            for each in self.redelivered
        )
        return replace(self, redelivered=[r for r in ranges if r.first_offset < r.next_offset])


class DeliveryRecorder:
    """Records the deliveries of one replica set of offsets, at its leader.

    Args:
        stub: Returns a stub for the current leader; raises `Unreachable` if there is none.
        age_ms_max: Maximum age of a result from request to use; also the timeout of each call.
        offsets_set: Name of the replica set.
        node_id: Node id of this storage node.
    """

    def __init__(
        self,
        stub: Callable[[], pb_grpc.OffsetsServiceAsyncStub],
        clock: Clock,
        *,
        age_ms_max: int = 2_000,
        offsets_set: str = "",
        node_id: str = "",
    ) -> None:
        self._stub, self._clock, self._age_ms_max = stub, clock, age_ms_max
        self._set, self._node_id = offsets_set, node_id
        self._epoch = 0
        self._batcher: Batcher[
            PendingDelivery | Settlement, RecordedDelivery | BatonError | None
        ] = Batcher(self._send, items_max=ITEMS_MAX)

    @property
    def epoch(self) -> int:
        """Highest epoch of the set that this node has seen; 0 for none."""
        return self._epoch

    async def run(self) -> None:
        """Send calls until cancelled; run it as one task."""
        await self._batcher.run()

    async def record(self, delivery: PendingDelivery) -> RecordedDelivery:
        """Record a delivery. The caller must use the result at once, without another await.

        Raises:
            Fenced, DeliveryGap, AckCap, UnknownQueue: offsets rejected the delivery.
            DeliveryUnrecorded: offsets did not answer, or the answer is too old or from an old
                epoch.
        """
        result = await self._batcher.call(delivery)
        if isinstance(result, BatonError):
            raise result
        assert result is not None
        age_ms = self._clock.monotonic_ms() - result.sent_ms
        if age_ms > self._age_ms_max:
            raise DeliveryUnrecorded(
                f"the answer of offsets is {age_ms} ms old; the limit is {self._age_ms_max} ms"
            )
        return result

    async def settle(self, settlement: Settlement) -> None:
        """Tell offsets what was delivered in an advance, after the records that asked for it.

        Raises:
            BatonError: offsets did not answer.
        """
        if isinstance(error := await self._batcher.call(settlement), BatonError):
            raise error

    async def touch(self, owners: Sequence[QueueOwner]) -> list[BatonError | None]:
        """Tell offsets that `owners` are alive; return None or the error of each.

        Raises:
            BatonError: offsets does not answer, or answers under an old epoch.
        """
        results: list[BatonError | None] = []
        for begin in range(0, len(owners), TOUCHES_MAX):
            chunk = owners[begin : begin + TOUCHES_MAX]
            request = pb.TouchRequest(
                offsets_epoch=self._epoch,
                items=[
                    pb.TouchItem(queue=one.queue(), token=one.token, caller=one.caller)
                    for one in chunk
                ],
                node_id=self._node_id,
            )
            try:
                answer = await self._stub().Touch(request, timeout=self._age_ms_max / 1000)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            self._check_answer(answer.offsets_epoch, len(answer.outcomes), len(chunk))
            results += [
                error_from_pb(outcome.error) if outcome.HasField("error") else None
                for outcome in answer.outcomes
            ]
        return results

    async def _send(
        self, batch: Sequence[PendingDelivery | Settlement]
    ) -> list[RecordedDelivery | BatonError | None]:
        """Send a batch and return its results in order; None for a settlement.

        Settlements go with the last call: offsets applies them after the items. The epoch that a
        consumer claims to have seen is compared with its own result only: a wrong claim must not
        fail the other deliveries.
        """
        deliveries = [one for one in batch if isinstance(one, PendingDelivery)]
        settlements = [_settlement(one) for one in batch if isinstance(one, Settlement)]
        results: list[RecordedDelivery | BatonError] = []
        *first, last = _calls([_item(one) for one in deliveries]) or [[]]
        for items in first:
            results += _outcomes(await self._record(items), len(items))
        answer = await self._record(last, settlements)
        results += _outcomes(answer, len(last))
        settled = answer if isinstance(answer, BatonError) else None
        checked = iter(map(_checked, deliveries, results))
        return [settled if isinstance(one, Settlement) else next(checked) for one in batch]

    async def _record(
        self,
        items: Sequence[pb.DeliveryItem],
        settlements: Sequence[pb.AdvanceSettlement] = (),
    ) -> Sequence[RecordedDelivery | BatonError] | BatonError:
        """Make one call; return the results of its items, or the error of the call."""
        request = pb.RecordDeliveredRequest(
            offsets_epoch=self._epoch, items=items, settlements=settlements
        )
        sent_ms = self._clock.monotonic_ms()
        try:
            answer = await self._stub().RecordDelivered(request, timeout=self._age_ms_max / 1000)
            self._check_answer(answer.offsets_epoch, len(answer.outcomes), len(items))
        except grpc.aio.AioRpcError as error:
            return unrecorded(from_rpc_error(error))
        except BatonError as error:
            return unrecorded(error)
        return [
            error_from_pb(outcome.error)
            if outcome.HasField("error")
            else RecordedDelivery(
                outcome.delivered.maybe_seen,
                answer.offsets_epoch,
                sent_ms,
                self._set,
                outcome.delivered.advance_to,
            )
            for outcome in answer.outcomes
        ]

    def _check_answer(self, epoch: int, count: int, count_asked: int) -> None:
        if epoch < self._epoch:
            raise _old_epoch(epoch)
        if count != count_asked:
            raise DeliveryUnrecorded(f"offsets answered {count} of {count_asked} items")
        self._epoch = epoch


def _item(delivery: PendingDelivery) -> pb.DeliveryItem:
    return pb.DeliveryItem(
        queue=delivery.owner.queue(),
        token=delivery.owner.token,
        first_offset=delivery.first_offset,
        next_offset=delivery.next_offset,
        subscription_generation=delivery.subscription_generation,
        progress=delivery.progress,
        caller=delivery.owner.caller,
        received_offset=delivery.received_offset,
        received_epoch=delivery.offsets_epoch,
        advance_id=delivery.advance.advance_id,
        advance_to=delivery.advance.advance_to,
    )


def _settlement(settlement: Settlement) -> pb.AdvanceSettlement:
    return pb.AdvanceSettlement(
        queue=settlement.owner.queue(),
        token=settlement.owner.token,
        advance_id=settlement.advance_id,
        sent_offset=settlement.sent_offset,
    )


def _outcomes(
    answer: Sequence[RecordedDelivery | BatonError] | BatonError, count: int
) -> Sequence[RecordedDelivery | BatonError]:
    return [answer] * count if isinstance(answer, BatonError) else answer


def _checked(
    delivery: PendingDelivery, result: RecordedDelivery | BatonError
) -> RecordedDelivery | BatonError:
    if isinstance(result, RecordedDelivery) and result.offsets_epoch < delivery.offsets_epoch:
        return unrecorded(_old_epoch(result.offsets_epoch))
    return result


def _calls(items: Sequence[pb.DeliveryItem]) -> list[list[pb.DeliveryItem]]:
    """Split `items` into calls of at most CALL_BYTES_MAX bytes, in order."""
    calls: list[list[pb.DeliveryItem]] = []
    room = 0
    for item in items:
        size = item.ByteSize()
        if size > room:
            calls.append([])
            room = CALL_BYTES_MAX
        calls[-1].append(item)
        room -= size
    return calls


def _old_epoch(epoch: int) -> DeliveryUnrecorded:
    return DeliveryUnrecorded(f"offsets answered under the old epoch {epoch}")


def unrecorded(error: BatonError) -> DeliveryUnrecorded:
    """Return `error` as the error of a pull without a recorded delivery."""
    return DeliveryUnrecorded(
        f"offsets has not recorded the delivery: {error.message}",
        retry_after_ms=max(100, error.retry_after_ms),
    )
