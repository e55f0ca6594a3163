"""Goal: a job's process runs its queries, tells of them, and ends cleanly; its page tells of it.

Method: the real program against a real cluster, its Prometheus endpoint, and SIGTERM; progress as
Spark reports it; the page is compared with the code.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from batonmq.common.config import ConfigError, load
from batonspark.alerts import ALERTS
from batonspark.latency import LATENCY
from batonspark.progress import measured
from batonspark.rollup import ROLLUP
from batonspark.rules import RuleBook
from batonspark.settings import PREFIX, JobSettings
from tests.spark.running import TEST_CONFIG, RunningCluster
from tests.support.waiting import until_now

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "spark.md").read_text()


@pytest.fixture
def process(cluster: RunningCluster, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    env = {
        "BATON_SPARK_NAMESERVER": cluster.nameserver,
        "BATON_SPARK_DATA_DIR": str(tmp_path),
        "BATON_SPARK_MASTER": "local[2]",
        "BATON_SPARK_SPARK": json.dumps(TEST_CONFIG),
        "BATON_SPARK_TRIGGER_MS": "500",
        "BATON_SPARK_LOG_FORMAT": "json",
    }
    given = [f"{name}={value}" for name, value in env.items()]
    program = ["env", *given, sys.executable, str(ROOT / "spark-jobs" / "jobs" / "stream.py")]
    log = (tmp_path / "log").open("w")
    running = subprocess.Popen(program, stdout=log, stderr=log, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.wait()
        log.close()


@pytest.mark.spark
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_process_runs_its_queries_tells_of_them_and_ends_on_sigterm(
    process: subprocess.Popen[str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    until_now(lambda: "metrics served" in log.read_text(), 60)
    found = re.search(r"metrics served port=(\d+)", log.read_text())
    assert found

    def told() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/metrics") as answer:
            return str(answer.read().decode())

    def all_have_done_some() -> bool:
        assert process.poll() is None, log.read_text()
        text = told()
        return all(
            re.search(rf'baton_spark_batch_id{{query="{query}"}} [1-9]', text)
            for query in ("bronze", "rollup", "alerts")
        )

    until_now(all_have_done_some, 200)
    assert 'baton_spark_running{query="bronze"} 1.0' in told()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()
    text = log.read_text()
    assert len(re.findall("query ended query=", text)) == 3
    assert re.search(r"query progress query=bronze batch=\d+ rows=[1-9]\d* rows_per_s=", text)


def test_backlog_is_what_is_there_and_not_read_yet() -> None:
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
    values = measured(progress)
    assert values["backlog"] == 4 + 3 + 2
    assert (values["batch_id"], values["input_rows"], values["late_rows"]) == (7, 10, 1)
    assert (values["input_rows_per_second"], values["batch_duration_seconds"]) == (0.0, 2.0)


def test_settings_come_from_the_environment_and_unknown_names_are_refused() -> None:
    env = {
        "BATON_SPARK_SPARK": '{"spark.executor.memory": "2g"}',
        "BATON_SPARK_TLS_CA_FILE": "/ca.pem",
    }
    settings = load(JobSettings, PREFIX, env)
    assert settings.spark_config == {"spark.executor.memory": "2g"}
    reach = {"nameserver": "127.0.0.1:9876", "tls": "true", "tlsCaFile": "/ca.pem"}
    assert settings.reach() == reach
    with pytest.raises(ConfigError, match="TRIGER_MS"):
        load(JobSettings, PREFIX, {"BATON_SPARK_TRIGER_MS": "5"})
    for text in ("{", "[]", '{"a": {}}'):
        with pytest.raises(ConfigError, match="BATON_SPARK_SPARK"):
            load(JobSettings, PREFIX, {"BATON_SPARK_SPARK": text})


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
