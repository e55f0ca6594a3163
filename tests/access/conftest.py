"""Fixtures of the access tests: a cluster for each test in the etcd that all tests share."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest_asyncio

from batonmq._common.clock import Clock
from batonmq_server.runtime.etcd.session import EtcdSession


@pytest_asyncio.fixture
async def etcd(etcd_endpoint: str) -> AsyncIterator[EtcdSession]:
    async with EtcdSession(
        etcd_endpoint, f"test-{secrets.token_hex(8)}", Clock(), timeout_ms=30_000
    ) as session:
        yield session
