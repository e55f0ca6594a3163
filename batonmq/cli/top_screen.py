"""The screen of `baton top`: a snapshot of the cluster as lines that fit the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from batonmq._core.top_board import Snapshot
from batonmq.cli.output import printable, wall_time
from batonmq.cli.text_table import column_widths, fit_widths, format_rows, truncate

_LINES_BESIDE_ROWS = 13
"""Lines of headings, empty lines, counts of rows that are left out, and the last line."""
_BOLD, _DIM, _RED, _NORMAL = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the screen.

    Attributes:
        text_columns: Number of leading columns that are text; the others are numbers.
        widest: Index of the column that takes the rest of the line.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1
    widest: int = 0

    def lines(self, rows_max: int, width: int, *, styled: bool) -> list[str]:
        """Return the heading and the first rows; the number of the others if there are more."""
        rows = [[printable(cell) for cell in row] for row in self.rows[:rows_max]]
        widths = column_widths(rows, [len(heading) for heading in self.headings])
        widths = fit_widths(widths, self.widest, width)
        rows = [
            [truncate(cell, size) for cell, size in zip(row, widths, strict=True)]
            for row in [list(self.headings), *rows]
        ]
        right = range(self.text_columns, len(self.headings))
        heading, *lines = [truncate(line, width) for line in format_rows(rows, widths, right)]
        if len(self.rows) > rows_max:
            lines.append(_style(f"... {len(self.rows) - rows_max} more", _DIM, styled))
        return [_style(heading, _BOLD, styled), *lines]


def screen_lines(
    snapshot: Snapshot, nodes: int, width: int, height: int, *, styled: bool = False
) -> list[str]:
    """Return the lines of the screen: topics, groups, owners, recent events, and a last line.

    The busiest rows of each table come first; those without room are counted.

    Args:
        nodes: Number of nodes that send events.
        styled: Whether to use bold and color.
    """
    tables = (_topics(snapshot), _groups(snapshot), _owners(snapshot), _recent(snapshot))
    room = max(0, height - _LINES_BESIDE_ROWS)
    shares = _share_lines(room, [len(table.rows) for table in tables])
    lines: list[str] = []
    for table, rows_max in zip(tables, shares, strict=True):
        lines += [*table.lines(rows_max, width, styled=styled), ""]
    dropped = sum(snapshot.sources.values())
    last = truncate(
        f"{nodes} nodes, events from {len(snapshot.sources)}, {dropped} events dropped; "
        "counts are of the last minute; q quits",
        width,
    )
    return [*lines, _style(last, _RED if dropped else _DIM, styled)]


def snapshot_item(snapshot: Snapshot, nodes: int) -> dict[str, Any]:
    """Return the snapshot for JSON."""
    return {
        "topics": [asdict(row) for row in snapshot.topics],
        "groups": [asdict(row) for row in snapshot.groups],
        "owners": [asdict(row) for row in snapshot.owners],
        "recent": [one._asdict() for one in snapshot.recent],
        "sources": snapshot.sources,
        "nodes": nodes,
    }


def _topics(snapshot: Snapshot) -> _Table:
    topics = sorted(snapshot.topics, key=lambda row: -(row.in_messages + row.out_messages))
    return _Table(
        ("TOPIC", "IN/S", "KIB/S", "OUT/S"),
        [
            (r.topic, _rate(r.in_messages), _rate(r.in_bytes / 1024), _rate(r.out_messages))
            for r in topics
        ],
    )


def _groups(snapshot: Snapshot) -> _Table:
    groups = sorted(snapshot.groups, key=lambda row: (-row.lag, -row.out_messages))
    return _Table(
        ("GROUP", "MEMBERS", "OUT/S", "LAG", "REDELIVERED", "HAND-OVERS", "DENIED", "CONFLICTS"),
        [
            (
                r.group,
                str(r.members),
                _rate(r.out_messages),
                _count(r.lag),
                str(r.redelivered),
                str(r.hand_overs),
                str(r.denials),
                str(r.conflicts),
            )
            for r in groups
        ],
    )


def _owners(snapshot: Snapshot) -> _Table:
    owners = sorted(snapshot.owners, key=lambda row: (-row.lag, row.group, row.client_id))
    return _Table(
        ("OWNER", "GROUP", "QUEUES", "LAG"),
        [(r.client_id, r.group, str(r.queues), _count(r.lag)) for r in owners],
        text_columns=2,
    )


def _recent(snapshot: Snapshot) -> _Table:
    return _Table(
        ("TIME", "GROUP", "WHAT"),
        [(wall_time(one.unix_ms), one.group, one.text) for one in snapshot.recent],
        text_columns=3,
        widest=2,
    )


def _share_lines(room: int, counts: Sequence[int]) -> list[int]:
    """Return how many rows each table shows: all if there is room, else an even share."""
    shares = [0] * len(counts)
    for _ in range(room):
        unfinished = [i for i, count in enumerate(counts) if shares[i] < count]
        if not unfinished:
            break
        shares[min(unfinished, key=lambda i: (shares[i], i))] += 1
    return shares


def _style(text: str, style: str, styled: bool) -> str:
    return f"{style}{text}{_NORMAL}" if styled else text


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:.1f}"


def _count(value: int) -> str:
    return f"{value:,}" if value >= 0 else "?"
