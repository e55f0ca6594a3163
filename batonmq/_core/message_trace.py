"""History of one message in one queue for one group, from the recorded tokens of the queue.

The history states no more than is known. Deliveries are recorded as ranges of offsets, so the exact
time of a delivery is unknown; after a restart of offsets it may also be unknown whether a message
was delivered. This module has no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from batonmq._core.ranges import Range, contains


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """The time during which one fencing token of a queue was current.

    Attributes:
        client_id: The owner; None if the token was issued to no client.
        end_unix_ms: 0 while the token is current.
        end: What replaced the token: passed, renewed, timed_out, forced or reset; empty while it is
            current.
        committed_offset: When the token was issued, all offsets below were handled.
        acked: When the token was issued, these offsets were handled too.
        acked_complete: Whether `acked` is complete; otherwise offsets above it are unknown.
        delivered_offset: Offset after the last one known to be delivered under the token.
        delivered_offset_max: Upper bound of `delivered_offset`.
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

    def had_handled(self, offset: int) -> bool | None:
        """Return whether an offset was handled before the token was issued; None if unknown."""
        return _handled(offset, self.committed_offset, self.acked, complete=self.acked_complete)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentProgress:
    """Progress of a group on a queue now; attributes as in `Hold`.

    Attributes:
        client_id: The owner of the queue; None if it has none.
        owned: Whether the group's queues have owners, so that deliveries are recorded.
    """

    committed_offset: int
    acked: Sequence[Range]
    acked_complete: bool
    client_id: str | None
    token: int
    owned: bool

    def has_handled(self, offset: int) -> bool | None:
        """Return whether an offset is handled; None if unknown."""
        return _handled(offset, self.committed_offset, self.acked, complete=self.acked_complete)


class TraceEventKind(StrEnum):
    """What happened to a message."""

    DELIVERED = "delivered"
    MAYBE_DELIVERED = "maybe_delivered"
    """It was delivered, or was about to be."""
    KEPT = "kept"
    """The owner acquired the queue again; it still had the message, or received it once more."""
    ACKED = "acked"
    SKIPPED = "skipped"
    """A reset or clone marked it as handled."""
    ACKED_OR_SKIPPED = "acked_or_skipped"
    """It was acknowledged before a reset or clone, or marked as handled by it."""
    BROUGHT_BACK = "brought_back"
    """A reset or clone marked it as not handled, so that it is delivered again."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event between two times; at `begin_unix_ms` if both are equal.

    Attributes:
        end_unix_ms: 0 if the event may have happened up to now.
    """

    what: TraceEventKind
    begin_unix_ms: int
    end_unix_ms: int
    token: int
    client_id: str | None


class MessageState(StrEnum):
    """State of a message in one queue, for one group."""

    ACKED = "acked"
    IN_FLIGHT = "in_flight"
    MAYBE_IN_FLIGHT = "maybe_in_flight"
    WAITING = "waiting"
    """It was not delivered, or is to be delivered again."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class MessageTrace:
    """History of one message in one queue, for one group.

    Attributes:
        events: Events, oldest first.
        state: Current state.
        handled_before: Whether it was handled before the oldest recorded token, so that the client
            that handled it is unknown.
    """

    events: tuple[TraceEvent, ...]
    state: MessageState
    handled_before: bool


def trace_message(
    holds: Sequence[Hold], progress: CurrentProgress, offset: int, store_unix_ms: int
) -> MessageTrace:
    """Return the history of the message at an offset.

    Args:
        holds: The recorded tokens, newest first, without a gap.
        store_unix_ms: Time at which the message was stored; it was not delivered earlier.
    """
    oldest_first = list(reversed(holds))
    handled = [*(hold.had_handled(offset) for hold in oldest_first), progress.has_handled(offset)]
    events: list[TraceEvent] = []
    before: Hold | None = None
    for hold, then, after in zip(oldest_first, handled[:-1], handled[1:], strict=True):
        begin = max(hold.begin_unix_ms, store_unix_ms)
        if then is not True and (what := _delivery(hold, before, offset, sure=then is False)):
            events.append(TraceEvent(what, begin, hold.end_unix_ms, hold.token, hold.client_id))
        if then is not after and None not in (then, after):
            events.append(_change(hold, begin, handled=bool(after), offset=offset))
        before = hold
    return MessageTrace(
        tuple(events), _state(oldest_first, progress, handled[-1], offset), bool(handled[0])
    )


def _delivery(hold: Hold, before: Hold | None, offset: int, *, sure: bool) -> TraceEventKind | None:
    """Return how a message that was not handled was delivered under a token; None if it was not."""
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
    """Return the event that changed whether the message was handled, under a token."""
    if hold.end != "reset":
        return TraceEvent(TraceEventKind.ACKED, begin, hold.end_unix_ms, hold.token, hold.client_id)
    at = hold.end_unix_ms
    if not handled:
        return TraceEvent(TraceEventKind.BROUGHT_BACK, at, at, hold.token, None)
    if offset >= hold.delivered_offset_max:
        return TraceEvent(TraceEventKind.SKIPPED, at, at, hold.token, None)
    return TraceEvent(TraceEventKind.ACKED_OR_SKIPPED, begin, at, hold.token, hold.client_id)


def _state(
    oldest_first: Sequence[Hold], progress: CurrentProgress, handled: bool | None, offset: int
) -> MessageState:
    if handled is not False:
        return MessageState.UNKNOWN if handled is None else MessageState.ACKED
    if progress.client_id is None:
        return MessageState.WAITING
    if not oldest_first:
        return MessageState.MAYBE_IN_FLIGHT
    if offset < oldest_first[-1].delivered_offset:
        return MessageState.IN_FLIGHT
    if offset < oldest_first[-1].delivered_offset_max:
        return MessageState.MAYBE_IN_FLIGHT
    return MessageState.WAITING


def _handled(
    offset: int, committed_offset: int, acked: Sequence[Range], *, complete: bool
) -> bool | None:
    if offset < committed_offset or contains(acked, offset):
        return True
    if not complete and acked and offset >= acked[-1][1]:
        return None
    return False
