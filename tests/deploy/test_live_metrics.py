"""Metrics and queries against a cluster that is at work.

Goal: docs/metrics.md lists what the processes answer, no more and no less; every query of the
dashboards has an answer, and no rule fails. Method: a cluster with replicas under load of every
kind; its pages of metrics are read, and then asked of a real Prometheus that scrapes them, where
there is one.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from batonmq.local.ports import keep_ports
from batonmq.local.prometheus import Prometheus
from tests.deploy.dashboards import DASHBOARDS
from tests.deploy.promql import filled_in
from tests.deploy.scene import GROUP, TOPIC, Loaded, loaded
from tests.docs.metric_families import SERVICES, families
from tests.docs.pages import ROOT
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

QUERIES = [
    (board.title, panel.title, query)
    for board in DASHBOARDS
    for panel in board.panels
    for query in panel.queries.values()
]
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def read(url: str) -> str:
    with _DIRECT.open(url, timeout=10) as response:
        return str(response.read().decode())


def exported(page: str) -> set[str]:
    """Names of the metrics on a page, without those that the client library adds."""
    names = re.findall(r"^# TYPE (\w+) \w+$", page, re.MULTILINE)
    return {name for name in names if not name.endswith("_created")}


def documented() -> dict[str, set[str]]:
    """Names of the metrics in docs/metrics.md, by who has them."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    return {
        block[1]: set(re.findall(r"^\| `(\w+)` \|", block[2], re.MULTILINE))
        for block in re.finditer(r"<!-- begin metrics (\w+) -->\n(.*?)<!-- end", text, re.DOTALL)
    }


def problems(found: dict[str, set[str]], told: dict[str, set[str]]) -> list[str]:
    """What is shown and not documented, or documented and not shown."""
    return [
        f"{who}: {name}"
        for who in sorted({*found, *told} - {"common"})
        for name in sorted(
            found.get(who, set())
            ^ (told.get(who, set()) | (told["common"] if who in SERVICES else set()))
        )
    ]


async def pages(at: Loaded) -> dict[str, set[str]]:
    """Names on all pages, by who has them."""
    found: dict[str, set[str]] = {}
    for who, addresses in at.addresses.items():
        for address in addresses:
            text = await asyncio.to_thread(read, f"http://{address}/metrics")
            found.setdefault(who, set()).update(exported(text))
    return found


async def test_what_is_documented_is_shown_and_what_is_shown_is_documented(tmp_path: Path) -> None:
    async with loaded(tmp_path) as at:
        found = await pages(at)
    assert len(found) == len(families()) - 1
    assert problems(found, documented()) == []


def test_a_metric_that_only_one_of_them_has_is_noticed() -> None:
    told = {"common": {"c"}, "storage": {"a", "b"}}
    assert problems({"storage": {"b", "c", "x"}}, told) == ["storage: a", "storage: x"]


async def ask(prometheus: Prometheus, path: str, **parameters: str) -> Any:
    url = f"http://{prometheus.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    answer = json.loads(await asyncio.to_thread(read, url))
    assert answer["status"] == "success", answer
    return answer["data"]


async def values(prometheus: Prometheus, query: str) -> list[float]:
    """What a query gives that is a number."""
    found = await ask(prometheus, "query", query=filled_in(query))
    told = [float(series["value"][1]) for series in found["result"]]
    return [value for value in told if not math.isnan(value)]


async def unanswered(prometheus: Prometheus) -> list[tuple[str, str, str]]:
    """Panels with a query that has no answer."""
    return [each for each in QUERIES if not await values(prometheus, each[2])]


@pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="NOT TESTED: there is no prometheus (Debian: apt-get install prometheus)",
)
async def test_every_query_of_the_dashboards_has_an_answer_and_every_rule_works(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "prometheus"
    keep_ports(folder / "ports.json", ["prometheus"])
    async with (
        loaded(tmp_path / "data") as at,
        Prometheus(folder, at.targets) as prometheus,
    ):
        left = QUERIES

        async def answered() -> bool:
            nonlocal left
            left = await unanswered(prometheus)
            return not left

        try:
            await until(answered, 120)
        except TimeoutError:
            assert left == []
        stored = f'rocketmq_messages_in_total{{topic="{TOPIC}"}}'
        delivered = f'rocketmq_messages_out_total{{consumer_group="{GROUP}"}}'
        assert min(await values(prometheus, stored)) > 0
        assert min(await values(prometheus, delivered)) > 0
        assert await values(prometheus, "baton_no_such_metric") == []
        await until(lambda: _rules_work(prometheus), 60)


async def _rules_work(prometheus: Prometheus) -> bool:
    """Whether every rule has been evaluated."""
    groups = (await ask(prometheus, "rules"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert [rule for rule in rules if rule["health"] == "err"] == []
    assert len(rules) > 40
    return all(rule["health"] == "ok" for rule in rules)
