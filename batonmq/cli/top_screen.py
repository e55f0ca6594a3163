"""A snapshot of the cluster as something rich can draw, as large as the terminal is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from batonmq._core.top_board import Snapshot
from batonmq.cli.output import printable, wall_time

_AROUND = 13
"""Lines for headings, empty lines, what is left out, and the foot."""

_GROUP_HEADINGS = (
    "GROUP", "MEMBERS", "OUT/S", "LAG", "REDELIVERED", "HAND-OVERS", "DENIED", "CONFLICTS",
)  # fmt: skip


class Frame:
    """One frame: topics, groups, owners, what happened last, and who was heard of."""

    def __init__(self, snapshot: Snapshot, nodes: int) -> None:
        self._snapshot, self._nodes = snapshot, nodes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The busiest of each first; what has no room is counted."""
        s, room = self._snapshot, max(0, (options.height or console.height) - _AROUND)
        topics = sorted(s.topics, key=lambda row: -(row.in_messages + row.out_messages))
        groups = sorted(s.groups, key=lambda row: (-row.lag, -row.out_messages))
        owners = sorted(s.owners, key=lambda row: (-row.lag, row.group, row.client_id))
        shares = _shares(room, [len(topics), len(groups), len(owners), len(s.recent)])
        yield _table(
            ("TOPIC", "IN/S", "KIB/S", "OUT/S"),
            [
                (r.topic, _rate(r.in_messages), _rate(r.in_bytes / 1024), _rate(r.out_messages))
                for r in topics
            ],
            shares[0],
        )
        yield ""
        yield _table(
            _GROUP_HEADINGS,
            [
                (
                    r.group,
                    str(r.members),
                    _rate(r.out_messages),
                    _known(r.lag),
                    str(r.redelivered),
                    str(r.hand_overs),
                    str(r.denials),
                    str(r.conflicts),
                )
                for r in groups
            ],
            shares[1],
        )
        yield ""
        yield _table(
            ("OWNER", "GROUP", "QUEUES", "LAG"),
            [(r.client_id, r.group, str(r.queues), _known(r.lag)) for r in owners],
            shares[2],
            text_columns=2,
        )
        yield ""
        yield _table(
            ("TIME", "GROUP", "WHAT"),
            [(wall_time(one.unix_ms), one.group, one.text) for one in s.recent],
            shares[3],
            text_columns=3,
            widest=2,
        )
        dropped = sum(s.sources.values())
        yield Text(
            f"\n{self._nodes} nodes, {len(s.sources)} heard of, {dropped} events dropped; "
            "counts are of the last minute; q ends",
            style="red" if dropped else "dim",
            no_wrap=True,
            overflow="ellipsis",
        )


def item_of(snapshot: Snapshot, nodes: int) -> dict[str, Any]:
    """The snapshot for a program."""
    return {
        "topics": [asdict(row) for row in snapshot.topics],
        "groups": [asdict(row) for row in snapshot.groups],
        "owners": [asdict(row) for row in snapshot.owners],
        "recent": [one._asdict() for one in snapshot.recent],
        "sources": snapshot.sources,
        "nodes": nodes,
    }


def _shares(room: int, counts: Sequence[int]) -> list[int]:
    """Lines for each table: as many as it has, while there is room; else by turns."""
    shares = [0] * len(counts)
    for _ in range(room):
        open_ = [i for i, count in enumerate(counts) if shares[i] < count]
        if not open_:
            break
        shares[min(open_, key=lambda i: (shares[i], i))] += 1
    return shares


def _table(
    headings: Sequence[str],
    rows: Sequence[Iterable[str]],
    rows_max: int,
    *,
    text_columns: int = 1,
    widest: int = 0,
) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    for index, heading in enumerate(headings):
        number = index >= text_columns
        table.add_column(
            heading,
            justify="right" if number else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if index == widest else None,
        )
    for row in rows[:rows_max]:
        table.add_row(*(Text(printable(cell), overflow="ellipsis") for cell in row))
    if len(rows) > rows_max:
        table.add_row(Text(f"... {len(rows) - rows_max} more", style="dim"))
    return table


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:.1f}"


def _known(value: int) -> str:
    return f"{value:,}" if value >= 0 else "?"
