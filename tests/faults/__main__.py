"""`python -m tests.faults`: one run against a real cluster, and its report in build/faults/.

    BATON_FAULT_SEED=17 BATON_FAULT_MINUTES=3 python -m tests.faults

The exit status is 1 if the history is not valid; then logs and journals stay in
build/faults/<seed>/.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

from pydantic import Field

from batonmq.common.config import Settings, load
from batonmq.local.cluster import to_stderr
from tests.faults.checker import check
from tests.faults.history import History
from tests.faults.member import SPAN_MAX
from tests.faults.plot import draw
from tests.faults.report import describe
from tests.faults.run import Plan, play

FOLDER = Path(__file__).parents[2] / "build" / "faults"


class FaultSettings(Settings):
    """Read from the environment."""

    seed: int = Field(1, ge=0)
    """What is drawn."""
    minutes: float = Field(3, gt=0)
    """How long faults are made."""


def write_report(history: History, seed: int, folder: Path) -> bool:
    """Judge a history and write `<seed>.json` and `<seed>.png`; whether it is valid."""
    reasons = check(history, SPAN_MAX)
    report = describe(history, reasons, seed)
    folder.mkdir(parents=True, exist_ok=True)
    draw(history, f"seed {seed}: {'invalid' if reasons else 'valid'}", folder / f"{seed}.png")
    (folder / f"{seed}.json").write_text(json.dumps(report, indent=2) + "\n")
    return not reasons


def main() -> None:
    """Play and judge."""
    settings = load(FaultSettings, "BATON_FAULT")
    folder = FOLDER / f"{settings.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    plan = Plan(seed=settings.seed, duration_s=60 * settings.minutes)
    history = asyncio.run(play(plan, folder, to_stderr))
    valid = write_report(history, settings.seed, FOLDER)
    print((FOLDER / f"{settings.seed}.json").read_text())
    if valid:
        shutil.rmtree(folder)
    sys.exit(0 if valid else 1)


if __name__ == "__main__":
    main()
