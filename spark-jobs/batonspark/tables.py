"""The tables of the jobs: their schemas, folders, upserts and compaction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal

import deltalake
import pyarrow as pa
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import CommitProperties, Transaction
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from batonspark import alerts, latency, rollup, schemas
from batonspark.delta_files import has_transaction
from batonspark.event_columns import struct

log = logging.getLogger(__name__)

Name = Literal["bronze", "rollup", "latency", "alerts"]
ATTEMPTS_MAX = 5
_LOG_RETENTION = "interval 2 days"
_CHECKPOINT_INTERVAL = "100"


@dataclass(frozen=True, slots=True)
class Table:
    """One Delta table, partitioned by `date`.

    Attributes:
        ddl: Columns, as DDL.
        settled: Whether only past days are compacted, because rows of today are still rewritten.
    """

    name: Name
    ddl: str
    settled: bool = False

    @property
    def schema(self) -> StructType:
        """The columns as a Spark schema."""
        return struct(self.ddl)


BRONZE = Table("bronze", f"{schemas.METRICS}, date DATE")
ROLLUP = Table("rollup", rollup.ROLLUP, settled=True)
LATENCY = Table("latency", latency.LATENCY, settled=True)
ALERTS = Table("alerts", alerts.ALERTS)
TABLES = (BRONZE, ROLLUP, LATENCY, ALERTS)


@dataclass(frozen=True, slots=True)
class Warehouse:
    """The folder of tables and checkpoints."""

    root: str

    def table(self, table: Table) -> str:
        """Return the path of a table."""
        return f"{self.root}/tables/{table.name}"

    def checkpoint(self, query: str, version: int) -> str:
        """Return the path of the checkpoint of a query; each version has its own."""
        return f"{self.root}/checkpoints/{query}/v{version}"

    def ensure(self, *tables: Table) -> None:
        """Create the tables that do not exist."""
        for table in tables:
            Path(self.table(table)).mkdir(parents=True, exist_ok=True)
            schema = to_arrow_schema(table.schema, timezone="UTC")
            deltalake.DeltaTable.create(
                self.table(table),
                deltalake.Schema.from_arrow(schema),
                mode="ignore",
                partition_by=["date"],
                configuration={
                    "delta.logRetentionDuration": _LOG_RETENTION,
                    "delta.checkpointInterval": _CHECKPOINT_INTERVAL,
                },
            )


@dataclass(frozen=True, slots=True)
class Upsert:
    """Replaces the rows of whole minutes in a table.

    Attributes:
        transaction: Id of the writer, and a number that rises with each of its writes.
    """

    path: str
    minutes: Sequence[datetime]
    transaction: tuple[str, int]

    def done(self) -> bool:
        """Return whether the table has this write, or a later one of the same writer."""
        return has_transaction(deltalake.DeltaTable(self.path), self.transaction)

    def apply(
        self, columns: Sequence[str], base: str, made: Callable[[pa.Table], pa.Table]
    ) -> None:
        """Read rows, make the new rows and write them, in one transaction of the table.

        Args:
            columns: Columns that are read of the rows that match the predicate `base`.
            made: Makes the new rows from the rows that were read; called again if another
                writer changed these minutes in between.

        Raises:
            CommitFailedError: every attempt conflicted with another writer.
        """
        where = _within(self.minutes)
        for attempt in range(1, ATTEMPTS_MAX + 1):
            table = deltalake.DeltaTable(self.path)
            if has_transaction(table, self.transaction):
                return  # another process has made the same write
            found = pa.table(table.scan(list(columns), f"{where} AND {base}").read_all())
            try:
                deltalake.write_deltalake(
                    table,
                    made(found),
                    mode="overwrite",
                    predicate=where,
                    commit_properties=CommitProperties(
                        app_transactions=[Transaction(*self.transaction)]
                    ),
                )
            except CommitFailedError:
                if attempt == ATTEMPTS_MAX:
                    raise
                log.warning(
                    "table changed by another writer path=%s attempt=%d", self.path, attempt
                )
            else:
                return


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """What a compaction of one table changed."""

    table: str
    files_before: int
    files_after: int
    deleted_rows: int
    removed_files: int


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """How long rows and files are kept.

    Attributes:
        first: Rows of earlier days are deleted.
        vacuum_hours: Files are removed this long after they left the table.
    """

    first: date
    vacuum_hours: int


def compact_table(
    path: str, table: Table, limits: RetentionLimits, today: date
) -> CompactionResult:
    """Delete old rows, join small files, and remove files that left the table long ago."""
    delta = deltalake.DeltaTable(path)
    before = len(delta.file_uris())
    deleted = delta.delete(f"date < '{limits.first}'")
    filters: list[tuple[str, str, Any]] = [("date", "<", str(today))]
    delta.optimize.compact(partition_filters=filters if table.settled else None)
    removed = delta.vacuum(
        limits.vacuum_hours, dry_run=False, enforce_retention_duration=False, full=True
    )
    delta.create_checkpoint()
    delta.cleanup_metadata()
    return CompactionResult(
        table.name,
        before,
        len(delta.file_uris()),
        deleted.get("num_deleted_rows") or 0,
        len(removed),
    )


def _within(minutes: Sequence[datetime]) -> str:
    """Return the predicate of the rows of these minutes, in the syntax of deltalake."""
    dates = ", ".join(f"'{day}'" for day in sorted({minute.date() for minute in minutes}))
    starts = ", ".join(f"'{minute.isoformat()}'" for minute in sorted(minutes))
    return f"date IN ({dates}) AND minute IN ({starts})"
