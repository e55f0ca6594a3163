"""The holds of a queue: each token with its holder, its time span and its deliveries.

Each change of a token writes one record, in the same write as the change. A record has the token
that began and the token that ended, so the end of a hold is in the record of the next hold and no
record is written twice. The slots of a queue form a ring. Records that were overwritten, or that
belong to deleted progress, are not linked from newer records any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from batonmq._core.queues import Incarnation
from batonmq_server.offsets.core.ranges import RangeSet

HOLDS_MAX = 32
"""Records kept per queue; a new one replaces the oldest."""
ACKED_RANGES_MAX = 64
"""Acked ranges kept in a record."""


class HoldEnd(IntEnum):
    """The cause of the end of a token; numbers as in the proto."""

    NOTHING = 0
    PASSED = 1
    RENEWED = 2
    TIMED_OUT = 3
    FORCED = 4
    RESET = 5


class DeliveryReach(NamedTuple):
    """The end of the deliveries under a token.

    Attributes:
        delivered_offset: One past the last offset that is known to be delivered.
        delivered_offset_max: Upper bound; greater than `delivered_offset` only after a restart.
    """

    delivered_offset: int
    delivered_offset_max: int


class EndedToken(NamedTuple):
    """The token that a change ended; `token` is 0 if there was none."""

    token: int
    end: HoldEnd
    reach: DeliveryReach


class TokenChange(NamedTuple):
    """One change of a queue's token.

    Attributes:
        token: The new token.
        holder: The new holder; None for none.
        acked: Acked ranges above the committed offset, the first `ACKED_RANGES_MAX`.
        ended: The token before.
    """

    token: int
    holder: Incarnation | None
    unix_ms: int
    committed_offset: int
    acked: RangeSet
    ended: EndedToken

    @property
    def slot(self) -> int:
        """Slot of the ring in which the record is kept."""
        return slot_of(self.token)


def slot_of(token: int) -> int:
    """Return the slot of the ring in which the record of a token is kept."""
    return token % HOLDS_MAX


class TokenHold(NamedTuple):
    """One token, issued by the change `began`; `end_unix_ms` is 0 for the current token."""

    began: TokenChange
    end: HoldEnd
    end_unix_ms: int
    reach: DeliveryReach


def link_holds(records: Iterable[TokenChange], token: int, reach: DeliveryReach) -> list[TokenHold]:
    """Return the holds of a queue, newest first, as far back as the records are linked.

    Args:
        records: The records of all slots, in any order; records of newer tokens are ignored.
        token: The current token.
        reach: The end of the deliveries under the current token.
    """
    by_token = {record.token: record for record in records}
    linked: list[TokenHold] = []
    end, end_unix_ms = HoldEnd.NOTHING, 0
    while (began := by_token.get(token)) is not None and token:
        linked.append(TokenHold(began, end, end_unix_ms, reach))
        token, end, reach = began.ended
        end_unix_ms = began.unix_ms
    return linked
