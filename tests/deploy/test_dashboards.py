"""Grafana's dashboards.

Goal: the committed JSON is that of the generator; the series and labels of each query exist; the
command of each panel exists.
Method: the JSON is compared; the queries are parsed, and their names compared with the metrics that
services register and with the series that rules record. Each check also finds a planted error.
tests/deploy/test_live_metrics.py sends the queries to a real Prometheus.
"""

from __future__ import annotations

import json
import re

import promql_parser as promql
import pytest

from tests.docs.test_docs import page_of, wrong_commands
from tools.dashboards.generate import DASHBOARDS, FOLDER, files
from tools.dashboards.panels import Dashboard, Panel
from tools.dashboards.promql import METRICS, filled_in, matchers, result_labels, selectors

_each = pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)


def problems(panel: Panel) -> list[str]:
    """Return the metrics and labels of a panel that do not exist."""
    messages = []
    for legend, query in panel.queries.items():
        filled = filled_in(query)
        for selector in selectors(filled):
            known = METRICS.get(str(selector.name))
            if known is None:
                messages.append(f"no metric {selector.name}")
                continue
            used_labels = {name for name, _ in matchers(selector)}
            messages += [f"{selector.name} has no {name}" for name in used_labels - known]
        named = set(re.findall(r"\{\{(\w+)\}\}", legend))
        if not messages:
            messages += [f"no label {name}" for name in named - result_labels(promql.parse(filled))]
    return messages


def used_variables(board: Dashboard) -> set[str]:
    """Return the variables in the queries of a dashboard."""
    queries = " ".join(query for panel in board.panels for query in panel.queries.values())
    return set(re.findall(r'"\$(\w+)"', queries))


def test_committed_dashboards_are_up_to_date() -> None:
    committed = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert committed == files(), "run: python -m tools.dashboards.generate"


@_each
def test_panels_query_existing_metrics_only(board: Dashboard) -> None:
    assert {panel.title: messages for panel in board.panels if (messages := problems(panel))} == {}


@_each
def test_each_panel_names_an_existing_command(board: Dashboard) -> None:
    dashboard = json.loads(files()[f"{board.uid}.json"])
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) == len(board.panels)
    for panel in panels:
        command = panel["description"].rpartition("At a terminal: ")[2]
        assert command.startswith("`baton ")
        assert wrong_commands(page_of(command)) == []


@_each
def test_dashboard_has_exactly_the_variables_it_uses(board: Dashboard) -> None:
    dashboard = json.loads(files()[f"{board.uid}.json"])
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names == ["datasource", *board.variables]
    assert used_variables(board) == set(board.variables)
    sources = {panel["datasource"]["uid"] for panel in dashboard["panels"] if "datasource" in panel}
    assert sources == {"${datasource}"}


def test_all_four_variables_exist() -> None:
    assert {name for board in DASHBOARDS for name in board.variables} == {
        "cluster",
        "topic",
        "group",
    }


def test_panel_titles_are_unique_on_a_dashboard() -> None:
    for board in DASHBOARDS:
        titles = [panel.title for panel in board.panels]
        assert len(set(titles)) == len(titles)


@pytest.mark.parametrize(
    ("legend", "query", "problem"),
    [
        ("x", "sum(baton_storage_fsyncs)", "no metric baton_storage_fsyncs"),
        ("x", 'baton_queue_stuck{color="red"}', "baton_queue_stuck has no color"),
        ("{{topic}}", "sum by (group) (baton_queue_stuck)", "no label topic"),
    ],
)
def test_a_planted_error_is_noticed(legend: str, query: str, problem: str) -> None:
    assert problems(Panel("planted", "baton top", {legend: query})) == [problem]
