"""Compaction of the tables: delete old rows, join small files, remove unused files."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

from deltalake import DeltaTable

from batonmq._common.clock import Clock
from batonspark.settings import JobSettings
from batonspark.tables import (
    TABLES,
    CompactionResult,
    RetentionLimits,
    Table,
    Warehouse,
    compact_table,
)

log = logging.getLogger(__name__)


def compact(settings: JobSettings, ended: threading.Event) -> bool:
    """Compact all tables once; stop between two tables if the process has to end."""
    warehouse = Warehouse(str(Path(settings.data_dir).absolute()))
    today = datetime.fromtimestamp(Clock().unix_ms() / 1000, UTC).date()
    for table in TABLES:
        path = warehouse.table(table)
        if ended.is_set():
            break
        if DeltaTable.is_deltatable(path):
            first = today - timedelta(days=_days(settings, table))
            _tell(compact_table(path, table, RetentionLimits(first, settings.vacuum_hours), today))
    return True


def compact_regularly(settings: JobSettings, ended: threading.Event) -> None:
    """Compact all tables every `compact_hours`, until the process has to end; for a thread."""
    while not ended.wait(settings.compact_hours * 3600):
        try:
            compact(settings, ended)
        except Exception:
            log.warning("tables are not compacted", exc_info=True)


def _days(settings: JobSettings, table: Table) -> int:
    return {
        "bronze": settings.bronze_retention_days,
        "alerts": settings.alerts_retention_days,
    }.get(table.name, settings.rollup_retention_days)


def _tell(result: CompactionResult) -> None:
    log.info(
        "table compacted table=%s files_before=%d files_after=%d deleted_rows=%d removed_files=%d",
        result.table,
        result.files_before,
        result.files_after,
        result.deleted_rows,
        result.removed_files,
    )
