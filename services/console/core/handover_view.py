"""View of the hand-overs of a group: one time line per queue, with owners as bars.

The bars are the recorded tokens of a queue at offsets, so they exist for the time before the
console was started too. The marks are events of the services, which the console has watched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batonmq._core.message_trace import Hold
from batonmq._core.queues import QueueRef
from batonmq_server.console.core.handover_log import QueueEvent

WIDTH = 1_000
"""Width of a time line in the drawing, for the whole time range."""
_BAR_MIN = 3.0
_COLOURS = 8
_ENDS = {
    "": "current",
    "passed": "handed over: every message in flight was acknowledged",
    "renewed": "acquired again by the same member",
    "timed_out": "lease expired: messages in flight are delivered again, flagged",
    "forced": "released by an operator",
    "reset": "progress was reset",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """The time of one token: `x` and `width` in units of the drawing.

    Attributes:
        colour: Number of the owner's colour, from 0; -1 for no owner.
        delivered: Messages that are known to be delivered under the token.
        unfinished: Messages delivered under it that the next token had to deliver again.
    """

    x: float
    width: float
    colour: int
    client_id: str
    token: int
    begin_unix_ms: int
    end_unix_ms: int
    end: str
    ending: str
    delivered: int
    unfinished: int


@dataclass(frozen=True, slots=True)
class Mark:
    """An event on the time line; `kind` is drain, fenced, duplicate, forced or reset."""

    x: float
    kind: str
    text: str
    unix_ms: int


@dataclass(frozen=True, slots=True)
class QueueLine:
    """The time line of one queue."""

    queue: QueueRef
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    hand_over_count: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A time on the axis."""

    x: float
    unix_ms: int


@dataclass(frozen=True, slots=True)
class HandoverView:
    """What the page of hand-overs shows.

    Attributes:
        owners: Name and colour number of each owner that has a bar.
        events: The events of the group in the range, newest first.
    """

    lines: tuple[QueueLine, ...]
    ticks: tuple[Tick, ...]
    owners: tuple[tuple[str, int], ...]
    events: tuple[QueueEvent, ...]
    begin_unix_ms: int
    end_unix_ms: int


def handover_view(
    holds: Mapping[QueueRef, Sequence[Hold]],
    events: Sequence[QueueEvent],
    *,
    now_unix_ms: int,
    range_ms: int,
) -> HandoverView:
    """Return the time lines of the last `range_ms`.

    Args:
        holds: Recorded tokens of each queue, newest first.
        events: Events of the group, oldest first.
    """
    begin = now_unix_ms - range_ms
    names = sorted({h.client_id for each in holds.values() for h in each if h.client_id})
    colours = {name: number % _COLOURS for number, name in enumerate(names)}
    scale = WIDTH / range_ms
    shown = [event for event in events if event.unix_ms >= begin]
    lines = tuple(
        _line(queue, recorded, [e for e in shown if e.queue == queue], (begin, scale), colours)
        for queue, recorded in holds.items()
    )
    drawn = {bar.client_id for line in lines for bar in line.bars if bar.client_id}
    return HandoverView(
        lines=lines,
        ticks=tuple(Tick(WIDTH * part / 5, begin + range_ms * part // 5) for part in range(6)),
        owners=tuple((name, colours[name]) for name in names if name in drawn),
        events=tuple(reversed(shown)),
        begin_unix_ms=begin,
        end_unix_ms=now_unix_ms,
    )


def _line(
    queue: QueueRef,
    recorded: Sequence[Hold],
    events: Sequence[QueueEvent],
    axis: tuple[int, float],
    colours: Mapping[str, int],
) -> QueueLine:
    begin, scale = axis
    bars, passed = list[Bar](), 0
    newer: Hold | None = None
    for hold in recorded:
        left = max(0.0, (hold.begin_unix_ms - begin) * scale)
        right = (hold.end_unix_ms - begin) * scale if hold.end_unix_ms else float(WIDTH)
        if right >= 0:
            bars.append(_bar(hold, newer, left, max(_BAR_MIN, right - left), colours))
            changed = newer is not None and newer.client_id != hold.client_id
            passed += changed and hold.client_id is not None
        newer = hold
    marks = [Mark((e.unix_ms - begin) * scale, e.kind, e.text, e.unix_ms) for e in events]
    return QueueLine(queue, tuple(reversed(bars)), tuple(marks), passed)


def _bar(hold: Hold, newer: Hold | None, x: float, width: float, colours: Mapping[str, int]) -> Bar:
    delivered = max(0, hold.delivered_offset - hold.committed_offset)
    unfinished = 0
    if newer is not None and hold.end in ("passed", "timed_out", "forced"):
        acked = sum(
            min(end, hold.delivered_offset) - first
            for first, end in newer.acked
            if first < hold.delivered_offset
        )
        unfinished = max(0, hold.delivered_offset - newer.committed_offset - acked)
    return Bar(
        x=round(x, 1),
        width=round(min(width, WIDTH - x + _BAR_MIN), 1),
        colour=colours[hold.client_id] if hold.client_id else -1,
        client_id=hold.client_id or "",
        token=hold.token,
        begin_unix_ms=hold.begin_unix_ms,
        end_unix_ms=hold.end_unix_ms,
        end=hold.end,
        ending=_ENDS.get(hold.end, hold.end),
        delivered=delivered,
        unfinished=unfinished,
    )
