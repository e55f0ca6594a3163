"""Metrics and queries while the demo runs.

Goal: docs/reference/metrics.md lists exactly the metrics that the processes export; every query of
the dashboards has a result, and no rule fails. Method: the demo, with part of its flights, on a
cluster with replicas, which a real Prometheus scrapes if it is installed. The jobs of Spark and
their dashboard are tested in tests/spark/test_app.py, that of the gateways in
tests/gateway/test_metrics.py.
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
from tools.dashboards.gateway import GATEWAY
from tools.dashboards.generate import DASHBOARDS
from tools.dashboards.internals import SPARK
from tools.dashboards.panels import Dashboard, Panel
from tools.docs.metric_families import families

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

FLIGHTS, PACE = 4_000, 150
"""The demo then takes some 20 s, in which everything is scraped four times."""
BOARDS = [board for board in DASHBOARDS if board not in (GATEWAY, SPARK)]
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
class DemoRecord:
    """Result, metrics and answers of Prometheus of one run of the demo.

    Attributes:
        exported: Names of metrics by service.
        unanswered: Dashboard, panel and query of the queries without a result.
        rules: Rules with their state in Prometheus.
        counted: Messages stored in the topic of the demo and delivered to its group, in Prometheus.
        planted: Queries of `PLANTED` without a result.
    """

    result: DemoResult
    exported: dict[str, set[str]]
    unanswered: Sequence[tuple[str, str, str]] = ()
    rules: Sequence[dict[str, Any]] = ()
    counted: tuple[float, float] = (0, 0)
    planted: Sequence[tuple[str, str, str]] = ()


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> DemoRecord:
    """Return one run for all tests of this file."""
    return asyncio.run(_record(tmp_path_factory.mktemp("demo_cluster")))


async def _record(folder: Path) -> DemoRecord:
    flights = load_flights()[:FLIGHTS]
    async with demo_cluster(folder / "data") as at:
        if shutil.which("prometheus") is None:
            result = await at.demo(flights, folder / "journals", PACE)
            return DemoRecord(result, await _exported(at))
        async with (
            Prometheus(folder / "prometheus", at.targets, port=0) as prometheus,
            asyncio.TaskGroup() as tasks,
        ):
            demo = tasks.create_task(at.demo(flights, folder / "journals", PACE))
            without_result = await unanswered(prometheus, BOARDS, 120)
            evaluated = await rules(prometheus, 60)
            result = await demo
            return DemoRecord(
                result,
                await _exported(at),
                without_result,
                evaluated,
                await _counted(prometheus, result.published),
                await unanswered(prometheus, [PLANTED], 2),
            )


async def _exported(at: DemoCluster) -> dict[str, set[str]]:
    return {name: await exported(addresses) for name, addresses in at.addresses.items()}


async def _counted(prometheus: Prometheus, published: int) -> tuple[float, float]:
    """Return the counts after the end of the demo; before, more may be stored than delivered."""
    stored = f'sum(rocketmq_messages_in_total{{topic="{TOPIC}"}})'
    delivered = f'sum(rocketmq_messages_out_total{{consumer_group="{GROUP}"}})'
    while True:
        out, stored_count = await values(prometheus, delivered), await values(prometheus, stored)
        if stored_count == [published] and out and out[0] >= published:
            return stored_count[0], out[0]
        assert not stored_count or stored_count[0] <= published, stored_count
        await asyncio.sleep(0.5)


@pytest.mark.long
def test_demo_has_its_usual_result(record: DemoRecord) -> None:
    assert record.result.ok
    assert record.result.handovers >= 8


def test_exported_metrics_and_documented_metrics_are_the_same(record: DemoRecord) -> None:
    assert record.exported.keys() == families().keys() - {
        "common",
        "oidc",
        "spark",
        "gateway",
        "scaler",
    }
    assert differing(record.exported, documented()) == []


def test_metric_that_is_only_exported_or_only_documented_is_found() -> None:
    documents = {"common": {"c"}, "storage": {"a", "b"}}
    assert differing({"storage": {"b", "c", "x"}}, documents) == ["storage: a", "storage: x"]


@needs_prometheus
def test_every_dashboard_query_has_a_result(record: DemoRecord) -> None:
    assert record.unanswered == []


@needs_prometheus
def test_query_without_a_result_is_found(record: DemoRecord) -> None:
    assert record.planted == [("Planted", "Empty", "baton_no_such_metric")]


@needs_prometheus
def test_prometheus_has_the_counts_of_the_demo(record: DemoRecord) -> None:
    assert record.counted[0] == record.result.published == FLIGHTS
    assert record.counted[1] >= FLIGHTS


@needs_prometheus
def test_every_rule_is_evaluated_without_an_error(record: DemoRecord) -> None:
    assert [rule for rule in record.rules if rule["health"] != "ok"] == []
    assert len(record.rules) > 40
