"""View of the trace of one message: a time line for each group that reads its topic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from batonmq._core.message_trace import TraceEvent, TraceEventKind
from batonmq.admin.message_tracer import GroupTrace, MessageCopy, TraceReport

WORDS = {
    TraceEventKind.DELIVERED: "delivered",
    TraceEventKind.MAYBE_DELIVERED: "maybe delivered",
    TraceEventKind.KEPT: "kept by its owner",
    TraceEventKind.ACKED: "acknowledged",
    TraceEventKind.SKIPPED: "skipped by a reset",
    TraceEventKind.ACKED_OR_SKIPPED: "acknowledged, or skipped by a reset",
    TraceEventKind.BROUGHT_BACK: "brought back by a reset",
}
STATES = {
    "acked": ("good", "handled"),
    "in_flight": ("accent", "in flight"),
    "maybe_in_flight": ("accent", "maybe in flight"),
    "waiting": ("", "waiting"),
    "retry_or_done": ("good", "handled, or waits for its next attempt"),
    "dead": ("bad", "dead letter"),
    "filtered": ("", "filtered: does not pass the filter of the group"),
    "not_subscribed": ("", "the group does not subscribe to the topic"),
    "local": ("", "members keep their own progress"),
    "unknown": ("warn", "unknown"),
}
_COPIES = {"original": "stored", "retry": "sent back for a retry", "dead": "became a dead letter"}


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One step on the time line.

    Attributes:
        end_unix_ms: Latest time of the step, if only a range is known; else 0.
        open: Whether the step may have happened up to now.
        level: good, bad, accent or empty.
    """

    begin_unix_ms: int
    end_unix_ms: int
    open: bool
    what: str
    level: str
    text: str


@dataclass(frozen=True, slots=True)
class TraceLine:
    """The time line of one group."""

    group: str
    level: str
    state: str
    steps: tuple[TraceStep, ...]


def trace_lines(report: TraceReport) -> tuple[TraceLine, ...]:
    """Return a time line for each group."""
    return tuple(_line(group) for group in report.groups)


def _line(group: GroupTrace) -> TraceLine:
    level, words = STATES.get(group.state, ("", group.state))
    steps = [step for copy in group.copies for step in _steps(copy)]
    steps.sort(key=lambda step: step.begin_unix_ms)
    return TraceLine(group.group, level, words, tuple(steps))


def _steps(copy: MessageCopy) -> Iterable[TraceStep]:
    where = f"{copy.queue} offset {copy.offset}"
    failure = f"; {copy.reason} at {copy.client_id}: {copy.error}" if copy.reason else ""
    by = f"; by {copy.redriven_by}" if copy.kind == "redriven" and copy.redriven_by else ""
    what = _COPIES.get(copy.kind, f"{copy.kind} by an operator")
    level = "bad" if copy.kind == "dead" else ""
    yield TraceStep(copy.store_unix_ms, 0, False, what, level, f"{where}{failure}{by}")
    for event in copy.trace.events if copy.trace else ():
        yield _event(event)


def _event(event: TraceEvent) -> TraceStep:
    level = "good" if event.what in (TraceEventKind.ACKED,) else "accent"
    known = event.begin_unix_ms == event.end_unix_ms
    who = f"{event.client_id}, token {event.token}" if event.client_id else f"token {event.token}"
    return TraceStep(
        event.begin_unix_ms,
        0 if known else event.end_unix_ms,
        event.end_unix_ms == 0,
        WORDS[event.what],
        level,
        who,
    )
