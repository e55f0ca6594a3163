"""Record before reply: what storage asks of offsets (protocol, sections 6.3 to 6.5).

One call is in flight; what arrives meanwhile rides in the next one, of all groups together: what
one puller claims must not cost the others their verdicts. Only a verdict that is fresh and comes
from the newest known epoch of offsets lets bytes leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
"""A call holds no more than this, but one item in any case."""
TOUCHES_MAX = 1_024


@dataclass(frozen=True, slots=True)
class PendingDelivery:
    """A range that is about to be delivered.

    Attributes:
        offsets_epoch: Highest epoch of `offsets_set` the puller has seen.
        subscription_generation: Of the filter that was used.
        progress: Acks that ride along.
        offsets_set: That keeps the group, as far as the puller knows; empty for the one that does.
    """

    owner: QueueOwner
    first_offset: int
    next_offset: int
    offsets_epoch: int
    subscription_generation: int = 0
    progress: pb.Acks | None = None
    offsets_set: str = ""


@dataclass(frozen=True, slots=True)
class RecordedDelivery:
    """The delivery is recorded.

    Attributes:
        redelivered: Offsets that an earlier owner may have started.
        sent_ms: Monotonic time at which it was asked for.
        offsets_set: Whose epoch `offsets_epoch` is.
    """

    redelivered: Sequence[queue_pb2.OffsetRange]
    offsets_epoch: int
    sent_ms: int
    offsets_set: str = ""


class DeliveryRecorder:
    """Talks to the leader of one replica set of offsets.

    Args:
        stub: A stub for the present leader; raises `Unreachable` if there is none.
        age_ms_max: An older verdict is not used; also the bound of each call.
        offsets_set: Name of the set.
    """

    def __init__(
        self,
        stub: Callable[[], pb_grpc.OffsetsServiceAsyncStub],
        clock: Clock,
        *,
        age_ms_max: int = 2_000,
        offsets_set: str = "",
    ) -> None:
        self._stub, self._clock, self._age_ms_max = stub, clock, age_ms_max
        self._set = offsets_set
        self._epoch = 0
        self._batcher: Batcher[PendingDelivery, RecordedDelivery | BatonError] = Batcher(
            self._send, items_max=ITEMS_MAX
        )

    async def run(self) -> None:
        """Send for ever; to be run as one task."""
        await self._batcher.run()

    async def record(self, delivery: PendingDelivery) -> RecordedDelivery:
        """Record a delivery; to be acted upon at once, before anything else is awaited.

        Raises:
            Fenced, DeliveryGap, AckCap, UnknownQueue: offsets refuses.
            DeliveryUnrecorded: not known, too old, or from an epoch that is over.
        """
        verdict = await self._batcher.call(delivery)
        if isinstance(verdict, BatonError):
            raise verdict
        age_ms = self._clock.monotonic_ms() - verdict.sent_ms
        if age_ms > self._age_ms_max:
            raise DeliveryUnrecorded(f"the answer of offsets is {age_ms} ms old")
        return verdict

    async def touch(self, owners: Sequence[QueueOwner]) -> list[BatonError | None]:
        """Tell offsets that `owners` are alive; None or the refusal for each.

        Raises:
            BatonError: offsets does not answer, or its epoch is over.
        """
        verdicts: list[BatonError | None] = []
        for begin in range(0, len(owners), TOUCHES_MAX):
            chunk = owners[begin : begin + TOUCHES_MAX]
            request = pb.TouchRequest(
                offsets_epoch=self._epoch,
                items=[pb.TouchItem(queue=one.queue(), token=one.token) for one in chunk],
            )
            try:
                answer = await self._stub().Touch(request, timeout=self._age_ms_max / 1000)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            self._check_answer(answer.offsets_epoch, len(answer.outcomes), len(chunk))
            verdicts += [
                error_from_pb(outcome.error) if outcome.HasField("error") else None
                for outcome in answer.outcomes
            ]
        return verdicts

    async def _send(
        self, deliveries: Sequence[PendingDelivery]
    ) -> list[RecordedDelivery | BatonError]:
        """Verdicts in order. For an epoch that a puller claims only its own verdict has to answer:
        a claim may be wrong.
        """
        verdicts: list[RecordedDelivery | BatonError] = []
        for items in _calls([_item(one) for one in deliveries]):
            verdicts += await self._ask(items)
        return [
            unrecorded(_over(verdict.offsets_epoch))
            if isinstance(verdict, RecordedDelivery) and verdict.offsets_epoch < one.offsets_epoch
            else verdict
            for one, verdict in zip(deliveries, verdicts, strict=True)
        ]

    async def _ask(
        self, items: Sequence[pb.DeliveryItem]
    ) -> Sequence[RecordedDelivery | BatonError]:
        request = pb.RecordDeliveredRequest(offsets_epoch=self._epoch, items=items)
        sent_ms = self._clock.monotonic_ms()
        try:
            answer = await self._stub().RecordDelivered(request, timeout=self._age_ms_max / 1000)
            self._check_answer(answer.offsets_epoch, len(answer.outcomes), len(items))
        except grpc.aio.AioRpcError as error:
            return [unrecorded(from_rpc_error(error)) for _ in items]
        except BatonError as error:
            return [unrecorded(error) for _ in items]
        return [
            error_from_pb(outcome.error)
            if outcome.HasField("error")
            else RecordedDelivery(
                outcome.delivered.maybe_seen, answer.offsets_epoch, sent_ms, self._set
            )
            for outcome in answer.outcomes
        ]

    def _check_answer(self, epoch: int, count: int, count_asked: int) -> None:
        if epoch < self._epoch:
            raise _over(epoch)
        if count != count_asked:
            raise DeliveryUnrecorded(f"offsets answers {count} of {count_asked} items")
        self._epoch = epoch


def _item(delivery: PendingDelivery) -> pb.DeliveryItem:
    return pb.DeliveryItem(
        queue=delivery.owner.queue(),
        token=delivery.owner.token,
        first_offset=delivery.first_offset,
        next_offset=delivery.next_offset,
        subscription_generation=delivery.subscription_generation,
        progress=delivery.progress,
    )


def _calls(items: Sequence[pb.DeliveryItem]) -> list[list[pb.DeliveryItem]]:
    """The items of each call, in order."""
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


def _over(epoch: int) -> DeliveryUnrecorded:
    return DeliveryUnrecorded(f"offsets answers under epoch {epoch}, which is over")


def unrecorded(error: BatonError) -> DeliveryUnrecorded:
    """The same failure, as a puller is told it."""
    return DeliveryUnrecorded(
        f"the delivery is not recorded: {error.message}",
        retry_after_ms=max(100, error.retry_after_ms),
    )
