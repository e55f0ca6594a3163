"""Fixtures of the lock manager's tests: a cluster of its own for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.lockmgr.scene import Scene, open_scene


@pytest.fixture
async def scene(etcd_endpoint: str, tmp_path: Path) -> AsyncIterator[Scene]:
    """An empty cluster with offsets running, without a lock manager."""
    async with open_scene(etcd_endpoint, tmp_path) as opened:
        yield opened
