"""Goal: scopes whose tests take long come first; workers begin to collect at other folders.

Method: the functions of `conftest` with marks and items of this run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import (
    collected_paths,
    expected_s,
    pytest_collection_modifyitems,
    pytest_configure,
    scope_of,
    time_limit_s,
)


@pytest.mark.parametrize(
    ("mark", "limit_s"),
    [
        (pytest.mark.timeout(90), 90),
        (pytest.mark.timeout(timeout=90), 90),
        (pytest.mark.timeout(method="thread"), 0),
        (pytest.mark.timeout(None), 0),
    ],
)
def test_limit_is_given_by_position_or_by_name(mark: pytest.MarkDecorator, limit_s: int) -> None:
    assert time_limit_s(mark.mark) == limit_s


def test_test_without_a_mark_has_no_limit() -> None:
    assert time_limit_s(None) == 0


def test_files_are_scopes_and_each_simulated_run_is_one() -> None:
    assert (
        scope_of("tests/core/test_clock.py::TestClock::test_a[x::y]") == "tests/core/test_clock.py"
    )
    run = "tests/simulation/test_simulation.py::test_run[1-20]"
    assert scope_of(run) == run


class ListedTest(pytest.Item):
    """A test that is only listed."""

    def runtest(self) -> None:
        raise NotImplementedError


def test_scope_with_the_longest_expected_time_comes_first(request: pytest.FixtureRequest) -> None:
    def listed(nodeid: str, *marks: pytest.MarkDecorator) -> ListedTest:
        item = ListedTest.from_parent(request.session, name=nodeid, nodeid=nodeid)
        for mark in marks:
            item.add_marker(mark)
        return item

    quick = [listed(f"tests/a.py::test_{number}") for number in range(3)]
    slow = [listed("tests/b.py::test_a"), listed("tests/b.py::test_b", pytest.mark.etcd)]
    slowest = listed("tests/c.py::test", pytest.mark.timeout(120))
    items: list[pytest.Item] = [*quick, *slow, slowest]
    pytest_collection_modifyitems(items)
    assert items == [slowest, *slow, *quick]
    assert expected_s(slowest) > expected_s(slow[1]) > expected_s(quick[0]) > 0


class WorkerConfig:
    """What `pytest_configure` reads and changes in a worker."""

    def __init__(self, number: int, args: list[str], source: Any) -> None:
        self.workerinput = {"workerid": f"gw{number}", "workercount": 4}
        self.args, self.args_source = args, source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b", "c", "__pycache__"):
        (tmp_path / name).mkdir()
    for name in ("conftest.py", "test_x.py"):
        (tmp_path / name).touch()
    return tmp_path


def test_each_worker_begins_to_collect_at_another_folder(folder: Path) -> None:
    starts, collected = [], []
    for number in range(4):
        config: Any = WorkerConfig(number, [str(folder)], pytest.Config.ArgsSource.TESTPATHS)
        pytest_configure(config)
        starts.append(Path(config.args[0]).name)
        collected.append(sorted(config.args))
    assert starts == ["a", "b", "c", "test_x.py"]
    assert collected == [collected_paths(folder)] * 4


def test_worker_collects_the_folders_of_the_command_line(folder: Path) -> None:
    config: Any = WorkerConfig(1, [str(folder)], pytest.Config.ArgsSource.ARGS)
    pytest_configure(config)
    assert config.args == [str(folder)]
