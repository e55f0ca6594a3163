"""`readStream.format("batondelta")`: read the rows that are added to a Delta table.

Offsets are versions of the table, so start and end determine the rows of a micro-batch. Only rows
that a commit adds are read: compaction adds none, and retention deletes rows that were read before.
A table whose first commit, or a file that a commit added, was removed is first read as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from batonspark.options import BadOption

PARTITIONS_MAX = 8
"""Maximum tasks of a micro-batch; its files are distributed over them."""
_ROWS_PER_BATCH = 8_192
_OPTIONS = {"path", "columns", "maxrowspertrigger", "startingversion"}
Offset = dict[str, int]


class CommitsLost(Exception):
    """The log or the files that the stream has to read next were removed."""


@dataclass(frozen=True)
class AddedFile:
    """A file that a commit added.

    Attributes:
        partition: Values of the partition columns, as text.
    """

    path: str
    row_count: int
    partition: Mapping[str, str | None]


@dataclass(frozen=True)
class AddedFiles(InputPartition):
    """The files of one task."""

    files: Sequence[AddedFile]


@dataclass(frozen=True)
class DeltaReadOptions:
    """Options of a stream.

    Attributes:
        columns: Only these, in this order; empty for all.
        rows_max: A micro-batch ends with the commit that reaches this many rows; 0 for no limit.
        first_version: Rows of earlier commits are skipped.
    """

    path: str
    columns: tuple[str, ...]
    rows_max: int
    first_version: int


def delta_read_options(options: Mapping[str, str]) -> DeltaReadOptions:
    """Parse the options of a stream.

    Raises:
        BadOption: an option is missing, unknown or invalid.
    """
    given = {name.lower(): value for name, value in options.items()}
    if unknown := sorted(given.keys() - _OPTIONS):
        raise BadOption(f"unknown option {unknown[0]}; known are {', '.join(sorted(_OPTIONS))}")
    if not (path := given.get("path", "")):
        raise BadOption("option path is missing")
    numbers = {}
    for name in ("maxRowsPerTrigger", "startingVersion"):
        text = given.get(name.lower(), "0")
        if not text.isdecimal():
            raise BadOption(f"option {name} has an invalid value: {text!r}")
        numbers[name] = int(text)
    names = (name.strip() for name in given.get("columns", "").split(","))
    return DeltaReadOptions(
        path.removeprefix("file://"), tuple(filter(None, names)), *numbers.values()
    )


def delta_schema(reading: DeltaReadOptions) -> StructType:
    """Return the columns to read, by the current schema of the table.

    Raises:
        BadOption: the table or a column does not exist.
    """
    if not deltalake.DeltaTable.is_deltatable(reading.path):
        raise BadOption(f"there is no Delta table at {reading.path}")
    table = deltalake.DeltaTable(reading.path)
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    if missing := sorted(set(reading.columns) - set(schema.fieldNames())):
        raise BadOption(f"the table has no column {missing[0]}")
    return StructType([schema[name] for name in reading.columns]) if reading.columns else schema


class DeltaStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the rows that are added to a table."""

    def __init__(self, reading: DeltaReadOptions, schema: StructType) -> None:
        self._reading, self._schema = reading, schema
        self._table: deltalake.DeltaTable | None = None
        self._ceiling: int | None = None
        self._seen = self.initialOffset()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}

    def initialOffset(self) -> Offset:
        """Return the version before the first commit to read."""
        return {"version": self._reading.first_version - 1}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of `maxRowsPerTrigger`."""
        rows_max = self._reading.rows_max
        return ReadMaxRows(rows_max) if rows_max else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Limit the query to the present version of the table."""
        self._ceiling = self._newest()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Return the end of the next micro-batch."""
        newest = self._newest() if self._ceiling is None else self._ceiling
        self._seen = {"version": newest}
        begin = start["version"]
        if not isinstance(limit, ReadMaxRows) or self._reads_whole(begin, newest):
            return {"version": max(begin, newest)}
        rows = 0
        while begin < newest and rows < limit.max_rows:
            begin += 1
            rows += sum(file.row_count for file in self._added(begin))
        return {"version": begin}

    def reportLatestOffset(self) -> Offset | None:
        """Return the newest version, from which Spark computes the backlog."""
        return self._seen

    def partitions(self, start: Offset, end: Offset) -> Sequence[AddedFiles]:
        """Return the files that commits after `start`, up to `end`, have added."""
        begin, after = start["version"] + 1, end["version"] + 1
        if self._reads_whole(begin - 1, end["version"]):
            files = self._all_files(end["version"])
        else:
            files = [file for version in range(begin, after) for file in self._added(version)]
        shares = (files[place::PARTITIONS_MAX] for place in range(PARTITIONS_MAX))
        return [AddedFiles(share) for share in shares if share]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of the files of a task."""
        assert isinstance(partition, AddedFiles)
        schema = to_arrow_schema(self._schema, timezone="UTC")
        for file in partition.files:
            yield from _rows(self._path(file), file.partition, schema)

    def _newest(self) -> int:
        if self._table is None:
            self._table = deltalake.DeltaTable(self._reading.path)
        else:
            self._table.update_incremental()
        return self._table.version()

    def _reads_whole(self, begin: int, end: int) -> bool:
        """Return whether the table is read as a whole: at its begin, if something was removed."""
        if begin >= 0:
            return False
        if not self._log(0).exists():
            return True
        added = (file for version in range(end + 1) for file in self._added(version))
        return not all(self._path(file).exists() for file in added)

    def _path(self, file: AddedFile) -> Path:
        return Path(self._reading.path) / unquote(file.path)

    def _log(self, version: int) -> Path:
        return Path(self._reading.path) / "_delta_log" / f"{version:020d}.json"

    def _added(self, version: int) -> list[AddedFile]:
        try:
            lines = self._log(version).read_text().splitlines()
        except FileNotFoundError as error:
            raise CommitsLost(
                f"commit {version} of {self._reading.path} was removed before it was read"
            ) from error
        added = [action["add"] for line in lines if "add" in (action := json.loads(line))]
        return [_file(add) for add in added if add["dataChange"]]

    def _all_files(self, version: int) -> list[AddedFile]:
        table = deltalake.DeltaTable(self._reading.path, version=version)
        rows = pa.table(table.get_add_actions()).to_pylist()
        return [
            AddedFile(
                row["path"],
                row["num_records"],
                {name: _text(value) for name, value in (row.get("partition") or {}).items()},
            )
            for row in rows
        ]


def _file(add: Mapping[str, Any]) -> AddedFile:
    stats = json.loads(add.get("stats") or "{}")
    return AddedFile(add["path"], stats.get("numRecords", 0), add.get("partitionValues") or {})


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _rows(
    path: Path, partition: Mapping[str, str | None], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Return the rows of a file; a column that is newer than the file is null."""
    if not path.exists():
        raise CommitsLost(f"{path} was removed: it was compacted and vacuumed before it was read")
    with pq.ParquetFile(path) as file:
        names = [name for name in file.schema_arrow.names if name in schema.names]
        for batch in file.iter_batches(_ROWS_PER_BATCH, columns=names):
            columns = []
            for field in schema:
                if field.name in partition:
                    value = pa.scalar(partition[field.name], pa.string())
                    column = pa.repeat(value, batch.num_rows)
                elif field.name in names:
                    column = batch.column(field.name)
                else:
                    column = pa.nulls(batch.num_rows)
                columns.append(column.cast(field.type))
            yield pa.RecordBatch.from_arrays(columns, schema=schema)
