"""Fixtures of storage's tests."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.storage.replicas import Scene, replica_set


@pytest.fixture
async def scene(etcd_endpoint: str, tmp_path: Path) -> AsyncIterator[Scene]:
    """A replica set in a cluster of its own, with a topic and without nodes."""
    async with replica_set(etcd_endpoint, f"test-{secrets.token_hex(8)}", tmp_path) as opened:
        yield opened
