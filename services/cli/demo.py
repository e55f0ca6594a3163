"""`baton demo`: a real data set, queues on the move, and a verdict."""

from __future__ import annotations

import json
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click
from click.exceptions import Exit
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from batonmq.cli.output import OutputFormat
from batonmq.cli.session import CommandSession, local_session, open_session
from batonmq_server.demo.demo_run import CARRIERS, SIZES, DemoResult, DemoStalled, run_demo
from batonmq_server.demo.flights import DatasetMissing, load_flights
from batonmq_server.demo.member_processes import MemberFailed
from batonmq_server.local.cluster import ClusterFailed, LocalCluster
from batonmq_server.local.etcd import EtcdNotFound
from batonmq_server.local.layout import ClusterOptions
from batonmq_server.local.ports import ClusterDirInUse, NoFreePort


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the demo plays."""

    nameserver: str | None
    data_dir: Path | None
    folder: Path
    pace: int


@click.command("demo")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the numbers here too.",
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the demo's own cluster keeps everything.",
)
@click.option("--nameserver", metavar="HOST:PORT", help="Use a cluster that is up and start none.")
@click.option(
    "--pace",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Messages a member handles in a second; 0: no limit.",
)
@local_session
def demo(
    session: CommandSession,
    json_file: Path | None,
    data_dir: Path | None,
    nameserver: str | None,
    pace: int,
) -> None:
    """Publish all New York flights of 2013, consume them while members come and go, and check.

    Exit status 1 unless nothing was lost, nothing came twice and everything was in order.
    """
    with tempfile.TemporaryDirectory(prefix="baton-demo-") as folder:
        try:
            results: list[DemoResult] = []
            stage = Stage(nameserver, data_dir, Path(folder), pace)
            session.run(_demo(session, stage, results))
        except (
            DemoStalled,
            MemberFailed,
            ClusterFailed,
            EtcdNotFound,
            NoFreePort,
            ClusterDirInUse,
        ) as error:
            session.output.failure("DEMO_FAILED", str(error), "")
            raise Exit(1) from error
        except DatasetMissing as error:
            session.output.failure("NO_DATASET", str(error), "")
            raise Exit(1) from error
    (result,) = results
    _show(session, result)
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_dict(), indent=2) + "\n")
    if not result.ok:
        raise Exit(1)


async def _demo(session: CommandSession, stage: Stage, results: list[DemoResult]) -> None:
    flights = load_flights()
    async with AsyncExitStack() as stack:
        nameserver = stage.nameserver
        if nameserver is None:
            cluster = LocalCluster(stage.data_dir or stage.folder / "cluster", ClusterOptions())
            await stack.enter_async_context(cluster)
            nameserver = cluster.nameserver
        session.output.note(f"watch it from another terminal: export BATON_NAMESERVER={nameserver}")
        rows: dict[str, TaskID] = {}
        bar = stack.enter_context(_progress())

        def tell(what: str, done: int, total: int) -> None:
            if what not in rows:
                rows[what] = bar.add_task(what, total=total)
            bar.update(rows[what], completed=done, total=total)

        journals = stage.folder / "journals"
        security = session.security if stage.nameserver else None
        played = run_demo(nameserver, flights, journals, tell, pace=stage.pace, security=security)
        results.append(await played)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


def _show(session: CommandSession, result: DemoResult) -> None:
    if session.output.form is OutputFormat.JSON:
        print(json.dumps(result.as_dict(), indent=2))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "published": f"{result.published:,}",
        "consumed": f"{result.consumed:,}",
        "lost": f"{result.lost:,}",
        "duplicated": f"{result.duplicated:,}",
        "out of order per queue": f"{result.misordered:,}",
        f"members {' → '.join(map(str, SIZES))}, hand-overs": f"{result.handovers}",
        "hand-over p50 / p99 / max": (
            f"{result.handover_p50_ms} / {result.handover_p99_ms} / {result.handover_max_ms} ms"
        ),
        "publish rate": f"{result.publish_rate:,} msg/s",
        "consume rate": f"{result.consume_rate:,} msg/s",
        f"group of {' and '.join(CARRIERS)}: expected": f"{result.filtered_expected:,}",
        f"group of {' and '.join(CARRIERS)}: consumed": f"{result.filtered_consumed:,}",
        f"group of {' and '.join(CARRIERS)}: wrong": f"{result.filtered_wrong:,}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    print("OK: nothing lost, nothing twice." if result.ok else "FAILED: see the numbers above.")
