"""Pictures of dashboards for the docs: the same queries, drawn without Grafana.

python -m tools.dashboards.render     docs/images/dashboard-*.png, in three minutes

A real Prometheus scrapes a cluster while the demo runs (tools/dashboards/demo_cluster.py). This
program draws its answers.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from batonmq._common.clock import Clock
from batonmq_server.demo.flights import load_flights
from batonmq_server.local.prometheus import Prometheus
from tools.dashboards.demo_cluster import demo_cluster
from tools.dashboards.internals import LOCKS, STORAGE
from tools.dashboards.messages import CLUSTER
from tools.dashboards.panels import Dashboard, Panel
from tools.dashboards.promql import filled_in
from tools.docs.pages import ROOT

FOLDER = ROOT / "docs" / "images"
SPAN_S, STEP_S = 120, 5
FLIGHTS, PACE = 60_000, 330
"""With these the demo takes about two minutes."""
_COLUMNS = 3
_UNITS = {"short": "", "cps": "/s", "Bps": "bytes/s", "percentunit": "of 1"}
Series = tuple[str, list[float], list[float]]


def main() -> None:
    """Run the demo and draw its dashboards."""
    mpl.use("Agg")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_render(Path(folder)))


async def _render(folder: Path) -> None:
    async with (
        demo_cluster(folder / "data") as at,
        Prometheus(folder / "prometheus", at.targets, port=0) as prometheus,
    ):
        print(await at.demo(load_flights()[:FLIGHTS], folder / "journals", PACE))
        for board in (CLUSTER, LOCKS, STORAGE):
            await asyncio.to_thread(_draw, board, prometheus.address)


def _draw(board: Dashboard, address: str) -> None:
    rows = -(-len(board.panels) // _COLUMNS)
    figure, axes = plt.subplots(rows, _COLUMNS, figsize=(16, 2.9 * rows), squeeze=False)
    for axis, panel in zip(axes.flat, board.panels, strict=False):
        _draw_panel(axis, panel, list(_series(panel, address)))
    for axis in axes.flat[len(board.panels) :]:
        axis.set_visible(False)
    figure.suptitle(f"{board.title} · the last {SPAN_S} s", fontsize=14, x=0.01, ha="left")
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    figure.savefig(FOLDER / f"dashboard-{board.uid.removeprefix('baton-')}.png", dpi=70)
    plt.close(figure)


def _draw_panel(axis: Axes, panel: Panel, found: list[Series]) -> None:
    for legend, times, values in found:
        axis.plot(times, values, label=legend or "0", linewidth=1.4)
    unit = _UNITS.get(panel.unit, panel.unit)
    axis.set_title(panel.title + (f" [{unit}]" if unit else ""), fontsize=10, loc="left")
    top = max((value for _, _, values in found for value in values if isfinite(value)), default=0)
    axis.set_ylim(0, 1.4 * top or 1)
    axis.set_xlim(-SPAN_S, 0)
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=7, loc="upper left", ncols=2 if len(found) > 4 else 1)


def _series(panel: Panel, address: str) -> Iterator[Series]:
    """Yield the legend, the times relative to now, and the values of each series."""
    end_s = Clock().unix_ms() / 1000
    for legend, query in panel.queries.items():
        parameters = {
            "query": filled_in(query).replace("[1m]", "[30s]"),
            "start": f"{end_s - SPAN_S:.3f}",
            "end": f"{end_s:.3f}",
            "step": str(STEP_S),
        }
        url = f"http://{address}/api/v1/query_range?{urllib.parse.urlencode(parameters)}"
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(url, timeout=30) as answer:
            found: list[dict[str, Any]] = json.loads(answer.read())["data"]["result"]
        for one in found:
            label = _filled(legend, one["metric"])
            times = [float(time) - end_s for time, _ in one["values"]]
            yield label, times, [float(value) for _, value in one["values"]]


def _filled(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), legend).strip()


if __name__ == "__main__":
    main()
