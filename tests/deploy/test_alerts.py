"""Alert rules for Prometheus.

Goal: every rule asks for series, labels and reasons that the services really have, and tells a
person what it is about. Method: read the rules, parse the expressions, compare with the metrics
that the services register; `promtool` runs the rules' own tests where it is installed. Each way of
reading is shown to find a planted error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from batonmq.common.rpc import ERROR_OF
from services.nameserver.core.diagnosis import Reason
from tests.docs import tables

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
_each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])


def registered() -> dict[str, set[str]]:
    """Label names by metric, of all services, as the lists in docs/operations.md show them."""
    rows = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for name, text in tables.lists().items()
        if name.startswith("metrics ")
        for line in text.splitlines()[2:]
    )
    return {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[2])) for row in rows}


METRICS = registered()


def selectors(expression: str) -> list[promql.VectorSelector]:
    """Every series that the expression asks for."""
    found: list[promql.VectorSelector] = []

    def visit(node: promql.Expr) -> bool:
        if isinstance(node, promql.VectorSelector):
            found.append(node)
        return True

    promql.walk(promql.parse(expression), visit)
    return found


def matchers(selector: promql.VectorSelector) -> Iterator[tuple[str, list[str]]]:
    """Label names of a selector, with the values it asks for."""
    for matcher in selector.matchers.matchers:
        yield matcher.name, matcher.value.split("|")


def result_labels(node: promql.Expr) -> set[str]:
    """Labels of what an expression yields."""
    if isinstance(node, promql.BinaryExpr):
        return result_labels(node.lhs)
    if isinstance(node, promql.AggregateExpr):
        return set(node.modifier.labels) if node.modifier else set()
    return set().union(*(METRICS[str(s.name)] for s in selectors(str(node))))


def problems(rule: dict[str, Any]) -> list[str]:
    """What a rule asks for or tells and nobody has."""
    found = []
    for selector in selectors(rule["expr"]):
        if selector.name not in METRICS:
            found.append(f"no metric {selector.name}")
            continue
        for label, values in matchers(selector):
            known = set(Reason) if selector.name == "baton_queue_stuck" else set(ERROR_OF)
            if label not in METRICS[selector.name]:
                found.append(f"{selector.name} has no label {label}")
            elif label == "reason":
                found += [f"no reason {value}" for value in values if value not in known]
    shown = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
    if not found:
        found += [f"no label {s}" for s in shown - result_labels(promql.parse(rule["expr"]))]
    return found


@_each_rule
def test_a_rule_asks_only_for_what_the_services_have(rule: dict[str, Any]) -> None:
    assert problems(rule) == []


@_each_rule
def test_a_rule_tells_how_bad_it_is_and_what(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert promql.parse_duration(rule.get("for", "1m")).total_seconds() > 0


def test_every_reason_for_which_a_queue_is_stuck_raises_an_alert() -> None:
    told = {
        value
        for rule in RULES
        for selector in selectors(rule["expr"])
        if selector.name == "baton_queue_stuck"
        for _, values in matchers(selector)
        for value in values
    }
    assert told == {reason for reason in Reason if reason.stuck}


def test_names_of_rules_are_unique() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("baton_queue_stucked > 0", "no metric baton_queue_stucked"),
        ('sum(baton_queue_stuck{color="red"})', "baton_queue_stuck has no label color"),
        ('sum by (group) (baton_queue_stuck{reason=~"HELD|TIRED"})', "no reason TIRED"),
        ("sum(rate(baton_storage_lost_messages_total[5m]))", "no label group"),
    ],
)
def test_a_planted_error_is_noticed(expression: str, problem: str) -> None:
    planted = {"expr": expression, "annotations": {"summary": "{{ $labels.group }}"}}
    assert problems(planted)[0] == problem


def test_an_expression_that_is_none_is_noticed() -> None:
    with pytest.raises(ValueError, match="unclosed"):
        selectors("sum by (group baton_queue_stuck > 0")


def test_promtool_accepts_the_rules_and_their_own_tests() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("NOT TESTED: promtool is not installed")
    for command in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(
            [promtool, *command], cwd=FOLDER, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
