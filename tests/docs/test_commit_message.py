"""The commit-msg hook: a subject names its area and has at most 72 characters."""

from __future__ import annotations

import pytest

from tools.commit_message import problem


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("storage: sync once per batch\n\nWhy.", ""),
        ("spark-jobs: read the topic's metadata once", ""),
        ("Merge branch 'x'", ""),
        ("Sync once per batch", "does not name its area"),
        ("storage: " + "x" * 64, "73 characters"),
        ("storage: " + "x" * 63, ""),
        ("storage: sync once per batch.", "full stop"),
        ("", "does not name its area"),
    ],
)
def test_subject_is_checked(message: str, expected: str) -> None:
    found_problem = problem(message)
    assert expected in found_problem
    assert bool(expected) == bool(found_problem)
