"""A pytest plugin: with `--required`, as in CI, a test has more time.

A time limit only ends a test that hangs. CI runs on machines of any speed.
"""

from __future__ import annotations

import pytest

FACTOR = 4
"""Times the limit that a test has elsewhere."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raise the limits, after the order of the tests is fixed: it depends on them."""
    if not config.getoption("required"):
        return
    for item in items:
        mark = item.get_closest_marker("timeout")
        args, options = (mark.args, mark.kwargs) if mark is not None else ((), {})
        seconds = args[0] if args else options.get("timeout", config.getini("timeout"))
        if seconds:
            more = {**options, "timeout": FACTOR * float(seconds)}
            item.add_marker(pytest.mark.timeout(**more), append=False)
