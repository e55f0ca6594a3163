"""Fixtures every test may ask for, and the order of the files."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.support.cluster import fork_server

pytest_plugins = ["tests.support.etcd", "tests.support.skips"]


# A parent that ignores SIGINT (nohup, a shell's background job) hands that down to every process
# that a test starts, and those would not end by Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _fork_server_ends() -> Iterator[None]:
    """Whoever has asked for it, nobody does any more."""
    yield
    if fork_server.cache_info().currsize:
        fork_server().close()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that use a real etcd: the inner loop leaves them out."""
    if "etcd_endpoint" in getattr(item, "fixturenames", ()):
        item.add_marker("etcd")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests that may take long come first, so that no worker ends with a long one."""
    patience_s: dict[Path, float] = {}
    for item in items:
        asked_s = asked_for_s(item.get_closest_marker("timeout"))
        patience_s[item.path] = max(asked_s, patience_s.get(item.path, 0))
    items.sort(key=lambda item: -patience_s[item.path])


class FilesAndSpark(LoadFileScheduling):  # type: ignore[misc]
    """Workers take a file each; all of Spark is one: a session takes a GB and half a minute."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/spark" if nodeid.startswith("tests/spark/") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesAndSpark | None:
    """What `--dist loadfile` means here."""
    return FilesAndSpark(config, log) if config.getvalue("dist") == "loadfile" else None


def asked_for_s(limit: pytest.Mark | None) -> float:
    """How long a test may take by its `timeout` mark; 0 if it has none, or one without a time."""
    if limit is None:
        return 0
    found = limit.args[0] if limit.args else limit.kwargs.get("timeout")
    return float(found or 0)
