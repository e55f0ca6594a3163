"""Write windows: merge the events of a micro-batch with the stored windows of their minutes.

Each of the two tables stores the number of its last micro-batch in the same commit as its rows, so
a micro-batch repeated after a crash changes nothing. Late events change their window at any age.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

import deltalake
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema

from batonspark import latency, rollup
from batonspark.event_columns import struct
from batonspark.tables import BRONZE, LATENCY, ROLLUP, Table, Upsert, Warehouse

COLUMNS = (
    "source, kind, time, topic, consumer_group, broker, queue_id, next_offset, committed_offset,"
    " delivered_offset, count, byte_count, filtered_count, redelivered_count, duration_ms,"
    " operation, first_bucket, buckets, value_sum, attrs, store_time"
)
"""The columns of bronze that windows need."""


@dataclass(frozen=True, slots=True)
class WindowTable:
    """A table of windows and the functions that fill it.

    Attributes:
        base: Columns of the measures, as DDL.
        base_predicate: Predicate of the rows of the table that have the measures of 10 s.
        fold_events: Makes folded measures from events.
        make_rows: Makes rows of the table from folded measures of whole minutes.
    """

    table: Table
    base: str
    base_predicate: str
    fold_events: Callable[[DataFrame], DataFrame]
    make_rows: Callable[[DataFrame], DataFrame]


WINDOWS = (
    WindowTable(
        ROLLUP,
        rollup.BASE,
        "window_s = 10 AND level = 'queue'",
        lambda events: rollup.fold(rollup.measures(events)),
        rollup.windows,
    ),
    WindowTable(
        LATENCY,
        latency.BASE,
        "window_s = 10",
        lambda events: latency.fold(latency.measures(events)),
        latency.windows,
    ),
)


@dataclass(frozen=True, slots=True)
class WindowWriter:
    """Writes the windows of each micro-batch.

    Attributes:
        query_id: Returns the id of the streaming query.
    """

    warehouse: Warehouse
    query_id: Callable[[], str]

    def write(self, events: DataFrame, batch_id: int) -> None:
        """Add the events of a micro-batch to both tables."""
        events.persist()
        try:
            for windows in WINDOWS:
                self._add(windows, events, batch_id)
        finally:
            events.unpersist()

    def _add(self, windows: WindowTable, events: DataFrame, batch_id: int) -> None:
        path, transaction = self.warehouse.table(windows.table), (self.query_id(), batch_id)
        if Upsert(path, (), transaction).done():
            return
        schema = to_arrow_schema(struct(windows.base), timezone="UTC")
        fresh = windows.fold_events(events).toArrow().select(schema.names).cast(schema)
        if not fresh.num_rows:
            return
        session = events.sparkSession

        def made(found: pa.Table) -> pa.Table:
            base = pa.concat_tables([fresh, found.select(schema.names).cast(schema)])
            rows = windows.make_rows(session.createDataFrame(base, struct(windows.base))).toArrow()
            wanted = to_arrow_schema(windows.table.schema, timezone="UTC")
            return rows.select(wanted.names).cast(wanted)

        Upsert(path, _minutes(fresh), transaction).apply(schema.names, windows.base_predicate, made)


def delete_windows(warehouse: Warehouse) -> dict[str, str]:
    """Delete the windows of all days in bronze: a query without checkpoint recomputes them.

    Returns:
        `first_day`, the first of these days, if there is one. Bronze has events of the minute
        before it, because it is a day of store times. Their windows are kept and have them already.
    """
    table = deltalake.DeltaTable(warehouse.table(BRONZE))
    days = [str(value["date"]) for value in table.partitions() if value["date"]]
    if not days:
        return {}
    for windows in WINDOWS:
        path = warehouse.table(windows.table)
        deltalake.DeltaTable(path).delete(f"date >= '{min(days)}'")
    return {"first_day": min(days)}


def _minutes(rows: pa.Table) -> Sequence[datetime]:
    starts = pc.floor_temporal(rows.column("window_start"), unit="minute")
    return [start.as_py() for start in pc.unique(starts)]
