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
from tools.dashboards.promql import FOLDER as RULES
from tools.dashboards.promql import METRICS, filled_in, matchers, result_labels, rules, selectors
from tools.dashboards.readings import READINGS

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


def limits() -> dict[str, set[str]]:
    """Return the numbers that each alert compares with, by its name."""
    found = {rule["alert"]: rule["expr"] for rule in rules(RULES / "alerts.yaml")}
    return {name: set(re.findall(r"[<>]=? ([\d.]+)", expr)) for name, expr in found.items()}


NO_PANEL_LIMIT = {
    "BatonDeadLettersBurst": "it counts five minutes, the panel an hour",
    "BatonServiceGone": "it counts services",
    "BatonGroupsNotInspected": "it counts inspections, which no panel shows",
    "BatonOffsetsUnreachable": "it counts a minute, the panel is a rate",
    "BatonPublishStalls": "it has the limit of BatonPublishSlow",
    "BatonOidcKeysStale": "it counts the age of the issuer's keys, which no panel shows",
    "BatonCompactionOverdue": "it counts the time for which a queue is due, which no panel shows",
    "BatonCertificateExpires": "the panel has the limit of BatonCertificateExpiresSoon",
}
"""The alerts with a limit other than 0 that no panel draws, and why."""


@_each
def test_each_panel_has_a_unit_and_says_what_to_conclude(board: Dashboard) -> None:
    assert READINGS[board.uid].keys() == {panel.title for panel in board.panels}
    told = json.loads(files()[f"{board.uid}.json"])
    for panel in told["panels"]:
        if panel["type"] == "row":
            continue
        about, _, _ = panel["description"].partition("\n\nAt a terminal: ")
        assert len(about.split()) >= 3, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]


@_each
def test_limit_of_a_panel_is_that_of_its_alert(board: Dashboard) -> None:
    told = json.loads(files()[f"{board.uid}.json"])
    panels = {panel["title"]: panel for panel in told["panels"] if panel["type"] != "row"}
    for title, reading in READINGS[board.uid].items():
        assert (reading.limit is None) == (reading.alert == ""), title
        if reading.limit is None:
            continue
        of_alert = {float(number) for number in limits()[reading.alert]}
        # An alert on "more than 0" has its line at the smallest count that fires.
        known = reading.limit in of_alert or (reading.limit == 1 and of_alert <= {0.0})
        assert known, (title, reading.limit, of_alert)
        steps = panels[title]["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert steps[1]["value"] == reading.limit
        assert [step["color"] for step in steps] == (
            ["red", "green"] if reading.below else ["green", "red"]
        )


def test_each_limit_of_an_alert_is_on_a_panel() -> None:
    drawn = {one.alert for readings in READINGS.values() for one in readings.values()}
    wanted = {name for name, numbers in limits().items() if numbers - {"0"}}
    assert wanted - drawn == NO_PANEL_LIMIT.keys()


@_each
def test_series_of_topics_and_groups_link_to_their_dashboards(board: Dashboard) -> None:
    told = json.loads(files()[f"{board.uid}.json"])
    uids = {each.uid for each in DASHBOARDS}
    assert [link["tags"] for link in told["links"]] == [["batonmq"]]
    for panel in told["panels"]:
        for link in panel.get("fieldConfig", {}).get("defaults", {}).get("links", ()):
            assert link["url"].removeprefix("/d/").partition("?")[0] in uids - {board.uid}
    text = json.dumps(told)
    assert ("/d/baton-group?" in text) == (board.uid in ("baton-cluster", "baton-topic"))


@_each
def test_failovers_and_hand_overs_are_marked(board: Dashboard) -> None:
    told = json.loads(files()[f"{board.uid}.json"])
    marks = {one["name"]: one for one in told["annotations"]["list"]}
    assert marks.keys() == {"Failovers", "Hand-overs"}
    for name, mark in marks.items():
        assert problems(Panel(name, "baton top", {mark["textFormat"]: mark["expr"]})) == []


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
