"""Goal: a job's process runs its queries, reports them, and ends cleanly; the page documents it.

Method: the real program beside the demo, on a real cluster: its metrics, the queries of its
dashboard in a real Prometheus, and SIGTERM; progress as Spark reports it; the page is compared with
the code.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import pytest
import yaml

from batonmq._process.config import ConfigError, load
from batonmq_server.demo.demo_run import DemoResult, run_demo
from batonmq_server.demo.flights import load_flights
from batonmq_server.local.prometheus import Prometheus, scrape_targets
from batonspark import app
from batonspark.alert_rules import RuleBook
from batonspark.alerts import ALERTS
from batonspark.latency import LATENCY
from batonspark.progress import gauge_values
from batonspark.queries import QueryContext
from batonspark.rollup import ROLLUP
from batonspark.settings import PREFIX, JobSettings
from tests.deploy.live_prometheus import (
    differing,
    documented,
    exported,
    needs_prometheus,
    read,
    unanswered,
    values,
)
from tests.spark.running_cluster import TEST_CONFIG, RunningCluster
from tests.support.conditions import until, until_now
from tools.dashboards.internals import SPARK

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "spark.md").read_text()
QUERIES = ("bronze", "rollup", "alerts")
FLIGHTS, PACE = 2_000, 150
process = [pytest.mark.spark, pytest.mark.e2e, pytest.mark.timeout(400)]


@dataclass(frozen=True, slots=True)
class DemoRecord:
    """Records of Prometheus while the demo ran.

    Attributes:
        unanswered: Dashboard, panel and query.
        rows: Rows of the largest micro-batch of bronze.
    """

    result: DemoResult
    unanswered: Sequence[tuple[str, str, str]]
    rows: float


@dataclass(frozen=True, slots=True)
class JobRun:
    """The process of a job, from its start to its end.

    Attributes:
        status: Exit status.
        page: Page of metrics before the end.
        metrics: Names of the exported metrics.
        demo: Records of the demo; None without Prometheus.
    """

    status: int
    log: str
    page: str
    metrics: set[str]
    demo: DemoRecord | None


@pytest.fixture(scope="module")
def job(cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory) -> JobRun:
    """Return one run for all tests, because it starts another JVM."""
    folder = tmp_path_factory.mktemp("job")
    log = folder / "log"
    with started(cluster.nameserver, folder) as running:
        until_now(lambda: "metrics served" in log.read_text(), 60)
        match = re.search(r"metrics served port=(\d+)", log.read_text())
        assert match
        address = f"127.0.0.1:{match[1]}"

        def every_query_has_a_second_batch() -> bool:
            assert running.poll() is None, log.read_text()
            try:
                text = read(f"http://{address}/metrics")
            except OSError:  # if the process has ended, the next round shows its log
                return False
            return all(
                re.search(rf'baton_spark_batch_id{{query="{query}"}} [1-9]', text)
                for query in QUERIES
            )

        until_now(every_query_has_a_second_batch, 200)
        installed = shutil.which("prometheus") is not None
        demo = cluster.call(_watched_demo(cluster, address, folder)) if installed else None
        page = read(f"http://{address}/metrics")
        metrics = cluster.call(exported([address]))
        running.send_signal(signal.SIGTERM)
        return JobRun(running.wait(60), log.read_text(), page, metrics, demo)


@contextmanager
def started(nameserver: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    env = {
        "BATON_SPARK_NAMESERVER": nameserver,
        "BATON_SPARK_DATA_DIR": str(folder),
        "BATON_SPARK_MASTER": "local[2]",
        "BATON_SPARK_SPARK": json.dumps(TEST_CONFIG),
        "BATON_SPARK_TRIGGER_MS": "500",
        "BATON_SPARK_LOG_FORMAT": "json",
    }
    given = [f"{name}={value}" for name, value in env.items()]
    program = ["env", *given, sys.executable, "-m", "batonspark.jobs.stream"]
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(program, stdout=log, stderr=log, text=True)
        try:
            yield running
        finally:
            running.kill()
            running.wait()


async def _watched_demo(cluster: RunningCluster, address: str, folder: Path) -> DemoRecord:
    page = {"targets": [address], "labels": {"cluster": "baton", "node_type": "spark"}}
    targets = [*scrape_targets(cluster.processes), page]
    flights = load_flights()[:FLIGHTS]
    async with (
        Prometheus(folder / "prometheus", targets, port=0) as prometheus,
        asyncio.TaskGroup() as tasks,
    ):
        demo = tasks.create_task(
            run_demo(cluster.nameserver, flights, folder / "journals", lambda *_: None, pace=PACE)
        )
        unanswered_queries = await unanswered(prometheus, [SPARK], 120)
        result = await demo
        rows = 'max_over_time(baton_spark_input_rows{query="bronze"}[5m])'

        async def largest_batch() -> float:
            return max(await values(prometheus, rows), default=0)

        # A scrape may meet an empty micro-batch: the services go on sending events.
        await until(largest_batch, 60)
        return DemoRecord(result, unanswered_queries, await largest_batch())


class TestProcess:
    """The process of a job while the demo runs."""

    pytestmark = process

    @pytest.mark.long
    def test_process_runs_and_reports_its_queries_and_ends_on_sigterm(self, job: JobRun) -> None:
        assert 'baton_spark_running{query="bronze"} 1.0' in job.page
        assert job.status == 0, job.log
        assert len(re.findall("query ended query=", job.log)) == 3
        assert re.search(
            r"query progress query=bronze batch=\d+ rows=[1-9]\d* rows_per_s=", job.log
        )

    def test_metrics_are_those_that_are_documented(self, job: JobRun) -> None:
        assert differing({"spark": job.metrics}, documented()) == []

    @needs_prometheus
    def test_every_dashboard_query_has_a_result_during_the_demo(self, job: JobRun) -> None:
        assert job.demo is not None
        assert job.demo.unanswered == []
        assert job.demo.rows > 0
        assert job.demo.result.ok


def test_backlog_is_the_number_of_unread_messages_and_commits() -> None:
    progress = {
        "batchId": 7,
        "numInputRows": 10,
        "inputRowsPerSecond": "NaN",
        "processedRowsPerSecond": 5.0,
        "durationMs": {"triggerExecution": 2_000},
        "stateOperators": [
            {"numRowsTotal": 3, "memoryUsedBytes": 9, "numRowsDroppedByWatermark": 1}
        ],
        "sources": [
            {
                "endOffset": {"b/0": 5, "b/1": 7, "topic_id": 1},
                "latestOffset": {"b/0": 9, "b/1": 7, "b/2": 3, "topic_id": 1},
            },
            {"endOffset": '{"version": 3}', "latestOffset": '{"version": 5}'},
            {"endOffset": None, "latestOffset": None},
        ],
    }
    values = gauge_values(progress)
    assert values["backlog"] == 4 + 3 + 2
    assert (values["batch_id"], values["input_rows"], values["late_rows"]) == (7, 10, 1)
    assert (values["input_rows_per_second"], values["batch_duration_seconds"]) == (0.0, 2.0)


def test_settings_come_from_the_environment_and_unknown_names_are_rejected() -> None:
    env = {
        "BATON_SPARK_SPARK": '{"spark.executor.memory": "2g"}',
        "BATON_SPARK_TLS_CA_FILE": "/ca.pem",
    }
    settings = load(JobSettings, PREFIX, env)
    assert settings.spark_config == {"spark.executor.memory": "2g"}
    reach = {"nameserver": "127.0.0.1:9876", "tls": "true", "tlsCaFile": "/ca.pem"}
    assert settings.connection_options() == reach
    with pytest.raises(ConfigError, match="TRIGER_MS"):
        load(JobSettings, PREFIX, {"BATON_SPARK_TRIGER_MS": "5"})
    for text in ("{", "[]", '{"a": {}}'):
        with pytest.raises(ConfigError, match="BATON_SPARK_SPARK"):
            load(JobSettings, PREFIX, {"BATON_SPARK_SPARK": text})


@pytest.mark.parametrize("stops", [True, False], ids=["signal", "no signal"])
def test_end_of_the_jvm_is_a_failure_unless_the_process_has_to_stop(
    stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Systemd sends the signal to all processes of a service, so the JVM may end first."""
    settings = load(JobSettings, PREFIX, {})
    ended, query = Event(), Mock(isActive=not stops)
    query.exception.side_effect = OSError("the JVM has ended")

    def start(context: QueryContext) -> Mock:
        if stops:
            ended.set()
        return query

    monkeypatch.setattr(app, "session", lambda name, settings: nullcontext(Mock()))
    monkeypatch.setattr(app, "QUERIES", {"bronze": start})
    if stops:
        assert app._stream(("bronze",), settings, ended)
    else:
        with pytest.raises(OSError, match="the JVM has ended"):
            app._stream(("bronze",), settings, ended)


def test_times_of_a_job_are_utc_in_any_time_zone() -> None:
    job = "lambda settings, ended: print(datetime.fromtimestamp(0)) is None"
    imports = "from datetime import datetime; from batonspark.app import run_job"
    program = f"{imports}; run_job('x', {job})"
    command = ["env", "TZ=Asia/Tokyo", sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "1970-01-01 00:00:00\n"


def test_page_has_every_column() -> None:
    for ddl in (ROLLUP, LATENCY, ALERTS):
        names = re.findall(r"(\w+) [A-Z]", re.sub(r"<.*?>", "", ddl))
        assert len(names) > 10
        assert [name for name in names if f"`{name}`" not in PAGE] == []


def test_rules_of_the_page_are_the_defaults() -> None:
    (text,) = re.findall(r"```yaml\n(version: 1.*?)```", PAGE, re.DOTALL)
    assert RuleBook.model_validate(yaml.safe_load(text)) == RuleBook()
    written = RuleBook.model_validate(yaml.safe_load(text)).model_dump(exclude_unset=True)
    assert written == RuleBook().model_dump()
