"""Fixtures every test may ask for, and the order of the files."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["tests.support.etcd"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests that may take long come first, so that no worker ends with a long one."""
    patience_s: dict[Path, float] = {}
    for item in items:
        limit = item.get_closest_marker("timeout")
        asked_s = limit.args[0] if limit else 0
        patience_s[item.path] = max(asked_s, patience_s.get(item.path, 0))
    items.sort(key=lambda item: -patience_s[item.path])
