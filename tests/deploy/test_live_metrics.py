"""Metrics and queries while the demo runs.

Goal: docs/reference/metrics.md lists what the processes answer, no more and no less; every query of
the dashboards has an answer, and no rule fails. Method: the demo, with part of its flights, on a
cluster with replicas; a real Prometheus scrapes it meanwhile, where there is one, and is asked.
Jobs of Spark, their page and their dashboard, have tests/spark/test_app.py.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from batonmq_server.demo.demo_run import GROUP, TOPIC, DemoResult
from batonmq_server.demo.flights import load_flights
from batonmq_server.local.prometheus import Prometheus
from tests.deploy.live_prometheus import (
    differing,
    documented,
    exported,
    needs_prometheus,
    rules,
    unanswered,
    values,
)
from tools.dashboards.demo_cluster import DemoCluster, demo_cluster
from tools.dashboards.generate import DASHBOARDS
from tools.dashboards.internals import SPARK
from tools.dashboards.panels import Dashboard, Panel
from tools.docs.metric_families import families

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FLIGHTS, PACE = 4_000, 150
"""The demo then takes some 20 s, in which everything is scraped four times."""
BOARDS = [board for board in DASHBOARDS if board is not SPARK]
PLANTED = Dashboard(
    "planted",
    "Planted",
    {
        "Row": (
            Panel("Full", "baton top", {"": "up"}),
            Panel("Empty", "baton top", {"": "baton_no_such_metric"}),
        )
    },
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What was there to see.

    Attributes:
        shown: Names of metrics by who shows them.
        unanswered: Dashboard, panel and query.
        rules: As Prometheus tells of them.
        counted: Messages that Prometheus knows to be stored in the topic of the demo, and
            delivered to its group.
        planted: Of `PLANTED` what is unanswered.
    """

    result: DemoResult
    shown: dict[str, set[str]]
    unanswered: Sequence[tuple[str, str, str]] = ()
    rules: Sequence[dict[str, Any]] = ()
    counted: tuple[float, float] = (0, 0)
    planted: Sequence[tuple[str, str, str]] = ()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """One run for all tests of this file."""
    return asyncio.run(_look(tmp_path_factory.mktemp("demo_cluster")))


async def _look(folder: Path) -> Seen:
    flights = load_flights()[:FLIGHTS]
    async with demo_cluster(folder / "data") as at:
        if shutil.which("prometheus") is None:
            result = await at.demo(flights, folder / "journals", PACE)
            return Seen(result, await _shown(at))
        async with (
            Prometheus(folder / "prometheus", at.targets, port=0) as prometheus,
            asyncio.TaskGroup() as tasks,
        ):
            demo = tasks.create_task(at.demo(flights, folder / "journals", PACE))
            left = await unanswered(prometheus, BOARDS, 120)
            found = await rules(prometheus, 60)
            result = await demo
            return Seen(
                result,
                await _shown(at),
                left,
                found,
                await _counted(prometheus, result.published),
                await unanswered(prometheus, [PLANTED], 2),
            )


async def _shown(at: DemoCluster) -> dict[str, set[str]]:
    return {who: await exported(addresses) for who, addresses in at.addresses.items()}


async def _counted(prometheus: Prometheus, published: int) -> tuple[float, float]:
    """Once it has looked after the demo's end: before, more may be stored than delivered."""
    stored = f'sum(rocketmq_messages_in_total{{topic="{TOPIC}"}})'
    delivered = f'sum(rocketmq_messages_out_total{{consumer_group="{GROUP}"}})'
    while True:
        out, told = await values(prometheus, delivered), await values(prometheus, stored)
        if told == [published] and out and out[0] >= published:
            return told[0], out[0]
        assert not told or told[0] <= published, told
        await asyncio.sleep(0.5)


def test_demo_has_its_usual_result(seen: Seen) -> None:
    assert seen.result.ok
    assert seen.result.handovers >= 8


def test_exported_metrics_and_documented_metrics_are_the_same(seen: Seen) -> None:
    assert seen.shown.keys() == families().keys() - {"common", "spark"}
    assert differing(seen.shown, documented()) == []


def test_metric_that_is_only_exported_or_only_documented_is_found() -> None:
    told = {"common": {"c"}, "storage": {"a", "b"}}
    assert differing({"storage": {"b", "c", "x"}}, told) == ["storage: a", "storage: x"]


@needs_prometheus
def test_every_dashboard_query_has_a_result(seen: Seen) -> None:
    assert seen.unanswered == []


@needs_prometheus
def test_query_without_a_result_is_found(seen: Seen) -> None:
    assert seen.planted == [("Planted", "Empty", "baton_no_such_metric")]


@needs_prometheus
def test_prometheus_has_the_counts_of_the_demo(seen: Seen) -> None:
    assert seen.counted[0] == seen.result.published == FLIGHTS
    assert seen.counted[1] >= FLIGHTS


@needs_prometheus
def test_every_rule_is_evaluated_without_an_error(seen: Seen) -> None:
    assert [rule for rule in seen.rules if rule["health"] != "ok"] == []
    assert len(seen.rules) > 40
