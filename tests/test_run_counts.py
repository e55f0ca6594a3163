"""Goal: simulated runs that are too quiet to prove anything fail a session, and only a long one.

Method: pytest itself, with tests that note counts, on workers as `make test` has them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.docs.pages import ROOT

TESTS = """
import pytest
from tests.support.run_counts import note_runs

@pytest.mark.parametrize("kills", [0, 3])
def test_runs(request, kills):
    note_runs(request, "faults", {runs}, {{"kills": kills}}, {{"kills": {least}}})
"""


def session(folder: Path, text: str, *options: str) -> tuple[int, list[str]]:
    """Return the exit status of pytest and its lines about quiet runs."""
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    plugins = ("-p", "tests.support.run_counts", "-p", "no:cacheprovider")
    words = [sys.executable, "-m", "pytest", "-q", *plugins, *options, "test_it.py"]
    done = subprocess.run(
        ["env", f"PYTHONPATH={ROOT}", *words],
        cwd=folder, check=False, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, [line for line in done.stdout.splitlines() if "quiet" in line]


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_runs_of_all_tests_are_judged_together(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert session(tmp_path, TESTS.format(runs=20, least=7), *options) == (0, [])
    assert session(tmp_path, TESTS.format(runs=20, least=10), *options) == (
        1,
        ["ERROR 40 runs of faults are too quiet to prove anything: kills 3, at least 4"],
    )


def test_few_runs_are_not_judged(tmp_path: Path) -> None:
    assert session(tmp_path, TESTS.format(runs=14, least=1_000)) == (0, [])
