"""Rules for Prometheus: alerts, and recorded series for alerts and dashboards.

Goal: the series, labels and reasons of every rule exist; each alert has a summary, a runbook and a
test of its own.
Method: the expressions are parsed and compared with the metrics that the services register, and the
rules with the runbooks; `promtool`, if it is installed, runs the rules' own tests. Each check also
finds a planted error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import promql_parser as promql
import pytest
import yaml

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.rpc import ERROR_OF
from batonmq_server.nameserver.core.diagnosis import StuckReason
from tools.dashboards.promql import METRICS, matchers, result_labels, rules, selectors
from tools.docs.pages import ROOT

FOLDER = ROOT / "deploy" / "prometheus"
RUNBOOKS = ROOT / "docs" / "how-to" / "runbooks"
RULES = [rule for rule in rules(FOLDER / "alerts.yaml") if "alert" in rule]
RECORDED = [
    rule for path in sorted(FOLDER.glob("*.yaml")) for rule in rules(path) if "record" in rule
]
_each_alert = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
_each_rule = pytest.mark.parametrize(
    "rule", [*RULES, *RECORDED], ids=lambda rule: rule.get("alert") or rule["record"]
)


def problems(rule: dict[str, Any]) -> list[str]:
    """Return the metrics, labels and reasons of a rule that do not exist."""
    messages = []
    for selector in selectors(rule["expr"]):
        if selector.name not in METRICS:
            messages.append(f"no metric {selector.name}")
            continue
        for label, values in matchers(selector):
            known = set(StuckReason) if selector.name == "baton_queue_stuck" else set(ERROR_OF)
            if label not in METRICS[selector.name]:
                messages.append(f"{selector.name} has no label {label}")
            elif label == "reason":
                messages += [f"no reason {value}" for value in values if value not in known]
    named = set(re.findall(r"\$labels\.(\w+)", str(rule.get("annotations"))))
    if not messages:
        messages += [f"no label {s}" for s in named - result_labels(promql.parse(rule["expr"]))]
    return messages


@_each_rule
def test_rule_queries_existing_metrics_only(rule: dict[str, Any]) -> None:
    assert problems(rule) == []


@_each_alert
def test_alert_has_a_severity_and_a_summary(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"runbook_url", "summary", "description"}
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert promql.parse_duration(rule.get("for", "1m")).total_seconds() > 0


def test_every_stuck_reason_raises_an_alert() -> None:
    reasons = {
        value
        for rule in RULES
        for selector in selectors(rule["expr"])
        if selector.name == "baton_queue_stuck"
        for _, values in matchers(selector)
        for value in values
    }
    assert reasons == {reason for reason in StuckReason if reason.stuck}


def test_every_kind_of_registered_process_raises_an_alert_when_it_is_down() -> None:
    kinds = {name.removeprefix("SERVICE_KIND_").lower() for name in pb.ServiceKind.keys()}  # noqa: SIM118
    (rule,) = (rule for rule in RULES if rule["alert"] == "BatonDown")
    (selector,) = selectors(rule["expr"])
    assert set(dict(matchers(selector))["node_type"]) == kinds - {"unspecified"}


def test_rule_names_are_unique() -> None:
    names = [rule.get("alert") or rule["record"] for rule in (*RULES, *RECORDED)]
    assert len(set(names)) == len(names)


@_each_alert
def test_alert_links_to_a_runbook_with_a_command(rule: dict[str, Any]) -> None:
    path = ROOT / rule["annotations"]["runbook_url"]
    assert path == RUNBOOKS / f"{rule['alert']}.md"
    text = path.read_text()
    assert text.startswith(f"# {rule['alert']}\n")
    assert f"**{rule['labels']['severity']}**" in text
    assert rule["annotations"]["summary"].partition("{{")[0].strip() in text
    for heading in ("## What it means", "## Look", "## Do"):
        assert text.count(f"{heading}\n") == 1
    assert "baton " in text.partition("## Look")[2].partition("## Do")[0]


@_each_alert
def test_runbook_gives_the_reason_that_execute_requires(rule: dict[str, Any]) -> None:
    text = (RUNBOOKS / f"{rule['alert']}.md").read_text()
    assert text.count("--execute") == text.count("--execute --reason ")


def test_every_runbook_has_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("Baton*.md")} == {rule["alert"] for rule in RULES}


def test_list_of_alerts_has_each_alert_with_its_severity() -> None:
    text = (ROOT / "docs" / "how-to" / "observability.md").read_text()
    listed = re.findall(r"^\| \[(\w+)\]\(runbooks/(\w+)\.md\) \| (\w+) \|", text, re.MULTILINE)
    assert listed == [(r["alert"], r["alert"], r["labels"]["severity"]) for r in RULES]


def test_every_alert_has_a_firing_and_a_silent_test() -> None:
    checks = [
        (check["alertname"], bool(check["exp_alerts"]))
        for test in yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
        for check in test["alert_rule_test"]
    ]
    names = {rule["alert"] for rule in RULES}
    assert {name for name, fires in checks if fires} == names
    assert {name for name, fires in checks if not fires} == names


def test_scrape_config_reads_every_rule_file() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"alerts_test.yaml"}
    assert set(config["rule_files"]) == files


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


def test_invalid_expression_is_found() -> None:
    with pytest.raises(ValueError, match="unclosed"):
        selectors("sum by (group baton_queue_stuck > 0")


@pytest.mark.timeout(240)  # 20 s, and more on a busy machine
def test_promtool_accepts_the_rules_and_their_tests() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("NOT TESTED: promtool is not installed (Debian: apt-get install prometheus)")
    files = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "alerts_test.yaml")
    for command in (
        ["check", "rules", *files],
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "alerts_test.yaml"],
    ):
        done = subprocess.run(
            [promtool, *command], cwd=FOLDER, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
