"""Goal: with `--required` a skipped test fails, unless its reason is on the list.

Method: pytest itself, with files that skip in every way there is, on workers as `make test` has
them; and the reasons that are allowed held against the tests and the page.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.skips import ALLOWED
from tools.docs.pages import ROOT

TESTS = """
import pytest

@pytest.fixture(scope="session")
def server():
    pytest.skip("NOT TESTED: there is no server")

def test_fixture(server): ...

@pytest.mark.skipif(True, reason="NO PROGRAM")
def test_mark(): ...

def test_body():
    pytest.skip("not today")

def test_allowed():
    pytest.skip("NOT TESTED: no file system may be mounted here: permission denied")

def test_xfail():
    pytest.xfail("known")

def test_passes(): ...
"""
MODULE = 'import pytest\npytest.importorskip("no_such_package")\ndef test_whole(): ...\n'


def outcomes(folder: Path, text: str, *options: str) -> tuple[int, dict[str, str]]:
    """Return the exit status of pytest and the outcome of each test or file."""
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    plugins = ("-p", "tests.support.skips", "-p", "no:cacheprovider")
    words = [sys.executable, "-m", "pytest", "-q", "-rA", *plugins, *options, "test_it.py"]
    done = subprocess.run(
        ["env", f"PYTHONPATH={ROOT}", *words],
        cwd=folder, check=False, capture_output=True, text=True,
    )  # fmt: skip
    report_lines = re.findall(
        r"^([A-Z]+) (?:\[1\] )?test_it\.py(?::+(\w+))?", done.stdout, re.MULTILINE
    )
    return done.returncode, {test: outcome for outcome, test in report_lines}


def test_skipped_test_fails_if_everything_is_required(tmp_path: Path) -> None:
    assert outcomes(tmp_path, TESTS, "--required", "-n", "1", "--dist", "loadfile") == (
        1,
        {
            "test_fixture": "ERROR",
            "test_mark": "ERROR",
            "test_body": "FAILED",
            "test_xfail": "XFAIL",
            "test_passes": "PASSED",
            "17": "SKIPPED",  # the line of the allowed skip
        },
    )


def test_skipped_file_fails_if_everything_is_required(tmp_path: Path) -> None:
    status, results = outcomes(tmp_path, MODULE, "--required", "-n", "1")
    assert (status, results) == (1, {"": "ERROR"})


@pytest.mark.parametrize("text", [TESTS, MODULE])
def test_skip_is_not_a_failure_without_the_option(tmp_path: Path, text: str) -> None:
    status, results = outcomes(tmp_path, text)
    assert status in (0, 5)
    assert {"ERROR", "FAILED"}.isdisjoint(results.values())
    assert "SKIPPED" in results.values()


def test_allowed_skips_are_those_of_tests_and_documentation() -> None:
    sources = "".join(
        path.read_text()
        for path in (ROOT / "tests").rglob("*.py")
        if path.name not in ("skips.py", Path(__file__).name)
    )
    page = (ROOT / "docs" / "explanation" / "testing.md").read_text()
    for reason in ALLOWED:
        assert f": {reason}" in sources or f'"{reason}' in sources
        assert f"`{reason}`" in page
