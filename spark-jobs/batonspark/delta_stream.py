"""`readStream.format("batondelta")`: the rows of a Delta table as they are added.

Offsets are versions of the table, so what a micro-batch holds is fixed by where it begins and ends.
Only what a commit adds is read: compaction moves rows without changing them and adds nothing, and
what retention takes away was read before. A table whose log does not reach back to its beginning
any more is first read as it stands.
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
"""Files of one micro-batch are dealt to so many tasks at most."""
_ROWS_PER_BATCH = 8_192
_OPTIONS = {"path", "columns", "maxrowspertrigger", "startingversion"}
Offset = dict[str, int]


class CommitsLost(Exception):
    """The log or the files of the table do not reach back to where the stream stands."""


@dataclass(frozen=True)
class AddedFile:
    """A file that a commit has added.

    Attributes:
        partition: Values of the columns that its folder tells, as text.
    """

    path: str
    row_count: int
    partition: Mapping[str, str | None]


@dataclass(frozen=True)
class AddedFiles(InputPartition):
    """Files that one task reads."""

    files: Sequence[AddedFile]


@dataclass(frozen=True)
class DeltaReadOptions:
    """What to read.

    Attributes:
        columns: Only these, in this order; empty for all.
        rows_max: A micro-batch ends with the commit that reaches so many rows; 0 for no bound.
        first_version: What earlier commits have added is left out.
    """

    path: str
    columns: tuple[str, ...]
    rows_max: int
    first_version: int


def delta_read_options(options: Mapping[str, str]) -> DeltaReadOptions:
    """What the options of a read mean.

    Raises:
        BadOption: one is missing, unknown, or has a value that it can't have.
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
            raise BadOption(f"option {name} can't be {text!r}")
        numbers[name] = int(text)
    names = (name.strip() for name in given.get("columns", "").split(","))
    return DeltaReadOptions(
        path.removeprefix("file://"), tuple(filter(None, names)), *numbers.values()
    )


def delta_schema(reading: DeltaReadOptions) -> StructType:
    """The columns that are read, of the table as it is now.

    Raises:
        BadOption: there is no such table or column.
    """
    if not deltalake.DeltaTable.is_deltatable(reading.path):
        raise BadOption(f"there is no Delta table at {reading.path}")
    table = deltalake.DeltaTable(reading.path)
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    if missing := sorted(set(reading.columns) - set(schema.fieldNames())):
        raise BadOption(f"the table has no column {missing[0]}")
    return StructType([schema[name] for name in reading.columns]) if reading.columns else schema


class DeltaStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """See the module."""

    def __init__(self, reading: DeltaReadOptions, schema: StructType) -> None:
        self._reading, self._schema = reading, schema
        self._table: deltalake.DeltaTable | None = None
        self._ceiling: int | None = None
        self._seen = self.initialOffset()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}

    def initialOffset(self) -> Offset:
        """Before the first commit that is wanted."""
        return {"version": self._reading.first_version - 1}

    def getDefaultReadLimit(self) -> ReadLimit:
        """`maxRowsPerTrigger`."""
        rows_max = self._reading.rows_max
        return ReadMaxRows(rows_max) if rows_max else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """The query ends with what is there now."""
        self._ceiling = self._newest()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Where the next micro-batch ends."""
        newest = self._newest() if self._ceiling is None else self._ceiling
        self._seen = {"version": newest}
        begin = start["version"]
        if not isinstance(limit, ReadMaxRows) or (begin < 0 and not self._log(0).exists()):
            return {"version": max(begin, newest)}
        rows = 0
        while begin < newest and rows < limit.max_rows:
            begin += 1
            rows += sum(file.row_count for file in self._added(begin))
        return {"version": begin}

    def reportLatestOffset(self) -> Offset | None:
        """The newest version: with the end of a batch it tells how far the query is behind."""
        return self._seen

    def partitions(self, start: Offset, end: Offset) -> Sequence[AddedFiles]:
        """The files of the commits after `start`, up to `end`."""
        begin, after = start["version"] + 1, end["version"] + 1
        if begin == 0 and not self._log(0).exists():
            files = self._standing(end["version"])
        else:
            files = [file for version in range(begin, after) for file in self._added(version)]
        dealt = (files[place::PARTITIONS_MAX] for place in range(PARTITIONS_MAX))
        return [AddedFiles(some) for some in dealt if some]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of some files."""
        assert isinstance(partition, AddedFiles)
        schema = to_arrow_schema(self._schema, timezone="UTC")
        for file in partition.files:
            yield from _rows(Path(self._reading.path) / unquote(file.path), file.partition, schema)

    def _newest(self) -> int:
        if self._table is None:
            self._table = deltalake.DeltaTable(self._reading.path)
        else:
            self._table.update_incremental()
        return self._table.version()

    def _log(self, version: int) -> Path:
        return Path(self._reading.path) / "_delta_log" / f"{version:020d}.json"

    def _added(self, version: int) -> list[AddedFile]:
        try:
            lines = self._log(version).read_text().splitlines()
        except FileNotFoundError as error:
            raise CommitsLost(f"commit {version} of {self._reading.path} is gone") from error
        added = [action["add"] for line in lines if "add" in (action := json.loads(line))]
        return [_file(add) for add in added if add["dataChange"]]

    def _standing(self, version: int) -> list[AddedFile]:
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
    """The rows of a file with the columns of `schema`; null where the file is older than one."""
    if not path.exists():
        raise CommitsLost(f"{path} is gone: it was compacted and vacuumed before it was read")
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
