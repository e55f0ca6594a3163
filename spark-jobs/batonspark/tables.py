"""The tables the jobs write, where they lie, and how they are kept small."""

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
        ddl: Its columns.
        settled: Whether rows of past days only are compacted, since those of today are rewritten.
    """

    name: Name
    ddl: str
    settled: bool = False

    @property
    def schema(self) -> StructType:
        """Its columns as Spark has them."""
        return struct(self.ddl)


BRONZE = Table("bronze", f"{schemas.METRICS}, date DATE")
ROLLUP = Table("rollup", rollup.ROLLUP, settled=True)
LATENCY = Table("latency", latency.LATENCY, settled=True)
ALERTS = Table("alerts", alerts.ALERTS)
TABLES = (BRONZE, ROLLUP, LATENCY, ALERTS)


@dataclass(frozen=True, slots=True)
class Warehouse:
    """A folder with tables and checkpoints."""

    root: str

    def table(self, table: Table) -> str:
        """Where a table lies."""
        return f"{self.root}/tables/{table.name}"

    def checkpoint(self, query: str, version: int) -> str:
        """Where a query keeps how far it is. Another version begins anew."""
        return f"{self.root}/checkpoints/{query}/v{version}"

    def ensure(self, *tables: Table) -> None:
        """Make the tables that are not there."""
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
    """Rows of whole minutes that take the place of what a table has of these minutes.

    Attributes:
        transaction: Who writes, and a number that rises with every write of theirs.
    """

    path: str
    minutes: Sequence[datetime]
    transaction: tuple[str, int]

    def done(self) -> bool:
        """Whether this write, or a later one, is in the table already."""
        return has_transaction(deltalake.DeltaTable(self.path), self.transaction)

    def apply(
        self, columns: Sequence[str], base: str, made: Callable[[pa.Table], pa.Table]
    ) -> None:
        """Read, make the new rows, and write them, in one transaction of the table.

        Args:
            columns: What is read of the rows that match `base`, a predicate.
            made: The new rows, from those that were read; called again if somebody else has
                written these minutes meanwhile.

        Raises:
            CommitFailedError: it was not possible in several tries.
        """
        where = _within(self.minutes)
        for attempt in range(1, ATTEMPTS_MAX + 1):
            table = deltalake.DeltaTable(self.path)
            if has_transaction(table, self.transaction):
                return  # somebody else has written the same meanwhile
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
                log.warning("table changed meanwhile path=%s attempt=%d", self.path, attempt)
            else:
                return


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """What keeping one table small has done."""

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
        vacuum_hours: Files are removed so long after they have left the table.
    """

    first: date
    vacuum_hours: int


def compact_table(
    path: str, table: Table, keeping: RetentionLimits, today: date
) -> CompactionResult:
    """Delete what is too old, join small files, and remove files that nobody reads any more."""
    delta = deltalake.DeltaTable(path)
    before = len(delta.file_uris())
    deleted = delta.delete(f"date < '{keeping.first}'")
    filters: list[tuple[str, str, Any]] = [("date", "<", str(today))]
    delta.optimize.compact(partition_filters=filters if table.settled else None)
    removed = delta.vacuum(keeping.vacuum_hours, dry_run=False, enforce_retention_duration=False)
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
    """Predicate of the rows of these minutes, as the engine of deltalake reads it."""
    dates = ", ".join(f"'{day}'" for day in sorted({minute.date() for minute in minutes}))
    starts = ", ".join(f"'{minute.isoformat()}'" for minute in sorted(minutes))
    return f"date IN ({dates}) AND minute IN ({starts})"
