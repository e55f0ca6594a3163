"""Metrics of running processes, and queries of a real Prometheus that scrapes them."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from batonmq_server.local.prometheus import Prometheus
from tools.dashboards.panels import Dashboard
from tools.dashboards.promql import filled_in
from tools.docs.metric_families import SERVICES
from tools.docs.pages import ROOT

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="NOT TESTED: there is no prometheus (Debian: apt-get install prometheus)",
)
_PAUSE_S = 0.5
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def read(url: str) -> str:
    """Return a page by HTTP."""
    with _DIRECT.open(url, timeout=30) as response:
        return str(response.read().decode())


async def exported(addresses: Iterable[str]) -> set[str]:
    """Return the names of the metrics at addresses, without those that the client library adds."""
    names: set[str] = set()
    for address in addresses:
        page = await asyncio.to_thread(read, f"http://{address}/metrics")
        names.update(re.findall(r"^# TYPE (\w+) \w+$", page, re.MULTILINE))
    return {name for name in names if not name.endswith("_created")}


def documented() -> dict[str, set[str]]:
    """Return the names of the metrics in docs/reference/metrics.md by service."""
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    return {
        block[1]: set(re.findall(r"^\| `(\w+)` \|", block[2], re.MULTILINE))
        for block in re.finditer(r"<!-- begin metrics (\w+) -->\n(.*?)<!-- end", text, re.DOTALL)
    }


def differing(exported: Mapping[str, set[str]], documented: Mapping[str, set[str]]) -> list[str]:
    """Return the metrics of the services in `exported` that are only exported or documented."""
    common = documented["common"]
    return [
        f"{service}: {name}"
        for service, names in sorted(exported.items())
        for name in sorted(
            names ^ (documented[service] | (common if service in SERVICES else set()))
        )
    ]


async def ask(prometheus: Prometheus, path: str, **parameters: str) -> Any:
    """Return the answer of its API; an error fails the test."""
    url = f"http://{prometheus.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    answer = json.loads(await asyncio.to_thread(read, url))
    assert answer["status"] == "success", answer
    return answer["data"]


async def values(prometheus: Prometheus, query: str) -> list[float]:
    """Return the numbers in the result of a query of a dashboard."""
    answer = await ask(prometheus, "query", query=filled_in(query))
    numbers = [float(series["value"][1]) for series in answer["result"]]
    return [value for value in numbers if not math.isnan(value)]


async def unanswered(
    prometheus: Prometheus, boards: Sequence[Dashboard], timeout_s: float
) -> list[tuple[str, str, str]]:
    """Return dashboard, panel and query of the queries without a result before the timeout."""
    missing = [
        (board.title, panel.title, query)
        for board in boards
        for panel in board.panels
        for query in panel.queries.values()
    ]
    try:
        async with asyncio.timeout(timeout_s):
            while missing:
                await asyncio.sleep(_PAUSE_S)
                # One at a time: a rate needs two scrapes of every process.
                while missing and await values(prometheus, missing[-1][2]):
                    missing.pop()
    except TimeoutError:
        return [each for each in missing if not await values(prometheus, each[2])]
    return []


async def rules(prometheus: Prometheus, timeout_s: float) -> list[dict[str, Any]]:
    """Return all rules once each one is evaluated, or their state at the timeout."""
    evaluated: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(timeout_s):
            while not evaluated or any(rule["health"] == "unknown" for rule in evaluated):
                await asyncio.sleep(_PAUSE_S)
                groups = (await ask(prometheus, "rules"))["groups"]
                evaluated = [rule for group in groups for rule in group["rules"]]
    except TimeoutError:
        pass
    return evaluated
