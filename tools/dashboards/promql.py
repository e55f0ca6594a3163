"""Reads rules and queries: the series and labels they use, and those that exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml

from tools.docs.metric_families import families
from tools.docs.pages import ROOT

FOLDER = ROOT / "deploy" / "prometheus"
TARGET = {"cluster", "node_type", "node_id", "instance", "job"}
"""Labels that every series gets when it is scraped."""
_SUFFIXES = ("_bucket", "_sum", "_count")


def rules(path: Path) -> list[dict[str, Any]]:
    """Return the rules of a file."""
    groups = yaml.safe_load(path.read_text()).get("groups", ())
    return [rule for group in groups for rule in group["rules"]]


def filled_in(query: str) -> str:
    """Return a query of a dashboard as Grafana sends it with all variables set to "All"."""
    for variable, value in (
        ("$__rate_interval", "1m"),
        ("$cluster", "baton"),
        ("$topic", ".*"),
        ("$group", ".*"),
    ):
        query = query.replace(variable, value)
    return query


def selectors(expression: str) -> list[promql.VectorSelector]:
    """Return every selector of series in the expression."""
    found: list[promql.VectorSelector] = []

    def visit(node: promql.Expr) -> bool:
        if isinstance(node, promql.VectorSelector):
            found.append(node)
        return True

    promql.walk(promql.parse(expression), visit)
    return found


def matchers(selector: promql.VectorSelector) -> Iterator[tuple[str, list[str]]]:
    """Yield the label names of a selector with the values it matches."""
    for matcher in selector.matchers.matchers:
        yield matcher.name, matcher.value.split("|")


def result_labels(node: promql.Expr) -> set[str]:
    """Return the labels of the result of an expression."""
    while isinstance(node, promql.ParenExpr | promql.MatrixSelector):
        node = node.expr if isinstance(node, promql.ParenExpr) else node.vector_selector
    match node:
        case promql.BinaryExpr():
            return result_labels(node.lhs) or result_labels(node.rhs)
        case promql.AggregateExpr():
            return set(node.modifier.labels) if node.modifier else set()
        case promql.Call():
            return _result_labels_of_call(node)
        case promql.VectorSelector():
            return METRICS[str(node.name)]
    return set()


def _result_labels_of_call(call: promql.Call) -> set[str]:
    found = set().union(*map(result_labels, call.args))
    if call.func.name == "histogram_quantile":
        return found - {"le"}
    if call.func.name == "label_replace":
        return found | {call.args[1].val}
    return found


def _registered() -> Iterator[tuple[str, set[str]]]:
    for found in families().values():
        for family in found:
            labels = TARGET | set(family.labels)
            if family.kind == "histogram":
                for suffix in _SUFFIXES:
                    yield family.name + suffix, labels | ({"le"} if suffix == "_bucket" else set())
            else:
                yield family.name, labels


KUBE_STATE = {
    "kube_statefulset_replicas": {"namespace", "statefulset"},
    "kube_statefulset_status_replicas_ready": {"namespace", "statefulset"},
    "kube_deployment_spec_replicas": {"namespace", "deployment"},
    "kube_deployment_status_replicas_ready": {"namespace", "deployment"},
}
"""Series of kube-state-metrics; its documentation calls all of them stable."""
METRICS: dict[str, set[str]] = {"up": TARGET, **KUBE_STATE, **dict(_registered())}
"""Label names by series: those that services register and those that rules record."""
for _path in sorted(FOLDER.glob("*.yaml")):
    for _rule in rules(_path):
        if "record" in _rule:
            METRICS[_rule["record"]] = result_labels(promql.parse(_rule["expr"]))
