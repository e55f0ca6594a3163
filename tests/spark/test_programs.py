"""Goal: a program that can't do its work says so, and starts no Spark: a wrong command line, since
two processes must not share a checkpoint, and a report without the table that it reads.

Method: the programs as processes, in an empty folder.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = ("stream", "bronze", "rollup", "alerts", "compact")


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("--since", 2)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_job_with_arguments_shows_its_usage(
    program: str, argument: str, status: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", f"batonspark.jobs.{program}", argument]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status
    usage = f"usage: python -m batonspark.jobs.{program}; settings: BATON_SPARK_*"
    assert (done.stderr if status else done.stdout).startswith(usage)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("report", ["duplicate_audit", "handover_report", "capacity_forecast"])
def test_report_without_events_says_what_is_missing(
    report: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_SPARK_DATA_DIR", "data")
    done = subprocess.run(
        [sys.executable, "-m", f"batonspark.jobs.{report}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"{tmp_path}/data/tables/bronze does not exist" in done.stderr
    assert "BATON_SPARK_DATA_DIR" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
