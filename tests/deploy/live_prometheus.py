"""What processes that run show, and what a real Prometheus makes of it."""

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
    """A page, by HTTP."""
    with _DIRECT.open(url, timeout=30) as response:
        return str(response.read().decode())


async def exported(addresses: Iterable[str]) -> set[str]:
    """Names of the metrics at host:port, without those that the client library adds."""
    found: set[str] = set()
    for address in addresses:
        page = await asyncio.to_thread(read, f"http://{address}/metrics")
        found.update(re.findall(r"^# TYPE (\w+) \w+$", page, re.MULTILINE))
    return {name for name in found if not name.endswith("_created")}


def documented() -> dict[str, set[str]]:
    """Names of the metrics in docs/reference/metrics.md, by who has them."""
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    return {
        block[1]: set(re.findall(r"^\| `(\w+)` \|", block[2], re.MULTILINE))
        for block in re.finditer(r"<!-- begin metrics (\w+) -->\n(.*?)<!-- end", text, re.DOTALL)
    }


def differing(shown: Mapping[str, set[str]], told: Mapping[str, set[str]]) -> list[str]:
    """What those who are in `shown` show and nobody documents, or the other way round."""
    return [
        f"{who}: {name}"
        for who, names in sorted(shown.items())
        for name in sorted(names ^ (told[who] | (told["common"] if who in SERVICES else set())))
    ]


async def ask(prometheus: Prometheus, path: str, **parameters: str) -> Any:
    """What its API answers; an error fails the test."""
    url = f"http://{prometheus.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    answer = json.loads(await asyncio.to_thread(read, url))
    assert answer["status"] == "success", answer
    return answer["data"]


async def values(prometheus: Prometheus, query: str) -> list[float]:
    """What a query of a dashboard gives that is a number."""
    found = await ask(prometheus, "query", query=filled_in(query))
    told = [float(series["value"][1]) for series in found["result"]]
    return [value for value in told if not math.isnan(value)]


async def unanswered(
    prometheus: Prometheus, boards: Sequence[Dashboard], timeout_s: float
) -> list[tuple[str, str, str]]:
    """Dashboard, panel and query where no answer comes, for so long."""
    left = [
        (board.title, panel.title, query)
        for board in boards
        for panel in board.panels
        for query in panel.queries.values()
    ]
    try:
        async with asyncio.timeout(timeout_s):
            while left:
                await asyncio.sleep(_PAUSE_S)
                # One at a time: a rate wants two looks at everything.
                while left and await values(prometheus, left[-1][2]):
                    left.pop()
    except TimeoutError:
        return [each for each in left if not await values(prometheus, each[2])]
    return []


async def rules(prometheus: Prometheus, timeout_s: float) -> list[dict[str, Any]]:
    """All rules, once each was evaluated; or as they are after so long."""
    found: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(timeout_s):
            while not found or any(rule["health"] == "unknown" for rule in found):
                await asyncio.sleep(_PAUSE_S)
                groups = (await ask(prometheus, "rules"))["groups"]
                found = [rule for group in groups for rule in group["rules"]]
    except TimeoutError:
        pass
    return found
