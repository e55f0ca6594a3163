"""Requests to plain values. Refuses here what is malformed whatever the state."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.rpc import error_to_pb
from batonmq._core.names import check_broker, check_client_id, check_group, check_topic
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq.errors import BatonError, InvalidArgument, LimitExceeded
from batonmq_server.offsets.core.ranges import EMPTY, RangeSet
from batonmq_server.offsets.core.resets import ResetOrder, ResetTarget
from batonmq_server.offsets.core.values import (
    Acks,
    AckState,
    DeliveryRange,
    FenceAttempt,
    FenceCondition,
    ProgressSource,
)

ITEMS_MAX = 1_024
NUMBER_MAX = 1 << 62
"""Offsets, tokens, epochs and times are not greater, so that sums stay in 64 bits."""
QUEUE_ID_MAX = 65_535
BY_MAX = 255
REASON_MAX = 1_024

_ID = re.compile(r"[!-~]{1,64}")
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
    """A reset as asked for; an undo has no targets."""

    group: str
    order: ResetOrder
    targets: list[ResetTarget]


class RequestReader:
    """Reads requests.

    Args:
        known: Queues with progress; their names were checked once and for all.
        ranges_max: Most ranges in one field.
    """

    def __init__(self, known: Container[GroupQueue], ranges_max: int) -> None:
        self._known, self._ranges_max = known, ranges_max

    def items(self, items: Sequence[Item], read: Callable[[Item], Value]) -> list[Value]:
        """Every item of one caller read; if one can't be, none of the call counts.

        Raises:
            InvalidArgument, InvalidName, LimitExceeded: the fact `field` says where.
        """
        values, malformed = self.shared_items(items, read)
        for place, error in malformed.items():
            raise type(error)(
                f"items[{place}]: {error.message}",
                remedy=error.remedy,
                facts=error.facts | {"field": f"items[{place}].{error.facts['field']}"},
            )
        return values

    def shared_items(
        self, items: Sequence[Item], read: Callable[[Item], Value]
    ) -> tuple[list[Value], dict[int, BatonError]]:
        """The items that can be read, and by place, ascending, why the others can't.

        They are of many clients, so nobody pays for another's; see `outcomes_of`.

        Raises:
            InvalidArgument, LimitExceeded: there are none, or too many.
        """
        if not items:
            raise InvalidArgument("the call has no items", facts={"field": "items"})
        if len(items) > ITEMS_MAX:
            raise LimitExceeded(
                f"the call has {len(items)} items, {ITEMS_MAX} are allowed",
                facts={"field": "items", "limit": ITEMS_MAX, "actual": len(items)},
            )
        values: list[Value] = []
        malformed: dict[int, BatonError] = {}
        for place, item in enumerate(items):
            try:
                values.append(read(item))
            except BatonError as error:
                malformed[place] = error
        return values, malformed

    def queue(self, queue: queue_pb2.GroupQueue) -> GroupQueue:
        """Key of the queue."""
        inner = queue.queue
        key = GroupQueue(queue.group, inner.topic, inner.broker, inner.queue_id)
        if key not in self._known:
            if not queue.HasField("queue"):
                raise InvalidArgument("the queue is missing", facts={"field": "queue"})
            check_group(key.group)
            check_topic(key.topic)
            check_broker(key.broker)
            number(key.queue_id, "queue_id", largest=QUEUE_ID_MAX)
        return key

    def delivery(self, item: pb.DeliveryItem) -> tuple[GroupQueue, int, DeliveryRange, Acks | None]:
        """Queue, token, delivery, and acks that ride along."""
        first, next_ = item.first_offset, item.next_offset
        if not 0 <= first < next_ <= NUMBER_MAX:
            raise _bad_range(first, next_, "next_offset")
        generation = number(item.subscription_generation, "subscription_generation")
        acks = self._acks(item.progress, "progress.") if item.HasField("progress") else None
        delivery = DeliveryRange(first, next_, generation)
        return self.queue(item.queue), _token(item.token), delivery, acks

    def touch(self, item: pb.TouchItem) -> tuple[GroupQueue, int]:
        """Queue and token."""
        return self.queue(item.queue), _token(item.token)

    def commit(self, item: pb.CommitItem) -> tuple[GroupQueue, int, Acks]:
        """Queue, token, 0 for none, and acks."""
        return self.queue(item.queue), number(item.token, "token"), self._acks(item)

    def close(self, item: pb.CloseItem) -> tuple[GroupQueue, int, Acks, RangeSet]:
        """Queue, token, acks and what was cut off."""
        unfinished = self.ranges(item.unfinished, "unfinished")
        return self.queue(item.queue), _token(item.token), self._acks(item), unfinished

    def fence(self, item: pb.FenceItem) -> tuple[GroupQueue, FenceAttempt]:
        """Queue and wish."""
        condition = _CONDITIONS.get(item.condition)
        if condition is None:
            raise InvalidArgument(
                f"condition {item.condition} is not one of the four", facts={"field": "condition"}
            )
        _id(item.attempt, "attempt")
        forced = condition is FenceCondition.FORCED
        if forced:
            _text(item.forced_by, "forced_by", BY_MAX)
            _text(item.forced_reason, "forced_reason", REASON_MAX)
        holder = _holder(item.holder) if item.HasField("holder") else None
        if holder is None and item.resume:
            raise InvalidArgument("nobody has nothing to resume", facts={"field": "resume"})
        wish = FenceAttempt(
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
        )
        return self.queue(item.queue), wish

    def reset(self, request: pb.ResetRequest) -> ParsedReset:
        """What has to be moved, by whom and why."""
        order = _order(request, ProgressSource.RESET)
        if not request.undo_op_id:
            targets = self.items(request.items, self._target)
            groups = {target.key.group for target in targets}
            if len(groups) > 1:
                raise InvalidArgument(
                    f"the queues are of {len(groups)} groups", facts={"field": "items"}
                )
            check_single(target.key for target in targets)
            return ParsedReset(groups.pop(), order, targets)
        if request.items:
            raise InvalidArgument("an undo names no queues", facts={"field": "items"})
        _id(request.undo_op_id, "undo_op_id")
        undo = order._replace(undone_op_id=request.undo_op_id)
        return ParsedReset(check_group(request.undo_group), undo, [])

    def clone(self, request: pb.CloneRequest) -> tuple[str, ResetOrder, str]:
        """The group that gets something, what it gets, and the topic, empty for all."""
        from_group, to_group = check_group(request.from_group), check_group(request.to_group)
        if from_group == to_group:
            raise InvalidArgument(
                f"group {to_group} can't be cloned into itself", facts={"field": "to_group"}
            )
        order = _order(request, ProgressSource.CLONE)._replace(from_group=from_group)
        return to_group, order, topic_or_all(request.topic)

    def _target(self, item: pb.ResetItem) -> ResetTarget:
        return ResetTarget(self.queue(item.queue), AckState(number(item.to_offset, "to_offset")))

    def _acks(self, item: pb.CommitItem | pb.CloseItem | pb.Acks, within: str = "") -> Acks:
        return Acks(
            number(item.reset_epoch, f"{within}reset_epoch"),
            number(item.committed_offset, f"{within}committed_offset"),
            self.ranges(item.acked, f"{within}acked"),
        )

    def ranges(self, ranges: Sequence[queue_pb2.OffsetRange], field: str) -> RangeSet:
        """The set of ranges that ascend and do not overlap; they may touch."""
        if not ranges:
            return EMPTY
        if len(ranges) > self._ranges_max:
            raise LimitExceeded(
                f"{field} has {len(ranges)} ranges, {self._ranges_max} are allowed",
                facts={"field": field, "limit": self._ranges_max, "actual": len(ranges)},
            )
        runs = [(each.first_offset, each.next_offset) for each in ranges]
        lowest = 0
        for first, next_ in runs:
            if not lowest <= first < next_ <= NUMBER_MAX:
                raise _bad_range(first, next_, field)
            lowest = next_
        return RangeSet.merged(runs)


def outcomes_of(
    outcomes: list[Outcome], malformed: Mapping[int, BatonError], refused: Callable[..., Outcome]
) -> list[Outcome]:
    """Those of all items in the order of the call, from those of the items that could be read."""
    for place, error in malformed.items():
        outcomes.insert(place, refused(error=error_to_pb(error)))
    return outcomes


def check_single(keys: Iterable[GroupQueue]) -> None:
    """Refuse a call with two items for one queue.

    Raises:
        InvalidArgument: it has.
    """
    seen: set[GroupQueue] = set()
    for key in keys:
        if key in seen:
            raise InvalidArgument(f"queue {key} has two items", facts={"field": "items"})
        seen.add(key)


def topic_or_all(topic: str) -> str:
    """The name of a topic, or nothing.

    Raises:
        InvalidName: it is neither.
    """
    return check_topic(topic) if topic else ""


def number(value: int, field: str, lowest: int = 0, largest: int = NUMBER_MAX) -> int:
    """`value`, if it is within bounds.

    Raises:
        InvalidArgument: it is not.
    """
    if not lowest <= value <= largest:
        raise InvalidArgument(
            f"{field} is {value}, not {lowest} to {largest}", facts={"field": field}
        )
    return value


def _holder(holder: queue_pb2.Incarnation) -> Incarnation:
    check_client_id(holder.client_id)
    if holder.incarnation_id == 0:
        raise InvalidArgument("incarnation_id is 0", facts={"field": "holder.incarnation_id"})
    return Incarnation(holder.client_id, holder.incarnation_id)


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
            f"{field} {text[:80]!r} is not 1 to 64 visible ASCII characters",
            facts={"field": field},
        )


def _text(text: str, field: str, length_max: int) -> None:
    if not (0 < len(text) <= length_max and text.isprintable()):
        raise InvalidArgument(
            f"{field} is not 1 to {length_max} printable characters", facts={"field": field}
        )


def _bad_range(first: int, next_: int, field: str) -> InvalidArgument:
    return InvalidArgument(
        f"[{first}, {next_}) in {field} is negative, empty, too large or out of order",
        facts={"field": field},
    )
