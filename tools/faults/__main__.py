"""`python -m tools.faults`: one run against a real cluster, and its report in build/faults/.

    BATON_FAULT_SEED=17 BATON_FAULT_MINUTES=3 python -m tools.faults
    python -m tools.faults selection        every kind of fault once, in about three minutes
    python -m tools.faults one-way-cuts     one class of faults (named_schedules.py): one-way-cuts,
                                            two-steps, power-cuts, flipped-bits, busy, starvation
    python -m tools.faults page 17          the report of seed 17, in docs/explanation/faults/

Without a seed one is drawn and printed. The report of a named schedule is `<schedule>-<seed>`. The
run gets a private network, which needs Linux, `ip` and
the right to make namespaces (root has it, other users often do); without it, the run prints a
warning and does not cut the network. A schedule that needs what this machine does not allow ends
with status 2. The exit status is 1 if the history is not valid; then logs and journals stay in
build/faults/<seed>/.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from pydantic import Field

from batonmq._process.config import Settings, load
from batonmq_server.local import parent_death
from batonmq_server.local.cluster import to_stderr
from tools.faults.named_schedules import BUSY, SCHEDULES, NamedSchedule
from tools.faults.network import found_launcher
from tools.faults.page import write_page
from tools.faults.power import can_cut_power
from tools.faults.process_faults import FOLDER as FAULTS_FOLDER
from tools.faults.run import PROCESS_FAULTS

REPO = Path(__file__).parents[2]
FOLDER = REPO / "build" / "faults"
PAGES = REPO / "docs" / "explanation" / "faults"
NO_NETWORK = "WARNING: the network is not cut: no private network can be made here"


class FaultSettings(Settings):
    """Settings of a run, read from the environment."""

    seed: int = Field(default_factory=lambda: int.from_bytes(os.urandom(2)), ge=0)
    """Seed of the faults."""
    minutes: float = Field(3, gt=0)
    """Duration of the faults, in minutes."""
    busy: int = Field(BUSY, ge=0)
    """Processes that keep the processors busy, for `busy` and `starvation` only."""


def play(name: str, folder: Path, *arguments: str) -> int:
    """Run in a private network if possible; return the exit status.

    Args:
        name: Name of the report.
        folder: Folder of the reports; its folder `<name>` is replaced.
        arguments: Arguments for `tools.faults.runner`.
    """
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / name).mkdir(parents=True)
    launcher = found_launcher()
    if not launcher:
        to_stderr(NO_NETWORK)
    environment = [
        # The services with faulty disks are modules of this repository.
        f"PYTHONPATH={REPO}:{REPO / 'gen'}",
        f"TMPDIR={folder / name}",  # reservations of ports are valid in this network only
        f"{FAULTS_FOLDER}={folder / name / PROCESS_FAULTS}",
    ]
    options = ["--network"] if launcher else []
    tied = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid())]
    run = [sys.executable, "-m", "tools.faults.runner", name, str(folder), *options, *arguments]
    command = [*tied, *launcher, "/usr/bin/env", *environment, *run]
    return subprocess.run(command, cwd=REPO, check=False).returncode


def main() -> None:
    """Read the command line and the environment, and execute the verb."""
    parser = argparse.ArgumentParser(prog="tools.faults", description=__doc__)
    verbs = ["play", "selection", *SCHEDULES, "page"]
    parser.add_argument("verb", nargs="?", default="play", choices=verbs)
    parser.add_argument("names", nargs="*", help="names of the reports to make pages of")
    options = parser.parse_args()
    if options.verb == "page":
        print(write_page([FOLDER / f"{name}.json" for name in options.names], PAGES))
        return
    settings = load(FaultSettings, "BATON_FAULT")
    if options.verb == "selection":
        sys.exit(play("selection", FOLDER))
    to_stderr(f"seed {settings.seed}, {settings.minutes:g} minutes")
    drawn = ["--seed", str(settings.seed), "--minutes", str(settings.minutes)]
    if options.verb == "play":
        sys.exit(play(str(settings.seed), FOLDER, *drawn))
    if missing := _missing(SCHEDULES[options.verb]):
        to_stderr(f"{options.verb} can't run: {missing}")
        sys.exit(2)
    drawn += ["--schedule", options.verb, "--busy", str(settings.busy)]
    sys.exit(play(f"{options.verb}-{settings.seed}", FOLDER, *drawn))


def _missing(schedule: NamedSchedule) -> str:
    """Return what a schedule needs and this machine does not allow; empty if it can run."""
    if schedule.cuts and not found_launcher():
        return "no private network can be made here: it takes Linux, `ip` and the right to it"
    if schedule.power and not can_cut_power():
        return "no image can be mounted here: it takes root, loop devices and `mkfs.ext4`"
    return ""


if __name__ == "__main__":
    main()
