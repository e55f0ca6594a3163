"""Common parts of the reports: the command line, the scope, its events and the output."""

from __future__ import annotations

import argparse
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from batonmq._process.config import ConfigError, ConfigProblem
from batonspark.app import run_job, session
from batonspark.event_columns import by_source_clock, event_time
from batonspark.settings import PREFIX, JobSettings
from batonspark.sink_delta import read_delta
from batonspark.tables import BRONZE, Warehouse

log = logging.getLogger(__name__)

LOOKBACK = timedelta(hours=24)
"""Events this much before the range are read too, because they explain the range."""
LOOKAHEAD = timedelta(seconds=30)
"""Events this much after the range are read too, because publishing takes about a second."""


@dataclass(frozen=True, slots=True)
class ReportScope:
    """Scope of a report; None is no bound. Times are UTC without a time zone.

    Attributes:
        until: Exclusive.
        first_offset, next_offset: Range of offsets of every queue; `next_offset` is exclusive.
    """

    since: datetime | None = None
    until: datetime | None = None
    group: str | None = None
    topic: str | None = None
    first_offset: int | None = None
    next_offset: int | None = None

    def of_subject(self, rows: DataFrame) -> DataFrame:
        """Return the rows of the group and the topic."""
        for name, value in (("consumer_group", self.group), ("topic", self.topic)):
            rows = rows if value is None else rows.where(F.col(name) == value)
        return rows

    def in_time(self, rows: DataFrame, column: str = "time") -> DataFrame:
        """Return the rows in the time range."""
        rows = rows if self.since is None else rows.where(F.col(column) >= F.lit(self.since))
        return rows if self.until is None else rows.where(F.col(column) < F.lit(self.until))

    def described(self) -> dict[str, str]:
        """Return the given bounds as text."""
        given = {
            "since": self.since,
            "until": self.until,
            "group": self.group,
            "topic": self.topic,
            "first_offset": self.first_offset,
            "next_offset": self.next_offset,
        }
        return {name: str(value) for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a report.

    Attributes:
        summary: Content of report.json.
        lines: Output on the terminal.
        rows: Content of the Parquet files in the folder `rows`.
        page: Content of report.html; empty for no page.
        ok: Whether the report found no problem; decides the exit status.
    """

    summary: Mapping[str, Any]
    lines: Sequence[str]
    rows: DataFrame
    page: str = ""
    ok: bool = True


def run_report(name: str, make: Callable[[DataFrame, ReportScope], Report]) -> None:
    """Run a report in this process, with the scope of the command line.

    The exit status is that of any job; it is also 1 if the report is not `ok`, and 2 if there is no
    table of events.
    """
    scope = parse_arguments(name)

    def job(settings: JobSettings, ended: threading.Event) -> bool:
        path = bronze_path(settings)
        with session(name, settings) as spark:
            folder = Path(settings.data_dir).absolute() / "reports" / name
            return _write(make(events(spark, path, scope), scope), folder)

    run_job(name, job)


def parse_arguments(name: str, given: Sequence[str] | None = None) -> ReportScope:
    """Return the scope of the command line; end the process if it is not valid."""
    parser = argparse.ArgumentParser(prog=name, description="See docs/reference/spark.md.")
    parser.add_argument("--since", type=_time, metavar="TIME", help="ISO 8601, UTC without a zone")
    parser.add_argument("--until", type=_time, metavar="TIME", help="exclusive")
    parser.add_argument("--group", help="only this consumer group")
    parser.add_argument("--topic", help="only this topic")
    parser.add_argument("--first-offset", type=int, help="only offsets from this one on")
    parser.add_argument("--next-offset", type=int, help="only offsets before this one")
    return ReportScope(**vars(parser.parse_args(given)))


def bronze_path(settings: JobSettings) -> str:
    """Return the path of the table of events.

    Raises:
        ConfigError: it does not exist.
    """
    path = Warehouse(str(Path(settings.data_dir).absolute())).table(BRONZE)
    if not DeltaTable.is_deltatable(path):
        name = f"{PREFIX}_DATA_DIR"
        text = (
            f"the table {path} does not exist. Set {name} to the folder of the jobs, or run "
            "batonspark.jobs.bronze first"
        )
        raise ConfigError(ConfigProblem(name, text))
    return path


def events(spark: SparkSession, path: str, scope: ReportScope) -> DataFrame:
    """Return the rows of bronze in the scope, with LOOKBACK before and LOOKAHEAD after it."""
    day = None if scope.since is None else (scope.since - LOOKBACK).date()
    rows = read_delta(spark, path, prune=f"date >= '{day}'" if day else None)
    return events_around(rows, scope)


def events_around(rows: DataFrame, scope: ReportScope) -> DataFrame:
    """Return the rows in the scope, with LOOKBACK before and LOOKAHEAD after; each event once.

    The store time is that of `by_source_clock`.
    """
    rows = by_source_clock(rows)
    if scope.since is not None:
        rows = rows.where(event_time() >= F.lit(scope.since - LOOKBACK))
    if scope.until is not None:
        rows = rows.where(event_time() < F.lit(scope.until + LOOKAHEAD))
    return rows.dropDuplicates(["producer_id", "seq", "event_index", "kind"])


def _write(report: Report, folder: Path) -> bool:
    report.rows.write.mode("overwrite").parquet(str(folder / "rows"))
    (folder / "report.json").write_text(json.dumps(report.summary, indent=2, default=str) + "\n")
    if report.page:
        (folder / "report.html").write_text(report.page)
    print("\n".join(report.lines))
    print(f"written to {folder}")
    return report.ok


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time.astimezone(UTC).replace(tzinfo=None) if time.tzinfo else time
