"""`python -m tools.fuzz`: arbitrary requests to each service of a local cluster.

Prints the outcomes per service, each call that broke the error contract, and the time of a send
beside the calls. The exit status is 1 if a call broke the contract or a process ended; then the
logs of the cluster stay in build/fuzz/logs.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from pathlib import Path
from statistics import quantiles

from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from tools.fuzz.run import FuzzResult, run_fuzz

FOLDER = Path(__file__).parents[2] / "build" / "fuzz"
_SHOWN_MAX = 20
_NODES = 3
"""Nodes of each set: only a node with replicas serves the calls of replication."""


async def _run(folder: Path, seed: int, calls: int) -> FuzzResult:
    options = ClusterOptions(
        storage_replicas=_NODES, offsets=_NODES, auto_restart=False, log_level="WARNING"
    )
    async with LocalCluster(folder, options) as cluster:
        return await run_fuzz(cluster, seed, calls)


def _print(result: FuzzResult) -> None:
    for service, outcome in result.services.items():
        counts = ", ".join(f"{name} {count}" for name, count in outcome.outcomes.most_common())
        print(f"{service}: {outcome.outcomes.total()} calls: {counts}")
        for problem in outcome.problems[:_SHOWN_MAX]:
            print(f"  BROKEN: {problem}")
        if len(outcome.problems) > _SHOWN_MAX:
            print(f"  and {len(outcome.problems) - _SHOWN_MAX} more")
    for name in result.restarted:
        print(f"{name}: the process ended")
    cuts = quantiles(result.probe_ms, n=100)
    sends = f"{len(result.probe_ms)} sends beside the calls"
    print(
        f"{sends}: p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms, max {max(result.probe_ms):.1f} ms"
    )


def main() -> None:
    """Read the command line, run, and print."""
    parser = argparse.ArgumentParser(prog="tools.fuzz", description=__doc__)
    parser.add_argument("--calls", type=int, default=20_000, help="to each service")
    parser.add_argument("--seed", type=int, default=15)
    options = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    result = asyncio.run(_run(FOLDER, options.seed, options.calls))
    _print(result)
    for each in FOLDER.iterdir():
        if each.is_dir() and (result.ok or each.name != "logs"):
            shutil.rmtree(each)
    sys.exit(0 if result.ok else 1)


if __name__ == "__main__":
    main()
