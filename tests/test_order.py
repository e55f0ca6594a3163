"""Goal: scopes whose tests take long come first.

Method: the functions of `conftest` with marks and items of this run.
"""

from __future__ import annotations

import pytest

from tests.conftest import expected_s, pytest_collection_modifyitems, scope_of, time_limit_s


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
