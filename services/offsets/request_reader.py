"""Reads requests into plain values, and rejects malformed ones, which needs no state.

Also reads the page tokens of the list calls (see `batonmq_server.runtime.paging`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.rpc import error_to_pb
from batonmq._core.names import check_broker, check_client_id, check_group, check_topic
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError, InvalidArgument, LimitExceeded
from batonmq_server.offsets.core.ranges import EMPTY, RangeSet
from batonmq_server.offsets.core.resets import QueueReset, ResetOrder
from batonmq_server.offsets.core.values import (
    Acks,
    AckState,
    AdvanceSettlement,
    DeliveryRange,
    FenceAttempt,
    FenceCondition,
    HolderCall,
    HolderPosition,
    ProgressSource,
)
from batonmq_server.runtime.paging import key_of_token, malformed_token

DeliveryCall: TypeAlias = tuple[GroupQueue, HolderCall, DeliveryRange, Acks | None]
ITEMS_MAX = 1_024
STEP_RANGES = 10_000
"""After so many ranges, which takes some 10 ms, other tasks run: a call of one client may have
millions of them."""
NUMBER_MAX = 1 << 62
"""Upper bound of offsets, tokens, epochs and times, so that sums fit in 64 bits."""
QUEUE_ID_MAX = 65_535
BY_MAX = 255
REASON_MAX = 1_024

_ID = re.compile(r"[!-~]{1,64}")
_NUMBER = re.compile(r"[0-9]{1,19}")
_CONDITIONS = {
    pb.FENCE_CONDITION_CLOSED_OR_DRAINED: FenceCondition.CLOSED_OR_DRAINED,
    pb.FENCE_CONDITION_SAME_HOLDER: FenceCondition.SAME_HOLDER,
    pb.FENCE_CONDITION_IDLE: FenceCondition.IDLE,
    pb.FENCE_CONDITION_FORCED: FenceCondition.FORCED,
}

Item = TypeVar("Item")
Value = TypeVar("Value")
Outcome = TypeVar("Outcome")


class ParsedReset(NamedTuple):
    """A reset as requested; an undo has no targets."""

    group: str
    order: ResetOrder
    targets: list[QueueReset]


class RequestReader:
    """Reads the requests of one epoch.

    Args:
        known: Queues with progress; their names are valid and are not checked again.
        ranges_max: Maximum number of ranges in one field.
    """

    def __init__(self, known: Container[GroupQueue], ranges_max: int) -> None:
        self._known, self._ranges_max = known, ranges_max
        self._ranges_read = 0

    async def batch(self, items: Sequence[Item], read: Callable[[Item], Value]) -> list[Value]:
        """Return the items of a call of one client; a malformed item rejects the call.

        Raises:
            InvalidArgument, InvalidName, LimitExceeded: the fact `field` names the item and field.
        """
        values, malformed = await self.shared_batch(items, read)
        for index, error in malformed.items():
            raise type(error)(
                f"items[{index}]: {error.message}",
                remedy=error.remedy,
                facts=error.facts | {"field": f"items[{index}].{error.facts['field']}"},
            )
        return values

    async def shared_batch(
        self, items: Sequence[Item], read: Callable[[Item], Value]
    ) -> tuple[list[Value], dict[int, BatonError]]:
        """Return the well-formed items, and the errors of the malformed ones by index, ascending.

        The items belong to many clients: a malformed item of one does not fail those of the others.
        `merge_outcomes` joins the two again. Other tasks run after every `STEP_RANGES` ranges.

        Raises:
            InvalidArgument, LimitExceeded: there are no items, or too many.
        """
        if not items:
            raise InvalidArgument("items must not be empty", facts={"field": "items"})
        if len(items) > ITEMS_MAX:
            raise LimitExceeded(
                f"the call has {len(items)} items; the limit is {ITEMS_MAX}",
                facts={"field": "items", "limit": ITEMS_MAX, "actual": len(items)},
            )
        values: list[Value] = []
        malformed: dict[int, BatonError] = {}
        for index, item in enumerate(items):
            try:
                values.append(read(item))
            except BatonError as error:
                malformed[index] = error
            if self._ranges_read >= STEP_RANGES:
                self._ranges_read = 0
                await asyncio.sleep(0)
        return values, malformed

    def queue(self, queue: queue_pb2.GroupQueue) -> GroupQueue:
        """Return the group and queue."""
        inner = queue.queue
        key = GroupQueue(queue.group, inner.topic, inner.broker, inner.queue_id)
        if key not in self._known:
            if not queue.HasField("queue"):
                raise InvalidArgument("queue is required", facts={"field": "queue"})
            check_group(key.group)
            check_topic(key.topic)
            check_broker(key.broker)
            number(key.queue_id, "queue_id", largest=QUEUE_ID_MAX)
        return key

    def delivery(self, item: pb.DeliveryItem) -> DeliveryCall:
        """Return queue, token, delivery, and the acks sent with it, if any."""
        first, next_ = item.first_offset, item.next_offset
        if not 0 <= first < next_ <= NUMBER_MAX:
            raise _bad_range(first, next_, "next_offset")
        generation = number(item.subscription_generation, "subscription_generation")
        acks = self._acks(item.progress, "progress.") if item.HasField("progress") else None
        advance_id = number(item.advance_id, "advance_id")
        advance_to = number(item.advance_to, "advance_to")
        delivery = DeliveryRange(first, next_, generation, advance_id, advance_to)
        position = _position(item, number(item.received_epoch, "received_epoch"))
        holder = HolderCall(_token(item.token), item.caller, position)
        return self.queue(item.queue), holder, delivery, acks

    async def deliveries(
        self, request: pb.RecordDeliveredRequest
    ) -> tuple[list[DeliveryCall], dict[int, BatonError]]:
        """Return the deliveries as `shared_batch` does; there may be none beside settlements."""
        if request.settlements and not request.items:
            return [], {}
        return await self.shared_batch(request.items, self.delivery)

    async def settlements(
        self, items: Sequence[pb.AdvanceSettlement]
    ) -> list[tuple[GroupQueue, int, AdvanceSettlement]]:
        """Return queues, tokens, and what was delivered in the advances."""
        return await self.batch(items, self._settlement) if items else []

    def _settlement(self, item: pb.AdvanceSettlement) -> tuple[GroupQueue, int, AdvanceSettlement]:
        advance_id = number(item.advance_id, "advance_id")
        settlement = AdvanceSettlement(advance_id, number(item.sent_offset, "sent_offset"))
        return self.queue(item.queue), _token(item.token), settlement

    def touch(self, item: pb.TouchItem) -> tuple[GroupQueue, int, int]:
        """Return queue, token, and the puller's number."""
        return self.queue(item.queue), _token(item.token), item.caller

    def commit(
        self, item: pb.CommitItem, request: pb.CommitRequest
    ) -> tuple[GroupQueue, HolderCall, Acks]:
        """Return queue, token (0 for none) and acks of an item of `request`."""
        position = _position(item, request.offsets_epoch)
        holder = HolderCall(number(item.token, "token"), request.caller, position)
        return self.queue(item.queue), holder, self._acks(item)

    def close(self, item: pb.CloseItem) -> tuple[GroupQueue, int, Acks, RangeSet]:
        """Return queue, token, acks, and the offsets of handlers that were cut off."""
        unfinished = self.ranges(item.unfinished, "unfinished")
        return self.queue(item.queue), _token(item.token), self._acks(item), unfinished

    def fence(self, item: pb.FenceItem) -> tuple[GroupQueue, FenceAttempt]:
        """Return queue and fence attempt."""
        condition = _CONDITIONS.get(item.condition)
        if condition is None:
            raise InvalidArgument(
                f"condition {item.condition} is not one of the four fence conditions",
                facts={"field": "condition"},
            )
        _id(item.attempt, "attempt")
        forced = condition is FenceCondition.FORCED
        if forced:
            _text(item.forced_by, "forced_by", BY_MAX)
            _text(item.forced_reason, "forced_reason", REASON_MAX)
        holder = _holder(item.holder) if item.HasField("holder") else None
        if holder is None and item.resume:
            raise InvalidArgument(
                "resume must be empty without a holder", facts={"field": "resume"}
            )
        attempt = FenceAttempt(
            attempt=item.attempt,
            expected_token=number(item.expected_token, "expected_token"),
            condition=condition,
            holder=holder,
            resume=self.ranges(item.resume, "resume"),
            reset_epoch=number(item.reset_epoch, "reset_epoch"),
            idle_ms=number(item.idle_ms, "idle_ms", int(condition is FenceCondition.IDLE)),
            token_min=number(item.token_min, "token_min"),
            initial_offset=number(item.initial_offset, "initial_offset"),
            forced_by=item.forced_by if forced else "",
            forced_reason=item.forced_reason if forced else "",
            subscription_generation=number(item.subscription_generation, "subscription_generation"),
            topic_id=number(item.topic_id, "topic_id"),
            observed_delivered_offset=number(
                item.observed_delivered_offset, "observed_delivered_offset"
            ),
            observed_reset_epoch=number(item.observed_reset_epoch, "observed_reset_epoch"),
        )
        return self.queue(item.queue), attempt

    async def reset(self, request: pb.ResetRequest) -> ParsedReset:
        """Return the group, the order, and the targets of a reset or an undo."""
        order = _order(request, ProgressSource.RESET)
        if not request.undo_op_id:
            targets = await self.batch(request.items, self._target)
            groups = {target.key.group for target in targets}
            if len(groups) > 1:
                raise InvalidArgument(
                    f"a reset is for one group; its items are of {len(groups)} groups",
                    facts={"field": "items"},
                )
            check_single(target.key for target in targets)
            return ParsedReset(groups.pop(), order, targets)
        if request.items:
            raise InvalidArgument("items must be empty for an undo", facts={"field": "items"})
        _id(request.undo_op_id, "undo_op_id")
        undo = order._replace(undone_op_id=request.undo_op_id)
        return ParsedReset(check_group(request.undo_group), undo, [])

    def clone(self, request: pb.CloneRequest) -> tuple[str, ResetOrder, str]:
        """Return the receiving group, the order, and the topic (empty for all topics)."""
        from_group, to_group = check_group(request.from_group), check_group(request.to_group)
        if from_group == to_group:
            raise InvalidArgument(
                f"from_group and to_group are both {to_group}", facts={"field": "to_group"}
            )
        order = _order(request, ProgressSource.CLONE)._replace(from_group=from_group)
        return to_group, order, topic_or_all(request.topic)

    def _target(self, item: pb.ResetItem) -> QueueReset:
        return QueueReset(self.queue(item.queue), AckState(number(item.to_offset, "to_offset")))

    def _acks(self, item: pb.CommitItem | pb.CloseItem | pb.Acks, within: str = "") -> Acks:
        return Acks(
            number(item.reset_epoch, f"{within}reset_epoch"),
            number(item.committed_offset, f"{within}committed_offset"),
            self.ranges(item.acked, f"{within}acked"),
        )

    def ranges(self, ranges: Sequence[queue_pb2.OffsetRange], field: str) -> RangeSet:
        """Return the set of ranges; they must ascend and not overlap, and may touch."""
        if not ranges:
            return EMPTY
        self._ranges_read += len(ranges)
        if len(ranges) > self._ranges_max:
            raise LimitExceeded(
                f"{field} has {len(ranges)} ranges; the limit is {self._ranges_max}",
                facts={"field": field, "limit": self._ranges_max, "actual": len(ranges)},
            )
        runs = [(each.first_offset, each.next_offset) for each in ranges]
        lowest = 0
        for first, next_ in runs:
            if not lowest <= first < next_ <= NUMBER_MAX:
                raise _bad_range(first, next_, field)
            lowest = next_
        return RangeSet.merged(runs)


def merge_outcomes(
    outcomes: list[Outcome], malformed: Mapping[int, BatonError], make: Callable[..., Outcome]
) -> list[Outcome]:
    """Return the outcomes of all items in request order.

    Args:
        outcomes: Those of the well-formed items, in order; changed in place.
        malformed: The errors of the malformed items, by index, ascending.
        make: Makes an outcome from an error.
    """
    for index, error in malformed.items():
        outcomes.insert(index, make(error=error_to_pb(error)))
    return outcomes


def check_single(keys: Iterable[GroupQueue]) -> None:
    """Return if every queue has only one item.

    Raises:
        InvalidArgument: a queue has two items.
    """
    seen: set[GroupQueue] = set()
    for key in keys:
        if key in seen:
            raise InvalidArgument(f"queue {key} has two items", facts={"field": "items"})
        seen.add(key)


def topic_or_all(topic: str) -> str:
    """Return the topic name; it may be empty, for all topics.

    Raises:
        InvalidName: the name is not valid.
    """
    return check_topic(topic) if topic else ""


def number(value: int, field: str, lowest: int = 0, largest: int = NUMBER_MAX) -> int:
    """Return `value` if it is within its bounds.

    Raises:
        InvalidArgument: the value is out of bounds.
    """
    if not lowest <= value <= largest:
        raise InvalidArgument(
            f"{field} must be {lowest} to {largest}, got {value}", facts={"field": field}
        )
    return value


def number_of_token(page_token: str) -> int | None:
    """Return the number in a page token of ListResets or ListHolds; None for the first page.

    Raises:
        InvalidArgument: the token is malformed.
    """
    key = key_of_token(page_token)
    if not key:
        return None
    if not _NUMBER.fullmatch(key):
        raise malformed_token(page_token)
    return int(key)


def token_key_of_queue(key: GroupQueue) -> str:
    """Return the key that a page token of QueryGroup holds for a queue."""
    return f"{key.topic}\0{key.broker}\0{key.queue_id}"


def queue_of_token(group: str, page_token: str) -> GroupQueue | None:
    """Return the queue in a page token of QueryGroup; None for the first page.

    Raises:
        InvalidArgument: the token is malformed.
    """
    key = key_of_token(page_token)
    if not key:
        return None
    parts = key.split("\0")
    if len(parts) != 3 or not _NUMBER.fullmatch(parts[2]):
        raise malformed_token(page_token)
    return GroupQueue(group, parts[0], parts[1], int(parts[2]))


def _holder(holder: queue_pb2.Incarnation) -> Incarnation:
    check_client_id(holder.client_id)
    if holder.incarnation_id == 0:
        raise InvalidArgument(
            "holder.incarnation_id must not be 0", facts={"field": "holder.incarnation_id"}
        )
    return Incarnation(holder.client_id, holder.incarnation_id, holder.owner)


def _position(item: pb.DeliveryItem | pb.CommitItem, offsets_epoch: int) -> HolderPosition | None:
    if not item.HasField("received_offset"):
        return None
    return HolderPosition(number(item.received_offset, "received_offset"), offsets_epoch)


def _token(token: int) -> int:
    return number(token, "token", 1)


def _order(request: pb.ResetRequest | pb.CloneRequest, kind: ProgressSource) -> ResetOrder:
    if not request.dry_run:
        _id(request.op_id, "op_id")
        _text(request.by, "by", BY_MAX)
        _text(request.reason, "reason", REASON_MAX)
    return ResetOrder(request.op_id, kind, request.by, request.reason)


def _id(text: str, field: str) -> None:
    if not _ID.fullmatch(text):
        raise InvalidArgument(
            f"{field} must be 1 to 64 visible ASCII characters, got {text[:80]!r}",
            facts={"field": field},
        )


def _text(text: str, field: str, length_max: int) -> None:
    if not (0 < len(text) <= length_max and text.isprintable()):
        raise InvalidArgument(
            f"{field} must be 1 to {length_max} printable characters", facts={"field": field}
        )


def _bad_range(first: int, next_: int, field: str) -> InvalidArgument:
    return InvalidArgument(
        f"range [{first}, {next_}) in {field} is negative, empty, too large or out of order",
        facts={"field": field},
    )
