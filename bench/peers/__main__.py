"""`python -m bench.peers`: BatonMQ beside Kafka, RocketMQ and NATS, by turns on this machine.

Programs of the peers are downloaded to ~/.cache/batonmq-peers. A peer that can't be started is
reported, and the others are measured. The exit status is 1 if BatonMQ itself failed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.pages import DOCS, replace_part
from bench.peers.brokers import BROKERS, BatonMq
from bench.peers.figures import Report, markdown, save, table
from bench.peers.runner import Sizes, run

_FULL, _QUICK = Sizes(seconds=5, rounds=3), Sizes(seconds=1, rounds=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, return the exit status."""
    parser = argparse.ArgumentParser(
        prog="bench.peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=BROKERS, default=list(BROKERS), help="measure only these"
    )
    parser.add_argument("--rounds", type=int, help=f"rounds; default {_FULL.rounds}")
    parser.add_argument(
        "--seconds", type=float, help=f"duration of each step; default {_FULL.seconds:g}"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{_QUICK.rounds} round, steps of {_QUICK.seconds:g} s: to test the bench itself",
    )
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure; default: the temporary folder"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument(
        "--page", action="store_true", help="put the table on docs/explanation/other-brokers.md too"
    )
    chosen = parser.parse_args(arguments)
    defaults = _QUICK if chosen.quick else _FULL
    sizes = Sizes(chosen.seconds or defaults.seconds, chosen.rounds or defaults.rounds)
    console = Console()
    machine = describe_machine(sizes)
    brokers = [BROKERS[name]() for name in chosen.only]
    report = asyncio.run(run(brokers, sizes, chosen.folder, console.log))
    report.machine = machine
    show(console, report)
    if chosen.json:
        save(chosen.json, report)
    if chosen.page:
        replace_part(DOCS / "explanation" / "other-brokers.md", markdown(report))
    return exit_status(report)


def exit_status(report: Report) -> int:
    """Return 1 if BatonMQ failed; a peer that failed changes nothing."""
    return int(any(failure.startswith(f"{BatonMq.name}:") for failure in report.failures))


def describe_machine(sizes: Sizes) -> dict[str, str]:
    """Return the machine and the sizes of the run, for the report."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "Machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, "
        f"Python {platform.python_version()}",
        "Load before the run (1, 5, 15 min)": load,
        "Run": f"{datetime.now(UTC):%Y-%m-%d}, rounds: {sizes.rounds}, {sizes.seconds:g} s a step; "
        "median (smallest-largest) of the rounds",
    }


def show(console: Console, report: Report) -> None:
    """Print the table, and loudly what was not measured."""
    head, *lines = table(report)
    shown = Table(*head)
    for line in lines:
        shown.add_row(*line)
    console.print(shown)
    for name, value in report.machine.items():
        console.print(f"{name}: {value}")
    for name, column in report.columns.items():
        console.print(f"{name} {column.version}: {column.settings}")
    for failure in report.failures:
        console.print(f"[bold red]NOT MEASURED[/] {failure}", highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
