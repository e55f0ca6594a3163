"""Goal: with `--required` a test has four times its limit, and a test that hangs still ends.
Hypothesis has time to make an example that fails smaller.

Method: pytest itself, with a file of tests that tell their limits.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.docs.pages import ROOT

TESTS = """
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

def limit(request):
    mark = request.node.get_closest_marker("timeout")
    return None if mark is None else (mark.args, mark.kwargs)

@pytest.mark.timeout(90)
def test_by_position(request):
    assert limit(request) == ((), {"timeout": 360.0}), limit(request)

@pytest.mark.timeout(timeout=0.5, method="thread")
def test_by_name(request):
    assert limit(request) == ((), {"timeout": 2.0, "method": "thread"}), limit(request)

def test_of_the_settings(request):
    assert limit(request) == ((), {"timeout": 480.0}), limit(request)

@pytest.mark.timeout(0)
def test_without_a_limit(request):
    assert limit(request) == ((0,), {}), limit(request)

@given(st.just(1))
@settings(suppress_health_check=list(HealthCheck))
def test_with_examples(request, _):
    assert limit(request) == ((), {"timeout": 4 * 420.0}), limit(request)

class Machine(RuleBasedStateMachine):
    @rule()
    def nothing(self):
        pass

TestMachine = Machine.TestCase

@pytest.fixture(autouse=True)
def limit_of_a_machine(request):
    if request.cls is not None:
        assert limit(request) == ((), {"timeout": 4 * 420.0}), limit(request)
"""


@pytest.mark.parametrize(("options", "passed"), [(["--required"], 6), ([], 1)])
def test_limits_are_raised_if_everything_is_required(
    tmp_path: Path, options: list[str], passed: int
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 120\n")
    plugins = ("tests.support.skips", "tests.support.time_limits", "no:cacheprovider")
    chosen = [word for plugin in plugins for word in ("-p", plugin)]
    words = [sys.executable, "-m", "pytest", "-q", *chosen, *options, "test_it.py"]
    done = subprocess.run(
        ["env", f"PYTHONPATH={ROOT}", *words],
        cwd=tmp_path, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert f"{passed} passed" in done.stdout, done.stdout
    assert ("failed" in done.stdout) is (passed < 6)
