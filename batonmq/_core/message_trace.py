"""What became of one message in one queue, for one group: by who held the queue and what is acked.

Says no more than is known. What was delivered is known by ranges of offsets, so when exactly it was
is not; after a restart of offsets also whether may be open. Pure: no wire, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from batonmq._core.ranges import Range, contains


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """One token of a queue.

    Attributes:
        client_id: Whom it was issued to; None for nobody.
        end_unix_ms: 0 while it is the present one.
        end: What ended it: passed, renewed, timed_out, forced or reset; empty while it is present.
        committed_offset: At its issue everything below was handled, and all in `acked`.
        acked_complete: Whether those are all; otherwise what lies above them is open.
        delivered_offset: One past the last offset that is known to have been delivered under it.
        delivered_offset_max: Upper bound of it.
    """

    token: int
    client_id: str | None
    begin_unix_ms: int
    end_unix_ms: int
    end: str
    committed_offset: int
    acked: Sequence[Range]
    acked_complete: bool
    delivered_offset: int
    delivered_offset_max: int

    def had(self, offset: int) -> bool | None:
        """Whether an offset was handled before the issue; None if that is not known."""
        return _handled(offset, self.committed_offset, self.acked, complete=self.acked_complete)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueProgressNow:
    """Where a group is on a queue now; attributes as in `Hold`.

    Attributes:
        client_id: Who holds the queue; None for nobody.
        owned: Whether the group's queues are owned, so that deliveries are recorded.
    """

    committed_offset: int
    acked: Sequence[Range]
    acked_complete: bool
    client_id: str | None
    token: int
    owned: bool

    def has(self, offset: int) -> bool | None:
        """Whether an offset is handled; None if that is not known."""
        return _handled(offset, self.committed_offset, self.acked, complete=self.acked_complete)


class TraceEventKind(StrEnum):
    """What happened."""

    DELIVERED = "delivered"
    MAYBE_DELIVERED = "maybe_delivered"
    """Within bounds: it was about to be, or was."""
    KEPT = "kept"
    """The holder asked again, and had it in hand still or got it once more."""
    ACKED = "acked"
    SKIPPED = "skipped"
    """A reset or clone counts it as handled."""
    SETTLED = "acked_or_skipped"
    """By the time of a reset or clone, or by it."""
    BROUGHT_BACK = "brought_back"
    """A reset or clone has it delivered again."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that happened between two times; at `begin_unix_ms` if both are the same.

    Attributes:
        end_unix_ms: 0 for: by now.
    """

    what: TraceEventKind
    begin_unix_ms: int
    end_unix_ms: int
    token: int
    client_id: str | None


class MessageState(StrEnum):
    """Where a message is for a group, in one queue."""

    ACKED = "acked"
    IN_HAND = "in_hand"
    MAYBE_IN_HAND = "maybe_in_hand"
    WAITING = "waiting"
    """It has not been delivered, or was and comes again."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class MessageTrace:
    """What became of one message in one queue, for one group.

    Attributes:
        steps: In order of time.
        state: As it is now.
        before: It was handled before the oldest hold that is recorded, so nobody knows by whom.
    """

    steps: tuple[TraceEvent, ...]
    state: MessageState
    before: bool


def trace_message(
    holds: Sequence[Hold], standing: QueueProgressNow, offset: int, store_unix_ms: int
) -> MessageTrace:
    """The story of an offset.

    Args:
        holds: Newest first, each linked to the next.
        store_unix_ms: When the message was stored: it was not delivered before.
    """
    oldest_first = list(reversed(holds))
    had = [*(hold.had(offset) for hold in oldest_first), standing.has(offset)]
    steps: list[TraceEvent] = []
    before: Hold | None = None
    for hold, then, after in zip(oldest_first, had[:-1], had[1:], strict=True):
        begin = max(hold.begin_unix_ms, store_unix_ms)
        if then is not True and (what := _delivery(hold, before, offset, sure=then is False)):
            steps.append(TraceEvent(what, begin, hold.end_unix_ms, hold.token, hold.client_id))
        if then is not after and None not in (then, after):
            steps.append(_change(hold, begin, handled=bool(after), offset=offset))
        before = hold
    return MessageTrace(tuple(steps), _state(oldest_first, standing, had[-1], offset), bool(had[0]))


def _delivery(hold: Hold, before: Hold | None, offset: int, *, sure: bool) -> TraceEventKind | None:
    """How a message that was not handled yet met a hold, if it did."""
    if offset >= hold.delivered_offset_max or hold.client_id is None:
        return None
    if (
        before is not None
        and before.end == "renewed"
        and before.client_id == hold.client_id
        and before.committed_offset <= offset < before.delivered_offset
    ):
        return TraceEventKind.KEPT
    if sure and hold.committed_offset <= offset < hold.delivered_offset:
        return TraceEventKind.DELIVERED
    return TraceEventKind.MAYBE_DELIVERED


def _change(hold: Hold, begin: int, *, handled: bool, offset: int) -> TraceEvent:
    """It was handled, or was not any more, by the time the hold ended."""
    if hold.end != "reset":
        return TraceEvent(TraceEventKind.ACKED, begin, hold.end_unix_ms, hold.token, hold.client_id)
    at = hold.end_unix_ms
    if not handled:
        return TraceEvent(TraceEventKind.BROUGHT_BACK, at, at, hold.token, None)
    if offset >= hold.delivered_offset_max:
        return TraceEvent(TraceEventKind.SKIPPED, at, at, hold.token, None)
    return TraceEvent(TraceEventKind.SETTLED, begin, at, hold.token, hold.client_id)


def _state(
    oldest_first: Sequence[Hold], standing: QueueProgressNow, handled: bool | None, offset: int
) -> MessageState:
    if handled is not False:
        return MessageState.UNKNOWN if handled is None else MessageState.ACKED
    if standing.client_id is None:
        return MessageState.WAITING
    if not oldest_first:
        return MessageState.MAYBE_IN_HAND
    if offset < oldest_first[-1].delivered_offset:
        return MessageState.IN_HAND
    if offset < oldest_first[-1].delivered_offset_max:
        return MessageState.MAYBE_IN_HAND
    return MessageState.WAITING


def _handled(
    offset: int, committed_offset: int, acked: Sequence[Range], *, complete: bool
) -> bool | None:
    if offset < committed_offset or contains(acked, offset):
        return True
    if not complete and acked and offset >= acked[-1][1]:
        return None
    return False
