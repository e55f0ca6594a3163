"""What the watches see and what they say. Pure values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Signal:
    """One event as the watches see it.

    Attributes:
        reason: As in StuckChanged.
        text: The event in words, where it has some.
        acked_beyond_count: As in QueueLag.
        oldest_unacked_ms: As in QueueLag; negative if not known.
        silent_ms: As in MemberExpired.
        generation: Of a rebalance, which comes in several events if many queues move; else 0.
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
    """What became of an alert."""

    FIRING = "FIRING"
    RESOLVED = "RESOLVED"


@dataclass(frozen=True, slots=True)
class AlertChange:
    """An alert began or ended.

    Attributes:
        detail: What tells alerts of one rule and subject apart: a verdict, a client; may be empty.
        since_unix_ms: When it began; with rule, subject and detail it names the alert for ever.
        reason: Name of a StuckReason, or why the alert ended; may be empty.
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
    """What a change says besides its name and its times."""

    summary: str
    reason: str = ""
    value: float = 0.0
    limit: float = 0.0


class FiringAlerts(BaseModel):
    """The alerts of one rule and subject that are firing: by detail, since when."""

    since: dict[str, int] = {}

    def fire(self, detail: str, unix_ms: int, telling: AlertText) -> Iterator[AlertChange]:
        """Begin the alert, unless it is firing."""
        if detail not in self.since:
            self.since[detail] = unix_ms
            yield _change(AlertState.FIRING, detail, unix_ms, unix_ms, telling)

    def resolve(self, detail: str, unix_ms: int, telling: AlertText) -> Iterator[AlertChange]:
        """End the alert, if it is firing."""
        since = self.since.pop(detail, None)
        if since is not None:
            yield _change(AlertState.RESOLVED, detail, since, unix_ms, telling)

    def resolve_all(self, unix_ms: int, telling: AlertText) -> Iterator[AlertChange]:
        """End every alert."""
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
