"""A pytest plugin: with `--required`, as in CI, and with Hypothesis, a test has more time.

A time limit only ends a test that hangs. CI runs on machines of any speed. Hypothesis makes an
example that fails smaller, for up to 5 minutes: a limit before that would hide the failure.
"""

from __future__ import annotations

import pytest
from hypothesis import is_hypothesis_test, stateful

FACTOR = 4
"""Times the limit that a test has elsewhere."""
HYPOTHESIS_S = 420
"""Limit of a test with Hypothesis that has no other one, in seconds."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raise the limits, after the order of the tests is fixed: it depends on them."""
    for item in items:
        if item.get_closest_marker("timeout") is None and of_hypothesis(item):
            item.add_marker(pytest.mark.timeout(HYPOTHESIS_S))
    if not config.getoption("required"):
        return
    for item in items:
        mark = item.get_closest_marker("timeout")
        args, options = (mark.args, mark.kwargs) if mark is not None else ((), {})
        seconds = args[0] if args else options.get("timeout", config.getini("timeout"))
        if seconds:
            more = {**options, "timeout": FACTOR * float(seconds)}
            item.add_marker(pytest.mark.timeout(**more), append=False)


def of_hypothesis(item: pytest.Item) -> bool:
    """Return whether Hypothesis makes the examples of a test."""
    if not isinstance(item, pytest.Function):
        return False
    of_machine = item.cls is not None and item.cls.__module__ == stateful.__name__
    return of_machine or is_hypothesis_test(item.obj)
