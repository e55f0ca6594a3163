"""Goal: executors need no folder, path or memory of the driver.

Method: a session whose executors are separate processes, started from an empty folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import deltalake
import pyarrow.parquet as pq
import pytest

from tests.spark import executors_child
from tests.spark.running_cluster import JAVA_OPTIONS, TEST_CONFIG, RunningCluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.mark.long
def test_executors_read_and_write_without_the_driver_environment(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    topic = cluster.create("executors", 4)
    cluster.send_numbers(topic, range(1_000))
    away, table = tmp_path / "away", tmp_path / "table"
    away.mkdir()
    options = json.dumps(dict(cluster.options(topic)))
    config = {
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    }
    program = [
        sys.executable,
        executors_child.__file__,
        options,
        str(table),
        json.dumps(TEST_CONFIG | config),
    ]
    result = subprocess.run(program, cwd=away, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4_000:]
    assert "rows 1000" in result.stdout
    files = deltalake.DeltaTable(str(table)).file_uris()
    bodies = [int(body) for file in files for body in pq.read_table(file)["body"].to_pylist()]
    assert sorted(bodies) == list(range(1_000))
