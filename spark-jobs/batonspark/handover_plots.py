"""Plots of hand-overs as SVG text. Pure: needs no display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.patches import Patch

QUEUE = ["consumer_group", "topic", "broker", "queue_id"]
PHASES = {
    "contend_ms": ("wait until the owner is notified", "#8da0cb"),
    "drain_ms": ("owner drains", "#fc8d62"),
    "fence_ms": ("fence the old token", "#66c2a5"),
    "persist_ms": ("persist in etcd", "#e78ac3"),
    "first_pull_ms": ("first pull", "#c9c9c9"),
}
MANNERS = {
    "GRACEFUL": "#2a9d8f",
    "UNFINISHED": "#e9a23b",
    "DRAIN_TIMED_OUT": "#e76f51",
    "LEASE_EXPIRED": "#c1121f",
    "FORCED": "#6a4c93",
}
OTHER = "#7a7a7a"
_OWNERS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#edc948", "#ff9da7", "#9c755f",
    "#e15759", "#86bcb6", "#d4a6c8", "#8cd17d",
)  # fmt: skip
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "svg.fonttype": "none",
    "svg.hashsalt": "baton",
}
QUEUES_MAX = 40
BARS_MAX = 30


def svg_of(draw: Callable[[pd.DataFrame], Figure], rows: pd.DataFrame) -> str:
    """Return the plot as an SVG element."""
    with rc_context(_STYLE):
        figure = draw(rows)
        figure.set_layout_engine("constrained")
        out = StringIO()
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})  # type: ignore[no-untyped-call]
    text = out.getvalue()
    return text[text.index("<svg") :]


def timeline(owners: pd.DataFrame) -> Figure:
    """Draw the owners of each queue over time; `owners` must not be empty."""
    names = owners[QUEUE].astype(str).agg("/".join, axis=1)
    often = names.value_counts().sort_index().sort_values(ascending=False, kind="stable")
    queues = sorted(often.index[:QUEUES_MAX], reverse=True)
    end = max(owners["begin"].max(), owners["end"].max())
    clients = sorted(owners["client_id"].fillna("").unique())
    colours = {client: _OWNERS[place % len(_OWNERS)] for place, client in enumerate(clients)}
    figure = Figure(figsize=(10.4, 1.4 + 0.26 * len(queues)))
    axes = figure.subplots()
    for place, name in enumerate(queues):
        spans = owners[names == name]
        begins = date2num(spans["begin"])  # type: ignore[no-untyped-call]
        widths = date2num(spans["end"].fillna(end)) - begins  # type: ignore[no-untyped-call]
        axes.broken_barh(
            list(zip(begins, widths, strict=True)),
            (place - 0.38, 0.76),
            facecolors=[colours[client] for client in spans["client_id"].fillna("")],
            edgecolor="white",
            linewidth=0.6,
        )
    axes.set_yticks(range(len(queues)), queues, fontsize=8)
    axes.set_ylim(-0.6, len(queues) - 0.4)
    axes.grid(axis="y", visible=False)
    _time_axis(axes)
    named = clients[: len(_OWNERS)]
    handles = [Patch(color=colours[client], label=client or "-") for client in named]
    _legend_below(axes, handles, len(queues))
    return figure


def manner_label(manner: object) -> str:
    """Return the label of a manner."""
    return str(manner or "unknown").replace("_", " ").lower()


def _legend_below(axes: Any, handles: Sequence[Patch], lines: int) -> None:
    place = (0.5, -0.12 - 0.6 / (1 + lines))
    axes.legend(
        handles=handles, ncols=4, fontsize=8, frameon=False, loc="upper center",
        bbox_to_anchor=place,
    )  # fmt: skip


def scatter(rows: pd.DataFrame) -> Figure:
    """Draw the duration of each hand-over over time."""
    figure = Figure(figsize=(10.4, 3.6))
    axes = figure.subplots()
    for manner, some in rows.groupby("manner", dropna=False):
        axes.scatter(
            some["time"], some["total_ms"].clip(lower=1), s=22, alpha=0.75, linewidths=0,
            color=MANNERS.get(str(manner), OTHER), label=manner_label(manner),
        )  # fmt: skip
    far = rows[rows["outlier"].astype(bool)]
    axes.scatter(
        far["time"],
        far["total_ms"].clip(lower=1),
        s=90,
        facecolors="none",
        edgecolors="#1d2733",
        linewidths=1,
    )
    axes.set_yscale("log")
    axes.set_ylabel("ms until the new owner holds the queue")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _time_axis(axes)
    axes.legend(fontsize=8, frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.14))
    return figure


def phases(rows: pd.DataFrame) -> Figure:
    """Draw the phases of the slowest hand-overs."""
    usual = rows[~rows["outlier"].astype(bool)]
    slowest = (usual if len(usual) else rows).nlargest(BARS_MAX, "total_ms").iloc[::-1]
    labels = [
        f"{one.topic}/{one.queue_id} {one.time:%H:%M:%S} {manner_label(one.manner)}"
        for one in slowest.itertuples()
    ]
    figure = Figure(figsize=(10.4, 1.3 + 0.22 * len(slowest)))
    axes = figure.subplots()
    left = pd.Series(0.0, index=slowest.index)
    for name, (label, colour) in PHASES.items():
        width = slowest[name].fillna(0).astype(float)
        hatch = "////" if name == "first_pull_ms" else None
        axes.barh(
            range(len(slowest)),
            width,
            left=left,
            color=colour,
            label=label,
            height=0.72,
            hatch=hatch,
            edgecolor="white",
            linewidth=0,
        )
        left = left + width
    axes.set_yticks(range(len(slowest)), labels, fontsize=8)
    axes.set_ylim(-0.6, len(slowest) - 0.4)
    axes.set_xlabel("ms")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", visible=False)
    axes.legend(fontsize=8, frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    return figure


def shares(rows: pd.DataFrame) -> Figure:
    """Draw the cumulative distribution of the durations by manner."""
    figure = Figure(figsize=(10.4, 3.2))
    axes = figure.subplots()
    for manner, some in rows.groupby("manner", dropna=False):
        axes.ecdf(
            some["total_ms"].clip(lower=1).astype(float),
            color=MANNERS.get(str(manner), OTHER),
            label=f"{manner_label(manner)} ({len(some):,})",
            linewidth=1.8,
        )
    axes.set_xscale("log")
    axes.set_xlabel("ms until the new owner holds the queue")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.legend(fontsize=8, frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def _time_axis(axes: Any) -> None:
    locator = AutoDateLocator(minticks=4, maxticks=9)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    axes.xaxis_date()
