"""Fixtures of all tests, and the order of the test files."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.support.cluster import fork_server

# A busy machine makes no example wrong: Hypothesis limits neither its time nor that of a draw.
settings.register_profile(
    "any speed",
    settings.get_profile(settings.get_current_profile_name()),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any speed")

pytest_plugins = ["tests.support.etcd", "tests.support.skips"]


# A parent that ignores SIGINT (nohup, a background job of a shell) passes this on to every process
# that a test starts, and Ctrl-C would not end them.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def default_sighup() -> Iterator[None]:
    """Handle SIGHUP by default also under nohup, which ignores it in all processes it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session", autouse=True)
def _close_fork_server() -> Iterator[None]:
    """Close the fork server at the end of the session."""
    yield
    if fork_server.cache_info().currsize:
        fork_server().close()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that use a real etcd: `make quick` leaves them out."""
    if "etcd_endpoint" in getattr(item, "fixturenames", ()):
        item.add_marker("etcd")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with long tests first, so that no worker starts a long one at the end."""
    longest_s: dict[Path, float] = {}
    for item in items:
        limit_s = time_limit_s(item.get_closest_marker("timeout"))
        longest_s[item.path] = max(limit_s, longest_s.get(item.path, 0))
    items.sort(key=lambda item: -longest_s[item.path])


class FilesAndSpark(LoadFileScheduling):  # type: ignore[misc]
    """Assign whole files to workers, all Spark files to one: a session costs 1 GB and 30 s."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/spark" if nodeid.startswith("tests/spark/") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesAndSpark | None:
    """Return the scheduler of `--dist loadfile`."""
    return FilesAndSpark(config, log) if config.getvalue("dist") == "loadfile" else None


def time_limit_s(limit: pytest.Mark | None) -> float:
    """Return the limit of a `timeout` mark; 0 without a mark or a time."""
    if limit is None:
        return 0
    found = limit.args[0] if limit.args else limit.kwargs.get("timeout")
    return float(found or 0)
