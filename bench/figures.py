"""Figures and their goals, and interleaved measurements.

The machine is shared and noisy. So a figure is a ratio to a reference that was measured in the same
minutes: A B A B, and the median of each.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Goal:
    """Bounds; the goal is met if one of them holds.

    Attributes:
        ratio_min: Minimum of value divided by reference.
        ratio_max: Maximum of value divided by reference.
        value_min: Minimum of the value.
        value_max: Maximum of the value.
    """

    ratio_min: float | None = None
    ratio_max: float | None = None
    value_min: float | None = None
    value_max: float | None = None

    def met(self, value: float, ratio: float | None) -> bool:
        """Return whether a bound holds."""
        holds = [
            self.value_min is not None and value >= self.value_min,
            self.value_max is not None and value <= self.value_max,
            self.ratio_min is not None and ratio is not None and ratio >= self.ratio_min,
            self.ratio_max is not None and ratio is not None and ratio <= self.ratio_max,
        ]
        return any(holds)

    def describe(self, unit: str) -> str:
        """Return the bounds as text."""
        bounds = (
            ("≥ {:g} of reference", self.ratio_min),
            ("≤ {:g} of reference", self.ratio_max),
            (f"≥ {{:,.0f}} {unit}", self.value_min),
            (f"≤ {{:,g}} {unit}", self.value_max),
        )
        return " or ".join(text.format(bound) for text, bound in bounds if bound is not None)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure; `bench/results.json` is a list of them.

    Attributes:
        reference: Figure of the reference on the same machine in the same minutes.
        ratio: Value divided by reference.
    """

    name: str
    value: float
    unit: str
    reference: float | None
    ratio: float | None
    goal: str
    met: bool


def figure(
    name: str, value: float, unit: str, goal: Goal, *, reference: float | None = None
) -> Figure:
    """Return a figure and whether it meets its goal."""
    ratio = value / reference if reference else None
    return Figure(name, value, unit, reference, ratio, goal.describe(unit), goal.met(value, ratio))


async def interleaved(
    subjects: Mapping[str, Callable[[], Awaitable[float]]], rounds: int
) -> dict[str, float]:
    """Measure the subjects by turns; return the median of `rounds` measurements of each."""
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, measure in subjects.items():
            found[name].append(await measure())
    return {name: median(values) for name, values in found.items()}


async def seconds(work: Awaitable[object]) -> float:
    """Return the duration of `work`."""
    begin = perf_counter()
    await work
    return perf_counter() - begin


def write(path: Path, figures: Sequence[Figure]) -> None:
    """Replace the measured figures in `path`; the others stay."""
    known = {one["name"]: one for one in read(path)}
    known |= {one.name: asdict(one) for one in figures}
    path.write_text(json.dumps(list(known.values()), indent=2, ensure_ascii=False) + "\n")


def read(path: Path) -> list[dict[str, object]]:
    """Return the figures of `path`; none if it does not exist."""
    found: list[dict[str, object]] = json.loads(path.read_text()) if path.exists() else []
    return found
