"""Grafana's dashboards as JSON, in deploy/grafana/.

python -m tools.dashboards.generate     writes them again
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import VisibilityMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
)

from tools.dashboards.internals import LOCKS, SPARK, STORAGE
from tools.dashboards.messages import CLUSTER, GROUP, TOPIC
from tools.dashboards.panels import Dashboard, Panel
from tools.docs.pages import ROOT

DASHBOARDS = (CLUSTER, TOPIC, GROUP, LOCKS, STORAGE, SPARK)
FOLDER = ROOT / "deploy" / "grafana"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_COLUMNS, _PANEL_WIDTH, _PANEL_HEIGHT = 24, 8, 8
_VALUES = {
    "cluster": 'label_values(up{node_type!=""}, cluster)',
    "topic": 'label_values(rocketmq_messages_in_total{cluster=~"$cluster"}, topic)',
    "group": 'label_values(baton_group_members{cluster=~"$cluster"}, group)',
}


def files() -> dict[str, str]:
    """Return every dashboard as JSON, by the name of its file."""
    return {f"{each.uid}.json": _json(each) for each in DASHBOARDS}


def _json(board: Dashboard) -> str:
    built = dashboards.Dashboard(board.title).uid(board.uid).tags(["batonmq"]).refresh("10s")
    built = built.time("now-30m", "now").tooltip(DashboardCursorSync.CROSSHAIR)
    built = built.with_variable(
        dashboards.DatasourceVariable("datasource").label("Data source").type("prometheus")
    )
    for variable in _variables(board):
        built = built.with_variable(variable)
    for heading, panels in board.rows.items():
        built = built.with_row(dashboards.Row(heading))
        for panel in panels:
            built = built.with_panel(_panel(panel))
    text = JSONEncoder(sort_keys=True, indent=2).encode(built.build())
    return json.dumps(_numbered(json.loads(text)), indent=2, sort_keys=True) + "\n"


def _variables(board: Dashboard) -> Iterator[dashboards.QueryVariable]:
    for name in board.variables:
        variable = dashboards.QueryVariable(name).label(name.capitalize()).query(_VALUES[name])
        variable = variable.datasource(_SOURCE).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        everything = VariableOption(selected=True, text="All", value="$__all")
        yield variable.multi(True).include_all(True).all_value(".*").current(everything)


def _panel(spec: Panel) -> stat.Panel | timeseries.Panel:
    panel = (
        stat.Panel()
        if spec.single
        else timeseries.Panel().fill_opacity(8).show_points(VisibilityMode.NEVER)
    )
    meaning = f"{spec.meaning}\n\n" if spec.meaning else ""
    panel = panel.title(spec.title).description(f"{meaning}At a terminal: `{spec.command}`")
    panel = panel.datasource(_SOURCE).unit(spec.unit).min(0)
    panel = panel.span(_PANEL_WIDTH).height(_PANEL_HEIGHT // 2 if spec.single else _PANEL_HEIGHT)
    for number, (legend, query) in enumerate(spec.queries.items()):
        target = prometheus.Dataquery().expr(query).legend_format(legend)
        panel = panel.with_target(target.ref_id(chr(ord("A") + number)).datasource(_SOURCE))
    return panel


def _numbered(built: dict[str, object]) -> dict[str, object]:
    """Give every panel the id that Grafana requires; remove unset fields."""
    panels = built["panels"]
    assert isinstance(panels, list)
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
        panel.pop("repeatDirection", None)
        if panel.get("options") is None:
            panel.pop("options", None)
    return built


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)
