"""The page of the hand-overs: one HTML file with its style and plots. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from batonspark import handover_plots as plots
from batonspark.handover_plots import MANNERS, OTHER, PHASES, manner_label

OUTLIERS_MAX = 50
_CSS = """
:root{--ink:#1d2733;--soft:#5b6875;--line:#e3e7eb;--back:#f5f7f9;--accent:#2a9d8f}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0}h2{font-size:18px;margin:0 0 4px}
p{margin:0 0 10px;color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0}
.tile,section{background:#fff;border:1px solid var(--line);border-radius:10px}
.tile{padding:12px 16px}.tile b{display:block;font-size:24px;font-weight:600;white-space:nowrap}
.tile span{color:var(--soft);font-size:13px}
section{padding:18px 20px;margin:0 0 18px;overflow-x:auto}
svg{max-width:100%;height:auto;display:block}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:600}
th.text,td.text{text-align:left}
i.dot{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:6px}
"""


class PlotSection(NamedTuple):
    """A plot with its title and description."""

    title: str
    text: str
    draw: Callable[[pd.DataFrame], Figure]

    def section(self, rows: pd.DataFrame) -> str:
        """Return the section as HTML."""
        return _section(self.title, self.text, plots.svg_of(self.draw, rows))


_OWNERS = PlotSection(
    "Owners of the queues",
    "Each line is a queue, each colour an owner; in a gap the queue has no owner. At most the "
    f"{plots.QUEUES_MAX} queues with the most hand-overs.",
    plots.timeline,
)
_TIMES = PlotSection(
    "Duration over time",
    "Time until the new owner holds the queue. Rings are outliers.",
    plots.scatter,
)
_PHASES = PlotSection(
    "Phases",
    f"The {plots.BARS_MAX} slowest hand-overs that are not outliers, followed by the first pull.",
    plots.phases,
)
_SHARES = PlotSection(
    "Distribution",
    "Share of hand-overs that took at most this long, by manner.",
    plots.shares,
)
_PERCENTILES_TEXT = "In milliseconds. The first pull may be up to one second shorter than shown."
_OUTLIERS_TEXT = (
    f"Above the upper quartile by three interquartile ranges; the {OUTLIERS_MAX} slowest."
)


def page(handovers: pd.DataFrame, owners: pd.DataFrame, summary: Mapping[str, Any]) -> str:
    """Return the whole HTML document.

    Args:
        handovers: As `handovers.handovers` makes them; may be empty.
        owners: As `handovers.owners` makes them.
        summary: `asked`, `count`, `outlier_count`, `manners`, `phases`.
    """
    rows = handovers.sort_values("time")
    about = ", ".join(f"{name} {value}" for name, value in summary["asked"].items())
    span = "no hand-over in this time"
    if len(rows):
        first, last = rows["time"].iloc[0], rows["time"].iloc[-1]
        span = f"{first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC"
    drawn = [(owners, _OWNERS), (rows, _TIMES), (rows, _PHASES), (rows, _SHARES)]
    parts = [
        f"<h1>Hand-overs</h1><p>{escape(f'{span} ({about})' if about else span)}</p>",
        _tiles(summary),
        *(plot.section(table) for table, plot in drawn if len(table)),
        _section("Percentiles", _PERCENTILES_TEXT, _percentiles(summary["phases"])),
        _section("Outliers", _OUTLIERS_TEXT, _outliers(rows)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>BatonMQ hand-overs</title><style>{_CSS}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _tiles(summary: Mapping[str, Any]) -> str:
    count, manners = summary["count"], summary["manners"]
    total = next(one for one in summary["phases"] if one["phase"] == "total")
    graceful = manners.get("GRACEFUL", 0)
    share = f"{100 * graceful / count:.1f} %" if count else "-"
    values = {
        "hand-overs": f"{count:,}",
        "graceful": share,
        "median": _ms(total["p50"]),
        "95 % within": _ms(total["p95"]),
        "99 % within": _ms(total["p99"]),
        "outliers": f"{summary['outlier_count']:,}",
    }
    tiles = "".join(
        f'<div class="tile"><b>{v}</b><span>{n}</span></div>' for n, v in values.items()
    )
    return f'<div class="tiles">{tiles}</div>'


def _section(title: str, text: str, content: str) -> str:
    body = content or "<p>None.</p>"
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{body}</section>"


def _percentiles(phases: Sequence[Mapping[str, Any]]) -> str:
    head = ("phase", "count", "p50", "p95", "p99", "max")
    body = [
        [
            escape(one["phase"].replace("_", " ")),
            f"{one['count']:,}",
            *(_number(one[name]) for name in head[2:]),
        ]
        for one in phases
    ]
    return _table(head, body, text=1)


def _outliers(rows: pd.DataFrame) -> str:
    found = rows[rows["outlier"].astype(bool)] if len(rows) else rows
    if not len(found):
        return ""
    names = [*PHASES, "total_ms"]
    texts = ("time", "group", "queue", "from", "to", "manner")
    head = (*texts, *(name.removesuffix("_ms").replace("_", " ") for name in names))
    body = []
    for one in found.nlargest(OUTLIERS_MAX, "total_ms").to_dict("records"):
        colour = MANNERS.get(str(one["manner"]), OTHER)
        body.append([
            f"{one['time']:%m-%d %H:%M:%S}",
            escape(str(one["consumer_group"])),
            escape(f"{one['topic']}/{one['broker']}/{one['queue_id']}"),
            escape(str(one["previous_client_id"] or "-")),
            escape(str(one["client_id"] or "-")),
            f'<i class="dot" style="background:{colour}"></i>{escape(manner_label(one["manner"]))}',
            *(_number(one[name]) for name in names),
        ])  # fmt: skip
    return _table(head, body, text=len(texts))


def _table(head: Sequence[str], body: Iterable[Sequence[str]], text: int) -> str:
    """Return a table of cells that are HTML; the first `text` columns are left-aligned."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="text"' if place < text else "" for place in range(len(cells))]
        marked = (f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
        return f"<tr>{''.join(marked)}</tr>"

    lines = "".join(line(cells, "td") for cells in body)
    return f"<table><thead>{line(head, 'th')}</thead><tbody>{lines}</tbody></table>"


def _number(value: Any) -> str:
    return "-" if value is None or pd.isna(value) else f"{value:,.0f}"


def _ms(value: Any) -> str:
    if value is None or pd.isna(value):
        return "-"
    return f"{value:,.0f} ms" if value < 10_000 else f"{value / 1000:,.1f} s"
