"""Goal: a wrong command line starts no job: two processes must not share a checkpoint.

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
