"""Checks of request fields that do not depend on the state of the lock manager."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

from baton.common.v1 import queue_pb2
from batonmq._core.queues import GroupQueue
from batonmq.errors import InvalidArgument, LimitExceeded

ITEMS_MAX = 1_024
HOLDS_MAX = 10_000
BY_MAX, REASON_MAX = 255, 1_024
RANGES_MAX = 4_096
"""Ranges that one item may resume; messages in flight lie within a span of 2,000 offsets."""
QUEUE_ID_MAX = 65_535
NUMBER_MAX = 1 << 62
"""Greatest offset and epoch, here and at offsets."""

_OP_ID = re.compile(r"[!-~]{1,58}")


def check_ranges(ranges: Sequence[queue_pb2.OffsetRange]) -> None:
    """Reject the offset ranges of a request unless they are ascending and disjoint.

    Raises:
        LimitExceeded: there are too many.
        InvalidArgument: a range is empty, out of order or out of bounds.
    """
    check_at_most("resume", len(ranges), RANGES_MAX)
    lowest = 0
    for part in ranges:
        if not lowest <= part.first_offset < part.next_offset <= NUMBER_MAX:
            raise InvalidArgument(
                f"resume has the range [{part.first_offset}, {part.next_offset}), which must not "
                f"be empty and must start at {lowest} or later",
                facts={"field": "resume"},
            )
        lowest = part.next_offset


def check_unique(field: str, key: GroupQueue, seen: Container[GroupQueue]) -> None:
    """Reject a queue that the same request has listed before."""
    if key in seen:
        raise InvalidArgument(f"{field} lists {key} twice", facts={"field": field})


def check_positive(field: str, value: int) -> None:
    """Reject a number that is not positive."""
    if value <= 0:
        raise InvalidArgument(f"{field} must be positive, got {value}", facts={"field": field})


def check_number(field: str, value: int) -> None:
    """Reject an offset or epoch that is negative or greater than `NUMBER_MAX`."""
    if not 0 <= value <= NUMBER_MAX:
        raise InvalidArgument(
            f"{field} must be 0 to {NUMBER_MAX}, got {value}", facts={"field": field}
        )


def check_text(field: str, value: str, chars_max: int) -> str:
    """Return `value`; reject a text that is missing or too long."""
    if not value:
        raise InvalidArgument(f"{field} is required", facts={"field": field})
    check_at_most(field, len(value), chars_max)
    return value


def check_op_id(value: str) -> str:
    """Return `value`; reject an operation id that can't be part of the id of a fence attempt."""
    if not _OP_ID.fullmatch(value):
        raise InvalidArgument(
            f"op_id must be 1 to 58 visible ASCII characters, got {value[:80]!r}",
            facts={"field": "op_id"},
        )
    return value


def check_at_most(field: str, actual: int, limit: int) -> None:
    """Reject a number, or a count, above its limit."""
    if actual > limit:
        raise LimitExceeded(
            f"{field} must be at most {limit}, got {actual}",
            facts={"field": field, "limit": limit, "actual": actual},
        )


def check_not_empty(field: str, count: int) -> None:
    """Reject an empty list."""
    if count == 0:
        raise InvalidArgument(f"{field} must not be empty", facts={"field": field})
