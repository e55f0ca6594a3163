"""Goal: files with tests that ask for much time come first, however they ask.

Method: marks as tests carry them.
"""

from __future__ import annotations

import pytest

from tests.conftest import asked_for_s


@pytest.mark.parametrize(
    ("mark", "asked_s"),
    [
        (pytest.mark.timeout(90), 90),
        (pytest.mark.timeout(timeout=90), 90),
        (pytest.mark.timeout(method="thread"), 0),
        (pytest.mark.timeout(None), 0),
    ],
)
def test_mark_gives_its_time_by_position_or_by_name(
    mark: pytest.MarkDecorator, asked_s: int
) -> None:
    assert asked_for_s(mark.mark) == asked_s


def test_test_without_a_mark_has_no_time() -> None:
    assert asked_for_s(None) == 0
