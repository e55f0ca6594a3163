"""Figures, the goals they are held against, and how two things are compared fairly.

The machine is shared and noisy, so a figure is a ratio to a reference that was measured in the
same minutes: A B A B, and the median of each.
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
    """Bounds, of which one that holds is enough.

    Attributes:
        ratio_min: Value by reference, at least.
        ratio_max: Value by reference, at most.
        value_min: Value, at least.
        value_max: Value, at most.
    """

    ratio_min: float | None = None
    ratio_max: float | None = None
    value_min: float | None = None
    value_max: float | None = None

    def met(self, value: float, ratio: float | None) -> bool:
        """Whether a bound holds."""
        holds = [
            self.value_min is not None and value >= self.value_min,
            self.value_max is not None and value <= self.value_max,
            self.ratio_min is not None and ratio is not None and ratio >= self.ratio_min,
            self.ratio_max is not None and ratio is not None and ratio <= self.ratio_max,
        ]
        return any(holds)

    def describe(self, unit: str) -> str:
        """The bounds, for people."""
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
        reference: What the same machine did in the same minutes, in the same unit.
        ratio: Value by reference.
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
    """A figure, held against its goal."""
    ratio = value / reference if reference else None
    return Figure(name, value, unit, reference, ratio, goal.describe(unit), goal.met(value, ratio))


async def interleaved(
    subjects: Mapping[str, Callable[[], Awaitable[float]]], rounds: int
) -> dict[str, float]:
    """Median of `rounds` measurements of each subject, which take turns."""
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, measure in subjects.items():
            found[name].append(await measure())
    return {name: median(values) for name, values in found.items()}


async def seconds(work: Awaitable[object]) -> float:
    """How long `work` takes."""
    begin = perf_counter()
    await work
    return perf_counter() - begin


def write(path: Path, figures: Sequence[Figure]) -> None:
    """Replace the figures in `path` that were measured anew; the others stay."""
    known = {one["name"]: one for one in read(path)}
    known |= {one.name: asdict(one) for one in figures}
    path.write_text(json.dumps(list(known.values()), indent=2, ensure_ascii=False) + "\n")


def read(path: Path) -> list[dict[str, object]]:
    """The figures of `path`; none if it does not exist."""
    found: list[dict[str, object]] = json.loads(path.read_text()) if path.exists() else []
    return found
