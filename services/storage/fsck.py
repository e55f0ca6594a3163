"""Checks the data directory of a stopped node: `python -m batonmq_server.storage.fsck DIR`.

Exit status: 0 if the directory is clean or was repaired; 1 if there are problems, or if the
directory can't be examined (the reason is on standard error); 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from batonmq._common.clock import Clock
from batonmq.errors import BatonError
from batonmq_server.storage.core.fsck import Fsck, FsckReport
from batonmq_server.storage.core.recovery import decode_synced
from batonmq_server.storage.disk import InUse, RealDisk, locked
from batonmq_server.storage.node import SYNCED


def main(arguments: Sequence[str]) -> int:
    """Examine the directory, print the result and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="fsck", description="Examine the data directory of a stopped storage node."
    )
    parser.add_argument("dir", type=Path, help="the data directory")
    parser.add_argument(
        "--repair", action="store_true", help="rebuild the indexes; the log is never changed"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")
    chosen = parser.parse_args(arguments)
    as_json = chosen.format == "json"
    if not (chosen.dir / "log").is_dir():
        return _refuse("NOT_A_DATA_DIR", f"{chosen.dir} has no log", as_json=as_json)
    try:
        with locked(chosen.dir):
            return _examine(chosen.dir, repair=chosen.repair, as_json=as_json)
    except InUse as error:
        return _refuse("DATA_DIR_IN_USE", str(error), as_json=as_json)
    except BatonError as error:
        return _refuse(error.reason, error.message, as_json=as_json)
    except OSError as error:
        return _refuse("SYSTEM_ERROR", str(error), as_json=as_json)


def _examine(folder: Path, *, repair: bool, as_json: bool) -> int:
    clock = Clock()
    begin_ms = clock.unix_ms()
    disk = RealDisk(folder)
    fsck = Fsck(disk, decode_synced(disk.load(SYNCED)))
    report = fsck.run()
    if repair and (report.problem_count or not report.indexes_compared):
        fsck.repair()
    elapsed_ms = max(clock.unix_ms() - begin_ms, 0)
    if as_json:
        summary = {"folder": str(folder), "clean": not report.problem_count}
        print(json.dumps(summary | asdict(report) | {"elapsed_ms": elapsed_ms}, indent=2))
    else:
        print("\n".join(_lines(folder, report, elapsed_ms)))
    return 0 if not report.problem_count or report.repaired else 1


def _lines(folder: Path, report: FsckReport, elapsed_ms: int) -> list[str]:
    scanned = report.next_position - report.first_position
    lines = [
        f"{folder}: {report.batches} batches, {report.messages} messages, {report.queues} queues, "
        f"{report.segments} segments",
        f"log [{report.first_position}, {report.next_position}), synced to "
        f"{report.synced_position}, checkpoint at {report.checkpoint_position}; "
        f"{scanned} bytes in {elapsed_ms / 1000:.1f} s",
    ]
    if report.sections:
        lines.append(f"{report.sections} sections of compacted queues")
    lines += [f"note: {note}" for note in report.notes]
    lines += [f"problem: {problem.part}: {problem.detail}" for problem in report.problems]
    if (more := report.problem_count - len(report.problems)) > 0:
        lines.append(f"and {more} more problems")
    if report.repaired:
        lines.append("the indexes are rebuilt")
    elif not report.log_is_good:
        lines.append(
            "the log is damaged and can't be repaired here: restore the node from a replica "
            "or a backup"
        )
    elif report.problem_count:
        lines.append("--repair rebuilds the indexes")
    lines.append("clean" if not report.problem_count else f"{report.problem_count} problems")
    return lines


def _refuse(reason: str, message: str, *, as_json: bool) -> int:
    if as_json:
        described = {"reason": reason, "message": message, "remedy": ""}
        print(json.dumps({"error": described}), file=sys.stderr)
    else:
        print(f"error: {reason}: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
