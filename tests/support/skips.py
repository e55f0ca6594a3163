"""A pytest plugin: with `--required`, as in CI, a skipped test fails.

Without the option, a machine without some program still runs all other tests. `.ci/run` installs
the programs, so a skip in CI is a mistake.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import pytest

ALLOWED = {
    "no network of its own can be made here": "a right that a container may not have",
    "no file system may be mounted here": "a right that a container may not have",
    "the earlier version can't be built": "a checkout may have no history",
    "NO HELM": "built with a newer Go than Debian has; `make k8s` names it too",
}
"""Text that the reason of an allowed skip contains, and why the skip is allowed."""
_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--required`."""
    parser.addoption(
        "--required",
        action="store_true",
        help="a skipped test fails, unless tests/support/skips.py allows its reason",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a skipped test."""
    return _judged((yield), item.config)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a file that is skipped as a whole."""
    return _judged((yield), collector.config)


def _judged(report: _Report, config: pytest.Config) -> _Report:
    if report.skipped and isinstance(report.longrepr, tuple) and config.getoption("required"):
        reason = report.longrepr[2]
        if not any(allowed in reason for allowed in ALLOWED):
            report.outcome = "failed"
            report.longrepr = (
                f"{reason}\nWith --required only the reasons in {__name__} allow a skip."
            )
    return report
