"""`python -m bench.quick`: CPU time of a message, to compare before and after a change.

One local cluster, the same work as `python -m bench.peers`, three short rounds, under two minutes.
CPU time changes least with other load of the machine; rates and delays change most. Compare two
files of `--json` with `python -m bench.compare BEFORE AFTER`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.peers.__main__ import describe_machine, exit_status, show
from bench.peers.brokers import BatonMq
from bench.peers.figures import Report, save
from bench.peers.runner import Sizes, run
from bench.peers.steps import MEMORY, cost_rows

SIZES = Sizes(seconds=1, rounds=3, fsync=False)


def cost_table(report: Report) -> Table:
    """Return one line per step with its CPU time; a second per million is a microsecond each."""
    shown = Table("µs of CPU per message", "clients", "servers")
    column = report.columns.get(BatonMq.name)
    for step in MEMORY if column else ():
        cells = [
            column.figures[row].cell() if column and row in column.figures else ""
            for row in cost_rows(step)
        ]
        if any(cells):
            shown.add_row(step.title, *cells)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the figures, return the exit status."""
    parser = argparse.ArgumentParser(
        prog="bench.quick", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure; default: the temporary folder"
    )
    chosen = parser.parse_args(arguments)
    console = Console()
    machine = describe_machine(SIZES)
    report = asyncio.run(run([BatonMq()], SIZES, chosen.folder, console.log))
    report.machine = machine
    console.print(cost_table(report))
    show(console, report)
    if chosen.json:
        save(chosen.json, report)
    return exit_status(report)


if __name__ == "__main__":
    raise SystemExit(main())
