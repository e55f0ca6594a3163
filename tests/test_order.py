"""Goal: files with tests that have a long time limit come first.

Method: marks as tests carry them.
"""

from __future__ import annotations

import pytest

from tests.conftest import time_limit_s


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
    assert time_limit_s(mark.mark) == asked_s


def test_test_without_a_mark_has_no_time() -> None:
    assert time_limit_s(None) == 0
