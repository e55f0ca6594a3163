"""Input of the rule evaluators (signals) and their output (alert changes). Pure values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Signal:
    """One metric event, reduced to what the rule evaluators need.

    Attributes:
        reason: Name of the StuckReason, as in StuckChanged.
        text: Description in the event; may be empty.
        acked_beyond_count: As in QueueLag.
        oldest_unacked_ms: As in QueueLag; negative if unknown.
        silent_ms: As in MemberExpired.
        generation: Of a rebalance; else 0. A rebalance that moves many queues has several events.
    """

    kind: str
    unix_ms: int
    client_id: str = ""
    reason: str = ""
    text: str = ""
    committed_offset: int = 0
    delivered_offset: int = 0
    next_offset: int = 0
    acked_beyond_count: int = 0
    oldest_unacked_ms: int = -1
    silent_ms: int = 0
    generation: int = 0
    first_bucket: int = 0
    buckets: Sequence[int] = ()


class AlertState(StrEnum):
    """State of an alert."""

    FIRING = "FIRING"
    RESOLVED = "RESOLVED"


@dataclass(frozen=True, slots=True)
class AlertChange:
    """An alert starts to fire or is resolved.

    Attributes:
        detail: Distinguishes alerts of one rule and subject: verdict or client id; may be empty.
        since_unix_ms: Time it started to fire; with rule, subject and detail it is the identity.
        reason: Name of a StuckReason, or why the alert was resolved; may be empty.
    """

    state: AlertState
    detail: str
    since_unix_ms: int
    unix_ms: int
    summary: str
    reason: str = ""
    value: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class AlertText:
    """Summary, reason and values of an alert change."""

    summary: str
    reason: str = ""
    value: float = 0.0
    limit: float = 0.0


class FiringAlerts(BaseModel):
    """The firing alerts of one rule and subject: start time by detail."""

    since: dict[str, int] = {}

    def fire(self, detail: str, unix_ms: int, telling: AlertText) -> Iterator[AlertChange]:
        """Fire the alert unless it is firing already."""
        if detail not in self.since:
            self.since[detail] = unix_ms
            yield _change(AlertState.FIRING, detail, unix_ms, unix_ms, telling)

    def resolve(self, detail: str, unix_ms: int, telling: AlertText) -> Iterator[AlertChange]:
        """Resolve the alert if it is firing."""
        since = self.since.pop(detail, None)
        if since is not None:
            yield _change(AlertState.RESOLVED, detail, since, unix_ms, telling)

    def resolve_all(self, unix_ms: int, telling: AlertText) -> Iterator[AlertChange]:
        """Resolve every alert."""
        for detail in sorted(self.since):
            yield from self.resolve(detail, unix_ms, telling)


def _change(
    state: AlertState, detail: str, since_unix_ms: int, unix_ms: int, telling: AlertText
) -> AlertChange:
    return AlertChange(
        state,
        detail,
        since_unix_ms,
        unix_ms,
        telling.summary,
        telling.reason,
        telling.value,
        telling.limit,
    )
