"""Fixtures of all tests, and the order of the test files."""

from __future__ import annotations

import gc
import signal
from collections import defaultdict
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

pytest_plugins = [
    "tests.support.etcd",
    "tests.support.run_counts",
    "tests.support.skips",
    "tests.support.time_limits",
]


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


def pytest_configure(config: pytest.Config) -> None:
    """Let every worker begin to collect at other folders.

    On a fresh clone each then rewrites the assertions of a part of the files and reads what the
    others have written. If all collected in the same order, each would rewrite all of them.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    paths = [one for root in config.args for one in collected_paths(Path(root))]
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    first = number * len(paths) // count
    config.args[:] = paths[first:] + paths[:first]


def collected_paths(root: Path) -> list[str]:
    """Return the folders and test files in a folder, in the order of their names."""
    folders = [one for one in root.iterdir() if one.is_dir() and one.name != "__pycache__"]
    return [str(one) for one in sorted([*folders, *root.glob("test_*.py")])]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that use a real etcd: `make quick` leaves them out."""
    if "etcd_endpoint" in getattr(item, "fixturenames", ()):
        item.add_marker("etcd")


def pytest_collection_finish() -> None:
    """Leave what the collection has made, 10,000 tests, out of all later garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the scopes by their expected time, so that no worker starts a long one at the end."""
    total_s: defaultdict[str, float] = defaultdict(float)
    for item in items:
        total_s[scope_of(item.nodeid)] += expected_s(item)
    # by path, too, as every worker has collected in another order
    items.sort(key=lambda item: (-total_s[scope_of(item.nodeid)], item.path))


class FilesAndRuns(LoadFileScheduling):  # type: ignore[misc]
    """Assign a scope to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesAndRuns | None:
    """Return the scheduler of `--dist loadfile`."""
    return FilesAndRuns(config, log) if config.getvalue("dist") == "loadfile" else None


def scope_of(nodeid: str) -> str:
    """Return the file of a test; for a simulated run the test itself, since runs share nothing."""
    file = nodeid.partition("::")[0]
    return nodeid if file.startswith("tests/simulation/") else file


def expected_s(item: pytest.Item) -> float:
    """Return a rough estimate of the time of a test: it decides about the order only."""
    limit_s = time_limit_s(item.get_closest_marker("timeout"))
    if limit_s:
        return limit_s / 10
    return 0.5 if item.get_closest_marker("etcd") else 0.05


def time_limit_s(limit: pytest.Mark | None) -> float:
    """Return the limit of a `timeout` mark; 0 without a mark or a time."""
    if limit is None:
        return 0
    seconds = limit.args[0] if limit.args else limit.kwargs.get("timeout")
    return float(seconds or 0)
