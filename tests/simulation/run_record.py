"""What every run outside the cluster keeps: its seed, counts, and the promises that were broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class RunRecord:
    """A run, as its checks see it.

    Attributes:
        counts: Number of events, by name.
        violations: Broken promises, as text with the name of the rule.
    """

    seed: str
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    _last: int = 0

    def next_number(self) -> int:
        """Return a number that this run has not used."""
        self._last += 1
        return self._last

    def fail(self, rule: str, text: str) -> None:
        """Note a broken promise."""
        self.violations.append(f"{rule}: {text}")
