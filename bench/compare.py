"""`python -m bench.compare BEFORE AFTER`: compare two files of `bench.quick` or `bench.peers`.

A change within the spread of the rounds is shown as none: the ranges of the two runs overlap.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.peers.figures import Report, Series, load

_STYLES = {"better": "green", "worse": "red", "none": ""}


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both runs.

    Attributes:
        broker: Name of the column.
        row: Name of the figure.
    """

    broker: str
    row: str
    before: Series
    after: Series

    @property
    def ratio(self) -> float | None:
        """Median after by median before; None if that is zero."""
        return self.after.median / self.before.median if self.before.median else None

    @property
    def verdict(self) -> str:
        """`better` or `worse` if all rounds of one run are beyond those of the other."""
        if min(self.after.values) > max(self.before.values):
            return "better" if self.after.more_is_better else "worse"
        if max(self.after.values) < min(self.before.values):
            return "worse" if self.after.more_is_better else "better"
        return "none"


def changes(before: Report, after: Report) -> list[Change]:
    """Return the figures that both reports have, with the CPU times first."""
    found = [
        Change(name, row, column.figures[row], after.columns[name].figures[row])
        for name, column in before.columns.items()
        if name in after.columns
        for row in column.figures
        if row in after.columns[name].figures
    ]
    return sorted(found, key=lambda change: not change.row.startswith("CPU "))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; return 1 if the runs have no figure in common."""
    parser = argparse.ArgumentParser(
        prog="bench.compare", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    chosen = parser.parse_args(arguments)
    try:
        found = changes(load(chosen.before), load(chosen.after))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    shown = Table("broker", "work", "unit", "before", "after", "ratio", "change")
    for change in found:
        ratio = "" if change.ratio is None else f"{change.ratio:.2f}"
        verdict = change.verdict
        shown.add_row(
            change.broker,
            change.row,
            change.before.unit,
            change.before.cell(),
            change.after.cell(),
            ratio,
            f"[{_STYLES[verdict]}]{verdict}[/]" if _STYLES[verdict] else verdict,
        )
    console = Console()
    console.print(shown)
    if not found:
        console.print("The runs have no figure in common.")
    return int(not found)


if __name__ == "__main__":
    raise SystemExit(main())
