"""`baton demo`: a real data set, queues that change owners, and a check of the result."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import click
from click.exceptions import Exit

from batonmq.cli.command_classes import command
from batonmq.cli.output import OutputFormat
from batonmq.cli.progress import ProgressLine
from batonmq.cli.session import CommandSession, local_session, open_session
from batonmq.cli.text_table import column_widths, format_rows
from batonmq_server.demo.demo_run import CARRIERS, SIZES, DemoResult, DemoStalled, run_demo
from batonmq_server.demo.flights import DatasetMissing, load_flights
from batonmq_server.demo.member_processes import MemberFailed
from batonmq_server.local.cluster import ClusterFailed, LocalCluster
from batonmq_server.local.etcd import EtcdNotFound
from batonmq_server.local.layout import ClusterOptions
from batonmq_server.local.ports import ClusterDirInUse, NoFreePort


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the demo.

    Attributes:
        nameserver: Address of a running cluster; None to start one.
        data_dir: Data directory of the demo's own cluster; None for a temporary one.
        folder: Temporary folder of the demo.
        pace: Messages that a member handles per second, at most; 0 for no limit.
    """

    nameserver: str | None
    data_dir: Path | None
    folder: Path
    pace: int


@command("demo")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the figures to this file, too.",
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Data directory of the demo's own cluster; by default a temporary one.",
)
@click.option("--nameserver", metavar="HOST:PORT", help="Use a running cluster and start none.")
@click.option(
    "--pace",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Messages that a member handles per second, at most; 0: no limit.",
)
@local_session
def demo(
    session: CommandSession,
    json_file: Path | None,
    data_dir: Path | None,
    nameserver: str | None,
    pace: int,
) -> None:
    """Publish all New York flights of 2013, consume them while members join and leave, and check.

    Exit status 1 unless no message was lost, none was handled twice, and the order was kept.
    """
    if nameserver is not None:
        form = session.output.form.value
        session = open_session(click.get_current_context(), nameserver, form)
    with tempfile.TemporaryDirectory(prefix="baton-demo-") as folder:
        options = DemoOptions(nameserver, data_dir, Path(folder), pace)
        try:
            result = session.run(_demo(session, options))
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
    _show(session, result)
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_dict(), indent=2) + "\n")
    if not result.ok:
        raise Exit(1)


async def _demo(session: CommandSession, options: DemoOptions) -> DemoResult:
    flights = load_flights()
    async with AsyncExitStack() as stack:
        nameserver = options.nameserver
        if nameserver is None:
            cluster = LocalCluster(options.data_dir or options.folder / "cluster", ClusterOptions())
            await stack.enter_async_context(cluster)
            nameserver = cluster.nameserver
        session.output.note(f"watch it from another terminal: export BATON_NAMESERVER={nameserver}")
        security = session.security if options.nameserver else None
        journals = options.folder / "journals"
        return await run_demo(
            nameserver, flights, journals, _Phases().show, pace=options.pace, security=security
        )


class _Phases:
    """One line on standard error per phase of the demo, redrawn while the phase lasts."""

    def __init__(self) -> None:
        self._name = ""
        self._line: ProgressLine | None = None

    def show(self, name: str, done: int, total: int) -> None:
        """Show how far a phase is; a phase that is complete stays on the terminal."""
        if not sys.stderr.isatty():
            return
        if name != self._name or self._line is None:
            self._name, self._line = name, ProgressLine(name, total)
        if done < total:
            self._line.update(done)
        else:
            self._line.draw(done)
            sys.stderr.write("\n")
            ProgressLine.shown = None
            self._line = None


def _show(session: CommandSession, result: DemoResult) -> None:
    if session.output.form is OutputFormat.JSON:
        print(json.dumps(result.as_dict(), indent=2))
        return
    carriers = " and ".join(CARRIERS)
    rows = (
        ("published", f"{result.published:,}"),
        ("consumed", f"{result.consumed:,}"),
        ("lost", f"{result.lost:,}"),
        ("duplicated", f"{result.duplicated:,}"),
        ("out of order per queue", f"{result.misordered:,}"),
        (f"members {' → '.join(map(str, SIZES))}, hand-overs", f"{result.handovers}"),
        (
            "hand-over p50 / p99 / max",
            f"{result.handover_p50_ms} / {result.handover_p99_ms} / {result.handover_max_ms} ms",
        ),
        ("publish rate", f"{result.publish_rate:,} msg/s"),
        ("consume rate", f"{result.consume_rate:,} msg/s"),
        (f"group of {carriers}: expected", f"{result.filtered_expected:,}"),
        (f"group of {carriers}: consumed", f"{result.filtered_consumed:,}"),
        (f"group of {carriers}: wrong", f"{result.filtered_wrong:,}"),
    )
    print("\n".join(format_rows(rows, column_widths(rows, [0, 0]), right=(1,))))
    print("OK: nothing lost, nothing twice." if result.ok else "FAILED: see the figures above.")
