"""A cluster that the tests of a file share, and lines to send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.baton import RunningCluster, up


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A cluster that the tests of this file share; each uses topics of its own."""
    with up(tmp_path_factory.mktemp("up") / "data") as running:
        yield running
        assert running.interrupt() == 0


@pytest.fixture(autouse=True)
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a context file that does not exist yet."""
    path = tmp_path / "contexts.toml"
    monkeypatch.setenv("BATON_CONFIG", str(path))
    return path


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of three lines."""
    path = tmp_path / "lines"
    path.write_text("1\n2\n3\n")
    return path
