"""`python -m bench`: measures, shows a table, writes `bench/results.json` and the docs."""

from __future__ import annotations

import argparse
import asyncio
import gc
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench import (
    access,
    compaction,
    consumers,
    core,
    delay,
    events,
    failovers,
    gateway,
    growth,
    memory,
    order_by_key,
    ownership,
    pages,
    pulls,
    rebuilds,
    replication,
    requests,
    scaling,
    spark,
    starvation,
    streams,
    tls,
    transactions,
    transforms,
    trickle,
    viewers,
    wire,
)
from bench import start_times as starts
from bench.figures import Figure, write
from bench.setup import Setup

RESULTS = Path(__file__).with_name("results.json")
BENCHES: dict[str, Callable[[Setup], Awaitable[list[Figure]]]] = {
    "append": core.append,
    "scan": core.scan,
    "growth": growth.growth,
    "wire": wire.appends,
    "latency": wire.latency,
    "sends": wire.sends,
    "trickle": trickle.trickle,
    "pulls": pulls.pulls,
    "scaling": scaling.scaling,
    "consumers": consumers.consumers,
    "keys": order_by_key.order_by_key,
    "memory": memory.memory,
    "starts": starts.starts,
    "rebuilds": rebuilds.rebuilds,
    "replication": replication.replication,
    "requests": requests.requests,
    "transactions": transactions.transactions,
    "transform": transforms.transforms,
    "compaction": compaction.compaction,
    "delays": delay.delays,
    "failovers": failovers.failovers,
    "starvation": starvation.starvation,
    "handovers": ownership.handovers,
    "checks": ownership.checks,
    "consumption": ownership.consumption,
    "events": events.events,
    "spark": spark.spark,
    "keep-alives": ownership.keep_alives,
    "streams": streams.streams,
    "tls": tls.tls,
    "access": access.access,
    "gateway": gateway.gateway,
    "console": viewers.viewers,
}


def main() -> None:
    """Run the selected benchmarks."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHES, help="run only these")
    parser.add_argument("--quick", action="store_true", help="small sizes; no results are written")
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure; default: the temporary folder"
    )
    chosen = parser.parse_args()
    console = Console()
    gc.collect()
    gc.freeze()  # so that garbage collections skip the imported modules
    figures: list[Figure] = []

    def found(more: list[Figure]) -> None:
        figures.extend(more)
        if not chosen.quick:
            write(RESULTS, more)

    names = chosen.only or list(BENCHES)
    asyncio.run(_run(names, found, console, quick=chosen.quick, parent=chosen.folder))
    console.print(pages.table(figures))
    if not chosen.quick:
        pages.write_docs(RESULTS)


async def _run(
    names: Sequence[str],
    found: Callable[[list[Figure]], None],
    console: Console,
    *,
    quick: bool,
    parent: Path | None,
) -> None:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name in names:
            task = progress.add_task(name, total=1)
            folder = Path(tempfile.mkdtemp(prefix="baton-bench-", dir=parent))
            try:
                setup = Setup(
                    folder,
                    quick,
                    lambda text, task=task, name=name: progress.update(  # type: ignore[misc]
                        task, description=f"{name}: {text}"
                    ),
                )
                found(await BENCHES[name](setup))
            finally:
                shutil.rmtree(folder)
            progress.update(task, description=name, completed=1)


if __name__ == "__main__":
    main()
