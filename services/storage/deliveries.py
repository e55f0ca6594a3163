"""Record before reply: what storage asks of offsets (protocol, sections 6.3 to 6.5).

One call is in flight; what arrives meanwhile rides in the next one. Only a verdict that is
fresh and comes from the newest known epoch of offsets lets bytes leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc.aio
from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc

from batonmq.common.batcher import Batcher
from batonmq.common.clock import Clock
from batonmq.common.errors import BatonError, DeliveryUnrecorded
from batonmq.common.rpc import error_from_pb, from_rpc_error
from services.storage.pulls import Holder

ITEMS_MAX = 256
TOUCHES_MAX = 1_024


@dataclass(frozen=True, slots=True)
class Delivery:
    """A range that is about to be delivered.

    Attributes:
        offsets_epoch: Highest epoch of `offsets_set` the puller has seen.
        subscription_generation: Of the filter that was used.
        progress: Acks that ride along.
        offsets_set: That keeps the group, as far as the puller knows; empty for the one that does.
    """

    holder: Holder
    first_offset: int
    next_offset: int
    offsets_epoch: int
    subscription_generation: int = 0
    progress: pb.Acks | None = None
    offsets_set: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The delivery is recorded.

    Attributes:
        redelivered: Offsets that an earlier holder may have started.
        sent_ms: Monotonic time at which it was asked for.
        offsets_set: Whose epoch `offsets_epoch` is.
    """

    redelivered: Sequence[queue_pb2.OffsetRange]
    offsets_epoch: int
    sent_ms: int
    offsets_set: str = ""


class Deliveries:
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
        self._batcher: Batcher[Delivery, Verdict | BatonError] = Batcher(
            self._send, items_max=ITEMS_MAX
        )

    async def run(self) -> None:
        """Send for ever; to be run as one task."""
        await self._batcher.run()

    async def record(self, delivery: Delivery) -> Verdict:
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

    async def touch(self, holders: Sequence[Holder]) -> list[BatonError | None]:
        """Tell offsets that `holders` are alive; None or the refusal for each.

        Raises:
            BatonError: offsets does not answer, or its epoch is over.
        """
        verdicts: list[BatonError | None] = []
        for begin in range(0, len(holders), TOUCHES_MAX):
            chunk = holders[begin : begin + TOUCHES_MAX]
            request = pb.TouchRequest(
                offsets_epoch=self._epoch,
                items=[pb.TouchItem(queue=one.queue(), token=one.token) for one in chunk],
            )
            try:
                answer = await self._stub().Touch(request, timeout=self._age_ms_max / 1000)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            self._check_answer(answer.offsets_epoch, self._epoch, len(answer.outcomes), len(chunk))
            verdicts += [
                error_from_pb(outcome.error) if outcome.HasField("error") else None
                for outcome in answer.outcomes
            ]
        return verdicts

    async def _send(self, deliveries: Sequence[Delivery]) -> list[Verdict | BatonError]:
        """Verdicts in order. Pullers who claim an epoch that nobody here has seen ride apart:
        if the claim is wrong, only they are refused.
        """
        known = [one for one in deliveries if one.offsets_epoch <= self._epoch]
        ahead = [one for one in deliveries if one.offsets_epoch > self._epoch]
        verdicts: dict[int, Verdict | BatonError] = {}
        for part in (known, ahead):
            if part:
                outcomes = await self._ask(part)
                verdicts.update(zip(map(id, part), outcomes, strict=True))
        return [verdicts[id(one)] for one in deliveries]

    async def _ask(self, deliveries: Sequence[Delivery]) -> Sequence[Verdict | BatonError]:
        epoch = max(self._epoch, *(one.offsets_epoch for one in deliveries))
        request = pb.RecordDeliveredRequest(
            offsets_epoch=epoch,
            items=[
                pb.DeliveryItem(
                    queue=one.holder.queue(),
                    token=one.holder.token,
                    first_offset=one.first_offset,
                    next_offset=one.next_offset,
                    subscription_generation=one.subscription_generation,
                    progress=one.progress,
                )
                for one in deliveries
            ],
        )
        sent_ms = self._clock.monotonic_ms()
        try:
            answer = await self._stub().RecordDelivered(request, timeout=self._age_ms_max / 1000)
            self._check_answer(answer.offsets_epoch, epoch, len(answer.outcomes), len(deliveries))
        except grpc.aio.AioRpcError as error:
            return [unrecorded(from_rpc_error(error)) for _ in deliveries]
        except BatonError as error:
            return [unrecorded(error) for _ in deliveries]
        return [
            error_from_pb(outcome.error)
            if outcome.HasField("error")
            else Verdict(outcome.delivered.maybe_seen, answer.offsets_epoch, sent_ms, self._set)
            for outcome in answer.outcomes
        ]

    def _check_answer(self, epoch: int, epoch_min: int, count: int, count_asked: int) -> None:
        if epoch < max(epoch_min, self._epoch):
            raise DeliveryUnrecorded(f"offsets answers under epoch {epoch}, which is over")
        if count != count_asked:
            raise DeliveryUnrecorded(f"offsets answers {count} of {count_asked} items")
        self._epoch = epoch


def unrecorded(error: BatonError) -> DeliveryUnrecorded:
    """The same failure, as a puller is told it."""
    return DeliveryUnrecorded(
        f"the delivery is not recorded: {error.message}",
        retry_after_ms=max(100, error.retry_after_ms),
    )
