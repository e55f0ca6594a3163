"""Who held a queue under which token, from when to when, and what was delivered.

Each change of a token is one record, written in the same step as the change. It has what began and
what ended, so the end of a hold stands in the record of the next one: no record is written twice.
The slots of a queue are a ring; what was overwritten, or belongs to progress that was deleted, is
never linked to any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from batonmq._core.queues import Incarnation
from batonmq_server.offsets.core.ranges import RangeSet

HOLDS_MAX = 32
"""Records kept per queue; the oldest is forgotten for a newer one."""
ACKED_RANGES_MAX = 64


class HoldEnd(IntEnum):
    """What ended a token; numbers as in the contract."""

    NOTHING = 0
    PASSED = 1
    RENEWED = 2
    TIMED_OUT = 3
    FORCED = 4
    RESET = 5


class DeliveryReach(NamedTuple):
    """How far was delivered under a token.

    Attributes:
        delivered_offset: One past the last offset that is known to have been delivered.
        delivered_offset_max: Upper bound of it; greater only after a restart.
    """

    delivered_offset: int
    delivered_offset_max: int


class EndedToken(NamedTuple):
    """The token before; `token` is 0 if there was none."""

    token: int
    end: HoldEnd
    reach: DeliveryReach


class TokenChange(NamedTuple):
    """One change of a queue's token.

    Attributes:
        acked: Above the committed offset; the first 64 ranges.
    """

    token: int
    holder: Incarnation | None
    unix_ms: int
    committed_offset: int
    acked: RangeSet
    ended: EndedToken

    @property
    def slot(self) -> int:
        """Where in the ring it is kept."""
        return self.token % HOLDS_MAX


class TokenHold(NamedTuple):
    """One token, as `began` says. `end_unix_ms` is 0 while it is the present one."""

    began: TokenChange
    end: HoldEnd
    end_unix_ms: int
    reach: DeliveryReach


def link_holds(records: Iterable[TokenChange], token: int, reach: DeliveryReach) -> list[TokenHold]:
    """The holds of a queue, newest first; those that records don't link to are forgotten.

    Args:
        records: Of all slots, in whatever order; maybe newer ones too.
        token: The present one.
        reach: What was delivered under it so far.
    """
    by_token = {record.token: record for record in records}
    found: list[TokenHold] = []
    end, end_unix_ms = HoldEnd.NOTHING, 0
    while (began := by_token.get(token)) is not None and token:
        found.append(TokenHold(began, end, end_unix_ms, reach))
        token, end, reach = began.ended
        end_unix_ms = began.unix_ms
    return found
