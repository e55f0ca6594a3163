"""Keeps the tables small: what is too old goes, small files are joined, loose ones removed."""

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
    """Go over all tables once; between two of them the process may end."""
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


def _days(settings: JobSettings, table: Table) -> int:
    return {
        "bronze": settings.bronze_retention_days,
        "alerts": settings.alerts_retention_days,
    }.get(table.name, settings.rollup_retention_days)


def _tell(tidied: CompactionResult) -> None:
    log.info(
        "table tidied table=%s files_before=%d files_after=%d deleted_rows=%d removed_files=%d",
        tidied.table,
        tidied.files_before,
        tidied.files_after,
        tidied.deleted_rows,
        tidied.removed_files,
    )
