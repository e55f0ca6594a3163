"""`python -m tools.faults.runner`: the run itself; `tools.faults` makes the environment."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from batonmq_server.local.cluster import to_stderr
from tools.faults.checker import check
from tools.faults.history import History
from tools.faults.member import SPAN_MAX
from tools.faults.named_schedules import SCHEDULES
from tools.faults.network import Network
from tools.faults.plot import draw
from tools.faults.report import describe
from tools.faults.run import RunPlan, play
from tools.faults.selection import selection

LONGEST_S = 600
NOT_CUT = "the network was not cut: no private network could be made"


def write_report(history: History, name: str, folder: Path) -> bool:
    """Check a history, write `<name>.json` and `<name>.png`; return whether it is valid."""
    reasons = check(history, SPAN_MAX)
    report = describe(history, reasons, name)
    folder.mkdir(parents=True, exist_ok=True)
    draw(history, f"{name}: {'invalid' if reasons else 'valid'}", folder / f"{name}.png")
    (folder / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    return not reasons


def main() -> None:
    """Run, check and report."""
    parser = argparse.ArgumentParser(prog="tools.faults.runner", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--network", action="store_true", help="this process runs in a private network namespace"
    )
    parser.add_argument("--seed", type=int, help="without a seed the selection runs")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--schedule", choices=[*SCHEDULES])
    parser.add_argument("--busy", type=int, help="instead of the schedule's number of processes")
    options = parser.parse_args()
    network = Network() if options.network else None
    if options.seed is None:
        groups = selection(cuts=network is not None)
        plan = RunPlan(seed=1, duration_s=LONGEST_S, groups=groups, churns=False)
    else:
        schedule = SCHEDULES.get(options.schedule)
        if schedule is not None and schedule.busy and options.busy is not None:
            schedule = replace(schedule, busy=options.busy)
        plan = RunPlan(
            seed=options.seed,
            duration_s=60 * options.minutes,
            schedule=schedule,
            churns=not schedule,
        )
    folder = options.folder / options.name
    history = asyncio.run(play(plan, folder, to_stderr, network))
    if network is None:
        history.notes = [NOT_CUT, *history.notes]
    valid = write_report(history, options.name, options.folder)
    print((options.folder / f"{options.name}.json").read_text())
    if valid:
        shutil.rmtree(folder)
    sys.exit(0 if valid else 1)


if __name__ == "__main__":
    main()
