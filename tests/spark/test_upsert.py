"""Goal: a micro-batch is added to a table once, even if two processes write it at once.

Method: the second writer starts while the first one makes its rows.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import deltalake
import pyarrow as pa

from batonspark.tables import Upsert

MINUTE = datetime(2026, 1, 1, 12, tzinfo=UTC)
SCHEMA = pa.schema(
    [("date", pa.date32()), ("minute", pa.timestamp("us", tz="UTC")), ("n", pa.int64())]
)


def rows(n: int) -> pa.Table:
    return pa.Table.from_pylist([{"date": MINUTE.date(), "minute": MINUTE, "n": n}], SCHEMA)


def add(path: str, first: Upsert, second: Upsert) -> tuple[list[str], list[int]]:
    """Let two writers add 1 to a row, `second` during `first`; return the writers and the row."""
    deltalake.write_deltalake(path, rows(5), partition_by=["date"])
    made: list[str] = []

    def added(rows_before: pa.Table, writer: str) -> pa.Table:
        made.append(writer)
        if made == ["first"]:
            second.apply(SCHEMA.names, "true", lambda before: added(before, "second"))
        return rows(sum(rows_before["n"].to_pylist()) + 1)

    first.apply(SCHEMA.names, "true", lambda before: added(before, "first"))
    table = pa.table(deltalake.DeltaTable(path).scan(["n"]).read_all())
    return made, [row["n"] for row in table.to_pylist()]


def test_micro_batch_written_by_two_processes_is_added_once(tmp_path: Path) -> None:
    path = str(tmp_path / "table")
    again = Upsert(path, [MINUTE], ("query", 7))
    assert add(path, again, again) == (["first", "second"], [6])


def test_upsert_adds_to_rows_of_another_writer(tmp_path: Path) -> None:
    path = str(tmp_path / "table")
    one, other = (Upsert(path, [MINUTE], (query, 7)) for query in ("one", "other"))
    assert add(path, one, other) == (["first", "second", "first"], [7])
