"""Grafana's dashboards as JSON, in deploy/grafana/.

python -m tools.dashboards.generate     writes them again
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

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

from tools.dashboards.gateway import GATEWAY
from tools.dashboards.internals import LOCKS, SPARK, STORAGE
from tools.dashboards.messages import CLUSTER, GROUP, TOPIC
from tools.dashboards.panels import IN_CLUSTER, Dashboard, Panel
from tools.dashboards.readings import READINGS, Reading
from tools.docs.pages import ROOT

DASHBOARDS = (CLUSTER, TOPIC, GROUP, LOCKS, STORAGE, GATEWAY, SPARK)
FOLDER = ROOT / "deploy" / "grafana"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_COLUMNS, _PANEL_WIDTH, _PANEL_HEIGHT = 24, 8, 8
_VALUES = {
    "cluster": 'label_values(up{node_type!=""}, cluster)',
    "topic": 'label_values(rocketmq_messages_in_total{cluster=~"$cluster"}, topic)',
    "group": 'label_values(baton_group_members{cluster=~"$cluster"}, group)',
}
ANNOTATIONS = {
    "Failovers": (
        f"sum by (node_id) (changes(baton_storage_leader{{{IN_CLUSTER}}}[1m])) > 0 or "
        f"sum by (node_id) (changes(baton_offsets_epoch{{{IN_CLUSTER}}}[1m])) > 0 or "
        f"sum by (node_id) (changes(baton_lockmgr_term{{{IN_CLUSTER}}}[1m])) > 0",
        "red",
        "{{node_id}}",
    ),
    "Hand-overs": (
        "sum by (cluster) "
        f"(increase(baton_lockmgr_handover_seconds_count{{{IN_CLUSTER}}}[1m])) > 0",
        "blue",
        "{{cluster}}",
    ),
}
"""Query, color and text of the marks on every time axis, by name."""
_DRILL_DOWN = {
    "topic": ("baton-topic", "topic"),
    "group": ("baton-group", "group"),
    "consumer_group": ("baton-group", "group"),
}
"""The dashboard, and its variable, that shows more of a series with a label."""


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
            built = built.with_panel(_panel(panel, READINGS[board.uid][panel.title]))
    text = JSONEncoder(sort_keys=True, indent=2).encode(built.build())
    made = _numbered(json.loads(text))
    made["links"] = [_LINKS]
    made["annotations"] = {"list": list(_annotations())}
    _add_limits_and_links(board, made)
    return json.dumps(made, indent=2, sort_keys=True) + "\n"


_LINKS = {
    "asDropdown": True,
    "includeVars": True,
    "keepTime": True,
    "tags": ["batonmq"],
    "targetBlank": False,
    "title": "BatonMQ",
    "type": "dashboards",
}
"""A menu of all dashboards, which keeps the time span and the variables."""


def _annotations() -> Iterator[dict[str, object]]:
    for name, (query, color, text) in ANNOTATIONS.items():
        yield {
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "enable": True,
            "expr": query,
            "iconColor": color,
            "name": name,
            "step": "30s",
            "textFormat": text,
            "titleFormat": name,
        }


def _add_limits_and_links(board: Dashboard, made: dict[str, Any]) -> None:
    """Add the limit of its alert to each panel, and links from series to other dashboards."""
    panels = [panel for panel in made["panels"] if panel["type"] != "row"]
    for spec, panel in zip(board.panels, panels, strict=True):
        defaults = panel["fieldConfig"]["defaults"]
        reading = READINGS[board.uid][spec.title]
        if reading.limit is not None:
            low, high = ("red", "green") if reading.below else ("green", "red")
            steps = [{"color": low, "value": None}, {"color": high, "value": reading.limit}]
            defaults["thresholds"] = {"mode": "absolute", "steps": steps}
            if not spec.single:
                defaults.setdefault("custom", {})["thresholdsStyle"] = {"mode": "dashed"}
        links = list(_drill_down(board, spec))
        if links:
            defaults["links"] = links


def _drill_down(board: Dashboard, spec: Panel) -> Iterator[dict[str, object]]:
    labels = set(re.findall(r"\{\{(\w+)\}\}", " ".join(spec.queries)))
    for label in sorted(labels & _DRILL_DOWN.keys()):
        uid, variable = _DRILL_DOWN[label]
        if uid != board.uid:
            value = f"${{__field.labels.{label}}}"
            url = f"/d/{uid}?var-cluster=$cluster&var-{variable}={value}&${{__url_time_range}}"
            yield {"title": f"{variable.capitalize()} {value}", "url": url}


def _variables(board: Dashboard) -> Iterator[dashboards.QueryVariable]:
    for name in board.variables:
        variable = dashboards.QueryVariable(name).label(name.capitalize()).query(_VALUES[name])
        variable = variable.datasource(_SOURCE).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        everything = VariableOption(selected=True, text="All", value="$__all")
        yield variable.multi(True).include_all(True).all_value(".*").current(everything)


def _panel(spec: Panel, reading: Reading) -> stat.Panel | timeseries.Panel:
    panel = (
        stat.Panel()
        if spec.single
        else timeseries.Panel().fill_opacity(8).show_points(VisibilityMode.NEVER)
    )
    about = " ".join(filter(None, (spec.meaning, reading.text)))
    alert = f" Alert: {reading.alert}." if reading.alert else ""
    about = f"{about}{alert}\n\nAt a terminal: `{spec.command}`"
    panel = panel.title(spec.title).description(about)
    panel = panel.datasource(_SOURCE).unit(spec.unit).min(0)
    panel = panel.span(_PANEL_WIDTH).height(_PANEL_HEIGHT // 2 if spec.single else _PANEL_HEIGHT)
    for number, (legend, query) in enumerate(spec.queries.items()):
        target = prometheus.Dataquery().expr(query).legend_format(legend)
        panel = panel.with_target(target.ref_id(chr(ord("A") + number)).datasource(_SOURCE))
    return panel


def _numbered(built: dict[str, Any]) -> dict[str, Any]:
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
