"""Goal: a stream of a Delta table has every added row once, despite other changes of the table.

Method: the reader alone, without a session, over tables that are appended to, compacted, vacuumed,
widened, and with a truncated log.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import DateType, LongType, StringType, StructType

from batonspark.delta_stream import CommitsLost, DeltaStreamReader, delta_read_options, delta_schema
from batonspark.options import BadOption

SCHEMA = StructType().add("n", LongType()).add("date", DateType())
Reader = DeltaStreamReader


def append(path: Path, numbers: Sequence[int], day: str = "2026-01-01") -> None:
    days = pa.array([date.fromisoformat(day)] * len(numbers))
    rows = pa.table({"n": pa.array(numbers, pa.int64()), "date": days})
    deltalake.write_deltalake(path, rows, mode="append", partition_by=["date"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table with three commits: 0 to 2, 3 to 5 and 6 to 8."""
    for first in (0, 3, 6):
        append(tmp_path, range(first, first + 3), f"2026-01-0{first // 3 + 1}")
    return tmp_path


def reader(path: Path, schema: StructType = SCHEMA, **options: str) -> Reader:
    return Reader(delta_read_options({"path": str(path), **options}), schema)


def numbers(of: Reader, begin: int, end: int) -> list[int]:
    parts = of.partitions({"version": begin}, {"version": end})
    return sorted(n for part in parts for rows in of.read(part) for n in rows["n"].to_pylist())


def test_rows_are_read_once_with_their_partition_values(path: Path) -> None:
    read = reader(path)
    assert read.initialOffset() == {"version": -1}
    assert read.latestOffset({"version": -1}, ReadAllAvailable()) == {"version": 2}
    assert numbers(read, -1, 2) == list(range(9))
    assert numbers(read, 0, 1) == [3, 4, 5]
    (part,) = read.partitions({"version": 0}, {"version": 1})
    assert [rows["date"].to_pylist() for rows in read.read(part)] == [[date(2026, 1, 2)] * 3]


def test_micro_batch_ends_with_the_commit_that_reaches_the_limit(path: Path) -> None:
    read = reader(path, maxRowsPerTrigger="4")
    assert isinstance(read.getDefaultReadLimit(), ReadMaxRows)
    assert read.latestOffset({"version": -1}, ReadMaxRows(4)) == {"version": 1}
    assert read.latestOffset({"version": 1}, ReadMaxRows(4)) == {"version": 2}
    assert read.latestOffset({"version": 2}, ReadMaxRows(4)) == {"version": 2}
    assert read.reportLatestOffset() == {"version": 2}


def test_available_now_ignores_later_commits(path: Path) -> None:
    read = reader(path)
    read.prepareForTriggerAvailableNow()
    append(path, [9])
    assert read.latestOffset({"version": 0}, ReadAllAvailable()) == {"version": 2}


def test_compaction_and_deletion_add_nothing(path: Path) -> None:
    append(path, [9], "2026-01-03")
    table = deltalake.DeltaTable(path)
    table.optimize.compact()
    table.delete("date = '2026-01-01'")
    append(path, [10])
    read = reader(path)
    assert read.latestOffset({"version": 3}, ReadMaxRows(1)) == {"version": 6}
    assert numbers(read, 3, 6) == [10]
    assert numbers(read, -1, 6) == list(range(11))


def test_starting_version_skips_earlier_commits(path: Path) -> None:
    read = reader(path, startingVersion="2")
    assert numbers(read, read.initialOffset()["version"], 2) == [6, 7, 8]


def test_table_with_a_truncated_log_is_read_as_a_whole(path: Path) -> None:
    deltalake.DeltaTable(path).create_checkpoint()
    for version in range(2):
        (path / "_delta_log" / f"{version:020d}.json").unlink()
    append(path, [9])
    read = reader(path)
    assert read.latestOffset({"version": -1}, ReadMaxRows(1)) == {"version": 3}
    assert numbers(read, -1, 3) == list(range(10))
    assert numbers(read, 2, 3) == [9]
    with pytest.raises(CommitsLost, match="commit 1"):
        read.partitions({"version": 0}, {"version": 3})


def test_compacted_and_vacuumed_table_is_read_as_a_whole_by_a_new_stream(path: Path) -> None:
    """The log still has the first commit, because it is kept for longer than removed files."""
    append(path, [9], "2026-01-03")
    table = deltalake.DeltaTable(path)
    table.optimize.compact()
    assert table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    append(path, [10])
    read, newest = reader(path), deltalake.DeltaTable(path).version()
    assert read.latestOffset({"version": -1}, ReadMaxRows(1)) == {"version": newest}
    assert numbers(read, -1, newest) == list(range(11))
    assert numbers(read, newest - 1, newest) == [10]


def test_file_vacuumed_before_it_was_read_is_an_error(path: Path) -> None:
    read = reader(path)
    (part,) = read.partitions({"version": 0}, {"version": 1})
    for file in path.glob("date=2026-01-02/*.parquet"):
        file.unlink()
    with pytest.raises(CommitsLost, match="vacuumed"):
        list(read.read(part))


def test_new_column_is_null_in_older_files(path: Path) -> None:
    wide = StructType().add("later", StringType()).add("n", LongType())
    read = reader(path, wide)
    (part,) = read.partitions({"version": 0}, {"version": 1})
    (rows,) = read.read(part)
    assert rows.to_pydict() == {"later": [None] * 3, "n": [3, 4, 5]}


def test_columns_are_those_of_the_option(path: Path) -> None:
    options = {"path": str(path), "columns": "date, n"}
    assert delta_schema(delta_read_options(options)).fieldNames() == ["date", "n"]
    with pytest.raises(BadOption, match="no column m"):
        delta_schema(delta_read_options({"path": str(path), "columns": "m"}))
    with pytest.raises(BadOption, match="no Delta table"):
        delta_schema(delta_read_options({"path": str(path / "nowhere")}))


@pytest.mark.parametrize(
    "options", [{}, {"path": "p", "colums": "n"}, {"path": "p", "maxRowsPerTrigger": "x"}]
)
def test_invalid_option_is_rejected(options: dict[str, str]) -> None:
    with pytest.raises(BadOption):
        delta_read_options(options)
