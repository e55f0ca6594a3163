"""Requests to plain values, and back. Refuses here what is malformed whatever the state."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeVar

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as pb

from batonmq.common.errors import BatonError, InvalidArgument, LimitExceeded
from batonmq.core.names import check_broker, check_client_id, check_group, check_topic
from services.offsets.core.calls import (
    Acks,
    Condition,
    Fence,
    Grant,
    Holder,
    Instant,
    QueueKey,
    Tombstone,
)
from services.offsets.core.progress import Progress
from services.offsets.core.ranges import EMPTY, RangeSet

ITEMS_MAX = 1_024
NUMBER_MAX = 1 << 62
"""Offsets, tokens, epochs and times are not greater, so that sums stay in 64 bits."""
QUEUE_ID_MAX = 65_535
FORCED_BY_MAX = 255
FORCED_REASON_MAX = 1_024

_ATTEMPT = re.compile(r"[!-~]{1,64}")
_CONDITIONS = {
    pb.FENCE_CONDITION_CLOSED_OR_DRAINED: Condition.CLOSED_OR_DRAINED,
    pb.FENCE_CONDITION_SAME_HOLDER: Condition.SAME_HOLDER,
    pb.FENCE_CONDITION_IDLE: Condition.IDLE,
    pb.FENCE_CONDITION_FORCED: Condition.FORCED,
}

Item = TypeVar("Item")
Value = TypeVar("Value")


class Reader:
    """Reads requests.

    Args:
        known: Queues with progress; their names were checked once and for all.
        ranges_max: Most ranges in one field.
    """

    def __init__(self, known: Container[QueueKey], ranges_max: int) -> None:
        self._known, self._ranges_max = known, ranges_max

    def items(self, items: Sequence[Item], read: Callable[[Item], Value]) -> list[Value]:
        """Every item read; if one can't be, none of the call counts.

        Raises:
            InvalidArgument, InvalidName, LimitExceeded: the fact `field` says where.
        """
        if not items:
            raise InvalidArgument("the call has no items", facts={"field": "items"})
        if len(items) > ITEMS_MAX:
            raise LimitExceeded(
                f"the call has {len(items)} items, {ITEMS_MAX} are allowed",
                facts={"field": "items", "limit": ITEMS_MAX, "actual": len(items)},
            )
        values: list[Value] = []
        for place, item in enumerate(items):
            try:
                values.append(read(item))
            except BatonError as error:
                field = f"items[{place}].{error.facts['field']}"
                raise type(error)(
                    f"items[{place}]: {error.message}",
                    remedy=error.remedy,
                    facts=error.facts | {"field": field},
                ) from error
        return values

    def queue(self, queue: queue_pb2.GroupQueue) -> QueueKey:
        """Key of the queue."""
        inner = queue.queue
        key = QueueKey(queue.group, inner.topic, inner.broker, inner.queue_id)
        if key not in self._known:
            if not queue.HasField("queue"):
                raise InvalidArgument("the queue is missing", facts={"field": "queue"})
            check_group(key.group)
            check_topic(key.topic)
            check_broker(key.broker)
            number(key.queue_id, "queue_id", largest=QUEUE_ID_MAX)
        return key

    def delivery(self, item: pb.DeliveryItem) -> tuple[QueueKey, int, tuple[int, int]]:
        """Queue, token and range."""
        first, next_ = item.first_offset, item.next_offset
        if not 0 <= first < next_ <= NUMBER_MAX:
            raise _bad_range(first, next_, "next_offset")
        return self.queue(item.queue), _token(item.token), (first, next_)

    def touch(self, item: pb.TouchItem) -> tuple[QueueKey, int]:
        """Queue and token."""
        return self.queue(item.queue), _token(item.token)

    def commit(self, item: pb.CommitItem | pb.CloseItem) -> tuple[QueueKey, int, Acks]:
        """Queue, token and acks."""
        acks = Acks(
            number(item.reset_epoch, "reset_epoch"),
            number(item.committed_offset, "committed_offset"),
            self.ranges(item.acked, "acked"),
        )
        return self.queue(item.queue), _token(item.token), acks

    def close(self, item: pb.CloseItem) -> tuple[QueueKey, int, Acks, RangeSet]:
        """Queue, token, acks and what was cut off."""
        return *self.commit(item), self.ranges(item.unfinished, "unfinished")

    def fence(self, item: pb.FenceItem) -> tuple[QueueKey, Fence]:
        """Queue and wish."""
        condition = _CONDITIONS.get(item.condition)
        if condition is None:
            raise InvalidArgument(
                f"condition {item.condition} is not one of the four", facts={"field": "condition"}
            )
        if not _ATTEMPT.fullmatch(item.attempt):
            raise InvalidArgument(
                f"attempt {item.attempt[:80]!r} is not 1 to 64 visible ASCII characters",
                facts={"field": "attempt"},
            )
        if condition is Condition.FORCED:
            _text(item.forced_by, "forced_by", FORCED_BY_MAX)
            _text(item.forced_reason, "forced_reason", FORCED_REASON_MAX)
        wish = Fence(
            attempt=item.attempt,
            expected_token=number(item.expected_token, "expected_token"),
            condition=condition,
            holder=_holder(item.holder),
            resume=self.ranges(item.resume, "resume"),
            reset_epoch=number(item.reset_epoch, "reset_epoch"),
            idle_ms=number(item.idle_ms, "idle_ms", int(condition is Condition.IDLE)),
            token_min=number(item.token_min, "token_min"),
            initial_offset=number(item.initial_offset, "initial_offset"),
        )
        return self.queue(item.queue), wish

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


def check_single(keys: Iterable[QueueKey]) -> None:
    """Refuse a call with two items for one queue.

    Raises:
        InvalidArgument: it has.
    """
    seen: set[QueueKey] = set()
    for key in keys:
        if key in seen:
            raise InvalidArgument(f"queue {key} has two items", facts={"field": "items"})
        seen.add(key)


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


def ranges_pb(ranges: RangeSet) -> list[queue_pb2.OffsetRange]:
    """The runs as messages."""
    return [
        queue_pb2.OffsetRange(first_offset=first, next_offset=next_) for first, next_ in ranges.runs
    ]


def queue_pb(key: QueueKey) -> queue_pb2.GroupQueue:
    """The key as a message."""
    queue = queue_pb2.Queue(topic=key.topic, broker=key.broker, queue_id=key.queue_id)
    return queue_pb2.GroupQueue(group=key.group, queue=queue)


def fenced_pb(grant: Grant) -> pb.Fenced:
    """The grant as a message."""
    return pb.Fenced(
        token=grant.token,
        committed_offset=grant.committed_offset,
        acked=ranges_pb(grant.acked),
        maybe_seen=ranges_pb(grant.maybe_seen),
        reset_epoch=grant.reset_epoch,
    )


def token_pb(key: QueueKey, progress: Progress | Tombstone) -> pb.QueueToken:
    """Who holds a queue, as a message."""
    if isinstance(progress, Tombstone):
        return pb.QueueToken(queue=queue_pb(key), token=progress.token, closed=True)
    return pb.QueueToken(
        queue=queue_pb(key),
        token=progress.token,
        holder=_holder_pb(progress.holder),
        closed=progress.closed,
    )


def progress_pb(key: QueueKey, progress: Progress, now: Instant) -> pb.Progress:
    """Progress as a message."""
    return pb.Progress(
        queue=queue_pb(key),
        token=progress.token,
        holder=_holder_pb(progress.holder),
        closed=progress.closed,
        committed_offset=progress.committed_offset,
        delivered_offset=progress.delivered_offset,
        acked_count=progress.acked.count,
        unacked_count=progress.in_flight().count,
        maybe_seen_count=progress.maybe_seen.count,
        reset_epoch=progress.reset_epoch,
        idle_ms=progress.idle_ms(now),
        update_unix_ms=progress.update_unix_ms,
    )


def _holder_pb(holder: Holder | None) -> queue_pb2.Incarnation | None:
    if holder is None:
        return None
    return queue_pb2.Incarnation(client_id=holder.client_id, incarnation_id=holder.incarnation_id)


def _holder(holder: queue_pb2.Incarnation) -> Holder:
    check_client_id(holder.client_id)
    if holder.incarnation_id == 0:
        raise InvalidArgument("incarnation_id is 0", facts={"field": "holder.incarnation_id"})
    return Holder(holder.client_id, holder.incarnation_id)


def _token(token: int) -> int:
    return number(token, "token", 1)


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
