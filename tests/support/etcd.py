"""A real etcd for the tests of a session."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from batonmq_server.local.etcd import EtcdProcess


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def etcd_endpoint(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Return the `127.0.0.1:port` of the shared etcd; each test uses its own cluster name.

    No test stops this etcd, so its data need not be on the disk.
    """
    async with EtcdProcess(tmp_path_factory.mktemp("etcd"), fsync=False) as etcd:
        yield etcd.endpoint


@pytest.fixture
def cluster() -> str:
    """Return a new cluster name: its keys in the shared etcd are those of one test."""
    return f"test-{secrets.token_hex(8)}"
