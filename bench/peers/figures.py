"""Figures of brokers side by side: their rows, their medians over rounds, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

FORM = 1
"""Form of the files; `load` refuses others."""

_FAILURE_SHOWN = 250


@dataclass(frozen=True, slots=True)
class Series:
    """One figure of one broker: a value of every round.

    Attributes:
        more_is_better: False for times and costs.
    """

    unit: str
    values: Sequence[float]
    more_is_better: bool = False

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return median(self.values)

    def cell(self) -> str:
        """Return the median, with the smallest and the largest value if there are several."""
        shown = number(self.median)
        if len(self.values) > 1:
            shown += f" ({number(min(self.values))}-{number(max(self.values))})"
        return shown


@dataclass(slots=True)
class Column:
    """All figures of one broker.

    Attributes:
        version: Versions of servers and client library.
        settings: What differs from the defaults.
    """

    version: str
    settings: str
    figures: dict[str, Series] = field(default_factory=dict)

    def add(self, name: str, value: float, unit: str, *, more_is_better: bool = False) -> None:
        """Add the value of a round."""
        before = self.figures.get(name)
        values = (*before.values, value) if before else (value,)
        self.figures[name] = Series(unit, values, more_is_better)


@dataclass(slots=True)
class Report:
    """The result of a run.

    Attributes:
        machine: The machine, its load at the start, and the sizes of the run.
        columns: The measured brokers, by name.
        failures: What could not be measured, and why.
    """

    machine: dict[str, str] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add_failure(self, failure: str) -> None:
        """Add what could not be measured, once for all rounds."""
        if failure not in self.failures:
            self.failures.append(failure)

    def rows(self) -> list[str]:
        """Return the names of all figures, in the order in which they were measured first."""
        names = (name for column in self.columns.values() for name in column.figures)
        return list(dict.fromkeys(names))

    def unit(self, row: str) -> str:
        """Return the unit of a row."""
        return next(c.figures[row].unit for c in self.columns.values() if row in c.figures)


def number(value: float) -> str:
    """Return a number with about three digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(report: Report) -> list[list[str]]:
    """Return the cells: a head, then one line per figure; an empty cell was not measured."""
    head = ["work", "unit", *report.columns]
    lines = [
        [
            row,
            report.unit(row),
            *(
                column.figures[row].cell() if row in column.figures else ""
                for column in report.columns.values()
            ),
        ]
        for row in report.rows()
    ]
    return [head, *lines]


def markdown(report: Report) -> str:
    """Return the report as a part of a page."""
    head, *lines = table(report)
    marks = ["---", "---", *(["---:"] * len(report.columns))]
    parts = [f"| {' | '.join(cells)} |" for cells in (head, marks, *lines)]
    parts += ["", *(f"- {name}: {value}" for name, value in report.machine.items())]
    parts += [f"- {name} {one.version}: {one.settings}" for name, one in report.columns.items()]
    parts += [f"- **Not measured**: {failure[:_FAILURE_SHOWN]}" for failure in report.failures]
    return "\n".join(parts)


def save(path: Path, report: Report) -> None:
    """Write a report for `load`."""
    columns = {
        name: {
            "version": column.version,
            "settings": column.settings,
            "figures": {
                row: {
                    "unit": one.unit,
                    "values": list(one.values),
                    "more_is_better": one.more_is_better,
                }
                for row, one in column.figures.items()
            },
        }
        for name, column in report.columns.items()
    }
    written = {
        "form": FORM,
        "machine": report.machine,
        "columns": columns,
        "failures": report.failures,
    }
    path.write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n")


def load(path: Path) -> Report:
    """Return the report in a file of `save`.

    Raises:
        ValueError: The file has another form.
    """
    read: Mapping[str, Any] = json.loads(path.read_text())
    if not isinstance(read, dict) or read.get("form") != FORM:
        raise ValueError(f"{path} is not a report of bench.quick or bench.peers (form {FORM})")
    columns = {
        name: Column(
            column["version"],
            column["settings"],
            {row: Series(**one) for row, one in column["figures"].items()},
        )
        for name, column in read["columns"].items()
    }
    return Report(dict(read["machine"]), columns, list(read["failures"]))
