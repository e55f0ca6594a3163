"""Plays the runs of a mutant until one of them finds it."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Protocol


class PlayedRun(Protocol):
    """A run that has ended.

    Attributes:
        violations: Broken promises, as text with the name of the rule.
    """

    violations: list[str]


def assert_found(rules: Set[str], runs: Iterable[PlayedRun]) -> None:
    """Take runs until one has broken a promise; it must be one of `rules`."""
    violations = next((run.violations for run in runs if run.violations), [])
    broken = {violation.partition(":")[0] for violation in violations}
    assert broken & rules, violations[:5]
