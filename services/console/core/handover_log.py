"""The last events about owners of queues, by group, within a bound.

Events come from the event stream of the services, which may lose some: the log is for people, and
nothing is decided by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from batonmq._core.queues import QueueRef

EVENTS_MAX = 5_000
MANNERS = {
    "GRACEFUL": "graceful: every delivered message was acknowledged",
    "UNFINISHED": "unfinished: released with messages that are not acknowledged",
    "LEASE_EXPIRED": "the lease of the previous owner expired",
    "DRAIN_TIMED_OUT": "the previous owner did not drain in time",
    "FORCED": "an operator released the queue",
}


@dataclass(frozen=True, slots=True)
class QueueEvent:
    """One event of a queue of a group.

    Attributes:
        kind: drain: a hand-over with its phases; fenced: a call of a former owner was rejected;
            duplicate: messages were delivered again; forced, reset: an operator did it.
        text: The event as a sentence with its values.
    """

    unix_ms: int
    group: str
    queue: QueueRef
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Phases:
    """The phases of a hand-over, in milliseconds."""

    contend_ms: int
    drain_ms: int
    fence_ms: int
    persist_ms: int

    @property
    def total_ms(self) -> int:
        """Time from the first request of the new owner until it owns the queue."""
        return self.contend_ms + self.drain_ms + self.fence_ms + self.persist_ms


class HandoverLog:
    """Keeps the newest events; the oldest ones leave."""

    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        self._events: deque[QueueEvent] = deque(maxlen=events_max)

    def add(self, events: Iterable[QueueEvent]) -> None:
        """Add events."""
        self._events.extend(events)

    def of(self, group: str) -> list[QueueEvent]:
        """Return the events of a group, oldest first."""
        return sorted(
            (event for event in self._events if event.group == group), key=lambda e: e.unix_ms
        )


def handed_over_text(before: str, after: str, manner: str, phases: Phases) -> str:
    """Return a hand-over with its phases as a sentence."""
    reason = MANNERS.get(manner, manner.lower())
    return (
        f"{before or 'no owner'} → {after}, {reason}; {phases.total_ms} ms: contend "
        f"{phases.contend_ms}, drain {phases.drain_ms}, fence {phases.fence_ms}, persist "
        f"{phases.persist_ms}"
    )


def duplicate_text(client_id: str, redelivered: int) -> str:
    """Return a redelivery as a sentence."""
    noun = "message" if redelivered == 1 else "messages"
    return (
        f"{redelivered} {noun} delivered again to {client_id}, flagged: an earlier owner may have "
        "started them and did not acknowledge them"
    )
