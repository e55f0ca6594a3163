"""`format("batondelta")`: rows into a Delta table, those of a micro-batch exactly once.

Tasks write Parquet files; the driver then makes them part of the table in one commit, which also
notes the query and the number of its micro-batch. What is written again after a crash finds its
number there, and its files are thrown away. Files that nobody ever committed are removed by vacuum.

With `view` `metrics` the rows that come are messages of BATON_SYS_METRICS, and the table has the
events in them: tasks open what they write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import quote

import deltalake
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.transaction import AddAction, CommitProperties, Transaction
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from batonmq.common.clock import Clock
from batonspark.bronze import DATED, events_of
from batonspark.decode import MESSAGES
from batonspark.delta_stream import DeltaStreamReader, delta_reading, delta_schema
from batonspark.options import BadOption

_ROWS_PER_GROUP = 128 * 1024
_NULL = "__HIVE_DEFAULT_PARTITION__"
_QUERY_ID = "sql.streaming.queryId"
_OPTIONS = {"path", "partitionby", "txnappid", "txnversion", "compression", "view"}
_SPARKS_OWN = {"checkpointlocation", "queryname"}


class DeltaDataSource(DataSource):
    """See the module; docs/spark.md has the options."""

    @classmethod
    def name(cls) -> str:
        """What stands in `format(...)`."""
        return "batondelta"

    def schema(self) -> StructType:
        """The columns of the table, or those that are asked for."""
        return delta_schema(delta_reading(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Of a stream of what is added."""
        return DeltaStreamReader(delta_reading(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Of a batch write, which appends or replaces the whole table."""
        return DeltaWriter(_target(self.options, schema), _transaction(self.options), overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Of a streaming write."""
        if overwrite:
            raise BadOption("a stream can only append to a Delta table")
        return DeltaStreamWriter(_target(self.options, schema), self.options.get("txnAppId", ""))


@dataclass(frozen=True)
class Target:
    """Where rows go.

    Attributes:
        path: Folder of the table, the same on all nodes.
        schema: Of the table's rows, in Arrow's terms.
        partition_by: Columns by whose values the files are put into folders.
        opened: Whether messages come, and the table has the events in them.
    """

    path: str
    schema: pa.Schema
    partition_by: tuple[str, ...]
    compression: str
    opened: bool = False

    @property
    def file_schema(self) -> pa.Schema:
        """Of the files: without the columns that their folders tell."""
        return pa.schema([each for each in self.schema if each.name not in self.partition_by])


@dataclass(frozen=True)
class WrittenFile:
    """A Parquet file, not part of the table yet."""

    path: str
    bytes_count: int
    partition: Mapping[str, str | None]
    stats: str


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What one task has written."""

    query_id: str = ""
    files: Sequence[WrittenFile] = field(default_factory=list)


class DeltaWriter(DataSourceArrowWriter):
    """Writes once what a job has; with a transaction its repetition writes nothing."""

    def __init__(
        self, target: Target, transaction: tuple[str, int] | None, overwrite: bool
    ) -> None:
        self._target, self._transaction, self._overwrite = target, transaction, overwrite

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write the files of a task."""
        return Written(files=write_files(self._target, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make all files part of the table."""
        mode = "overwrite" if self._overwrite else "append"
        commit_files(self._target, _files(messages), self._transaction, mode=mode)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Throw the files away."""
        _remove(self._target, _files(messages))


class DeltaStreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches, each in one commit."""

    def __init__(self, target: Target, app_id: str) -> None:
        self._target, self._app_id = target, app_id

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Write the files of a task."""
        task = TaskContext.get()
        assert task is not None
        query_id = task.getLocalProperty(_QUERY_ID)
        assert query_id is not None
        return Written(query_id, write_files(self._target, iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Make all files part of the table, unless an earlier try of the micro-batch did."""
        ids = {one.query_id for one in messages if isinstance(one, Written)}
        if ids:
            app_id = self._app_id or ids.pop()
            commit_files(self._target, _files(messages), (app_id, batchId))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Throw the files away."""
        _remove(self._target, _files(messages))


def read_delta(
    session: SparkSession,
    path: str,
    *,
    version: int | None = None,
    prune: str | None = None,
) -> DataFrame:
    """The rows of a Delta table.

    Args:
        version: As of this commit; the newest if None.
        prune: A condition in SQL, as `date >= '2026-01-31'`: files that have no such row are left
            out. Others come whole, so the rows still have to be filtered.
    """
    table = deltalake.DeltaTable(path, version=version)
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    files = table.file_uris(file_pruning_predicate=prune)
    if not files:
        return session.createDataFrame([], schema)
    rows = session.read.schema(schema).option("basePath", path).parquet(*files)
    return rows.select(schema.fieldNames())  # Spark puts the columns of folders last


def write_files(target: Target, batches: Iterator[pa.RecordBatch]) -> list[WrittenFile]:
    """One Parquet file for each partition of the table that has rows."""
    files: dict[tuple[str | None, ...], _File] = {}
    try:
        for batch in events_of(batches) if target.opened else batches:
            rows = batch.cast(target.schema) if batch.schema != target.schema else batch
            for values, part in _split(rows, target.partition_by):
                if values not in files:
                    files[values] = _File(target, values)
                files[values].write(part.select(target.file_schema.names))
        return [one.close() for one in files.values()]
    except BaseException:
        for one in files.values():
            one.discard()
        raise


def commit_files(
    target: Target,
    files: Sequence[WrittenFile],
    transaction: tuple[str, int] | None,
    *,
    mode: str = "append",
) -> bool:
    """Make files part of the table, which is made if it is not there.

    Args:
        transaction: Who writes, and a number that rises with every write of theirs.

    Returns:
        False if the transaction is in the table already; the files are gone then.
    """
    table = _table(target)
    properties = None
    if transaction is not None:
        app_id, version = transaction
        done = table.transaction_version(app_id)
        if done is not None and done >= version:
            _remove(target, files)
            return False
        properties = CommitProperties(app_transactions=[Transaction(app_id, version)])
    unix_ms = Clock().unix_ms()
    actions = [
        AddAction(one.path, one.bytes_count, dict(one.partition), unix_ms, True, one.stats)
        for one in files
    ]
    table.create_write_transaction(
        list(actions),
        mode,
        deltalake.Schema.from_arrow(target.schema),
        list(target.partition_by),
        commit_properties=properties,
    )
    return True


class _File:
    """A Parquet file that is being written."""

    def __init__(self, target: Target, values: tuple[str | None, ...]) -> None:
        self._target = target
        self._partition = dict(zip(target.partition_by, values, strict=True))
        folder = "/".join(
            f"{name}={_NULL if value is None else quote(value, safe='')}"
            for name, value in self._partition.items()
        )
        name = f"part-{token_hex(16)}.{target.compression}.parquet"
        self._name = f"{folder}/{name}" if folder else name
        self._path = Path(target.path) / self._name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("wb")
        texts = [each.name for each in target.file_schema if each.type == pa.string()]
        self._writer = pq.ParquetWriter(
            self._file,
            target.file_schema,
            compression=target.compression,
            use_dictionary=texts or False,  # numbers are smaller and quicker without
        )
        self._waiting: list[pa.RecordBatch] = []

    def write(self, rows: pa.RecordBatch) -> None:
        self._waiting.append(rows)
        if sum(each.num_rows for each in self._waiting) >= _ROWS_PER_GROUP:
            self._flush()

    def close(self) -> WrittenFile:
        """The file, durable."""
        self._flush()
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        stats = _stats(pq.read_metadata(self._path))
        return WrittenFile(self._name, self._path.stat().st_size, self._partition, stats)

    def discard(self) -> None:
        self._writer.close()
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting))
            self._waiting = []


def _split(
    rows: pa.RecordBatch, names: Sequence[str]
) -> Iterator[tuple[tuple[str | None, ...], pa.RecordBatch]]:
    """The rows of each partition, and the partition's values as Delta writes them."""
    if not names:
        yield (), rows
        return
    columns = [rows.column(name).cast(pa.string()) for name in names]
    wanted = pa.table(dict(zip(names, columns, strict=True))).group_by(list(names)).aggregate([])
    found = [tuple(row[name] for name in names) for row in wanted.to_pylist()]
    if len(found) == 1:
        yield found[0], rows
        return
    for values in found:
        kept = None
        for column, value in zip(columns, values, strict=True):
            same = (
                pc.is_null(column)
                if value is None
                else pc.fill_null(pc.equal(column, value), False)
            )
            kept = same if kept is None else pc.and_(kept, same)
        yield values, rows.filter(kept)


def _stats(metadata: Any) -> str:
    """What readers may skip a file by, as the protocol of Delta wants it: counts and bounds."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    least: dict[str, int | str] = {}
    most: dict[str, int | str] = {}
    for number in range(metadata.num_columns):
        columns = [group.column(number) for group in groups]
        name, found = columns[0].path_in_schema, [each.statistics for each in columns]
        if "." in name or not all(each is not None and each.has_min_max for each in found):
            continue
        try:
            low, high = min(each.min for each in found), max(each.max for each in found)
            after = high + timedelta(milliseconds=1) if isinstance(high, datetime) else None
        except OverflowError:  # a time that Python does not know
            continue
        if after is not None:
            least[name], most[name] = _bound(low), _bound(after)
        elif isinstance(low, int):
            least[name], most[name] = low, high
    return json.dumps({"numRecords": metadata.num_rows, "minValues": least, "maxValues": most})


def _bound(time: datetime) -> str:
    return f"{time.astimezone(UTC).isoformat(timespec='milliseconds')[:-6]}Z"


def _table(target: Target) -> deltalake.DeltaTable:
    """The table, with all columns of the rows: those that are new are added."""
    schema = deltalake.Schema.from_arrow(target.schema)
    if not deltalake.DeltaTable.is_deltatable(target.path):
        Path(target.path).mkdir(parents=True, exist_ok=True)
        deltalake.DeltaTable.create(
            target.path, schema, mode="ignore", partition_by=list(target.partition_by)
        )
    table = deltalake.DeltaTable(target.path)
    there = tuple(table.metadata().partition_columns)
    if there != target.partition_by:
        raise BadOption(f"the table is partitioned by {there}, not by {target.partition_by}")
    known = {each.name: each.type for each in table.schema().fields}
    for each in schema.fields:
        if known.get(each.name, each.type) != each.type:
            raise BadOption(f"column {each.name} of the table is {known[each.name]}")
    if missing := [each for each in schema.fields if each.name not in known]:
        table.alter.add_columns(missing)
    return table


def _target(options: Mapping[str, str], schema: StructType) -> Target:
    given = {name.lower(): value for name, value in options.items()}
    if unknown := sorted(given.keys() - _OPTIONS - _SPARKS_OWN):
        raise BadOption(f"unknown option {unknown[0]}; known are {', '.join(sorted(_OPTIONS))}")
    if not (path := given.get("path", "")):
        raise BadOption("option path is missing")
    if (view := given.get("view", "rows")) not in ("rows", "metrics"):
        raise BadOption(f"option view can't be {view!r}: rows or metrics")
    arrow = to_arrow_schema(schema, timezone="UTC")
    table = pa.schema([each.with_nullable(True) for each in arrow])
    if view == "metrics":
        if missing := sorted(set(MESSAGES.names) - set(table.names)):
            raise BadOption(f"messages have a column {missing[0]}: the view metrics opens messages")
        table = DATED
    names = tuple(name.strip() for name in given.get("partitionby", "").split(",") if name.strip())
    if missing := sorted(set(names) - set(table.names)):
        raise BadOption(f"there is no column {missing[0]} to partition by")
    folder = path.removeprefix("file://")
    return Target(folder, table, names, given.get("compression", "zstd"), view == "metrics")


def _transaction(options: Mapping[str, str]) -> tuple[str, int] | None:
    given = {name.lower(): value for name, value in options.items()}
    app_id, version = given.get("txnappid", ""), given.get("txnversion", "")
    if bool(app_id) != bool(version) or not (version or "0").isdecimal():
        raise BadOption("options txnAppId and txnVersion go together; the latter is a number")
    return (app_id, int(version)) if app_id else None


def _files(messages: Sequence[WriterCommitMessage | None]) -> list[WrittenFile]:
    return [file for one in messages if isinstance(one, Written) for file in one.files]


def _remove(target: Target, files: Sequence[WrittenFile]) -> None:
    for one in files:
        (Path(target.path) / one.path).unlink(missing_ok=True)
