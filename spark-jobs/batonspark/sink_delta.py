"""`format("batondelta")`: write rows to a Delta table, those of a micro-batch exactly once.

Tasks write Parquet files. The driver then adds them to the table in one commit, which also stores
the id of the query and the number of the micro-batch. If a micro-batch is repeated after a crash,
its number is in the table already and the new files are removed. A commit may have succeeded
although it reported an error, so files are removed only if the table shows that they are not
committed. A vacuum removes files that were never committed.

With `view` = `metrics` the input rows are messages of BATON_SYS_METRICS and the table has the
events in them; the tasks decode the messages.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import deltalake
import pyarrow as pa
from deltalake.exceptions import TableNotFoundError
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

from batonmq._common.clock import Clock
from batonspark.bronze import DATED
from batonspark.decode import MESSAGES
from batonspark.delta_files import (
    DeltaTarget,
    WrittenFile,
    has_transaction,
    is_committed,
    remove_files,
    write_files,
)
from batonspark.delta_stream import DeltaStreamReader, delta_read_options, delta_schema
from batonspark.options import BadOption

log = logging.getLogger(__name__)

_QUERY_ID = "sql.streaming.queryId"
_OPTIONS = {"path", "partitionby", "txnappid", "txnversion", "compression", "view"}
_SPARK_OPTIONS = {"checkpointlocation", "queryname"}


class DeltaDataSource(DataSource):
    """The data source `batondelta`; docs/reference/spark.md describes its options."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)`."""
        return "batondelta"

    def schema(self) -> StructType:
        """Return the columns of the table, or those of the option `columns`."""
        return delta_schema(delta_read_options(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a stream of added rows."""
        return DeltaStreamReader(delta_read_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch, which appends rows or replaces the whole table."""
        return DeltaWriter(_target(self.options, schema), _transaction(self.options), overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer of a stream."""
        if overwrite:
            raise BadOption("a stream can only append to a Delta table: use output mode append")
        return DeltaStreamWriter(_target(self.options, schema), self.options.get("txnAppId", ""))


@dataclass(frozen=True)
class WrittenFiles(WriterCommitMessage):
    """Files that a task wrote."""

    query_id: str = ""
    files: Sequence[WrittenFile] = field(default_factory=list)


class DeltaWriter(DataSourceArrowWriter):
    """Writes the rows of a batch job; with a transaction a repeated write changes nothing."""

    def __init__(
        self, target: DeltaTarget, transaction: tuple[str, int] | None, overwrite: bool
    ) -> None:
        self._target, self._transaction, self._overwrite = target, transaction, overwrite

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenFiles:
        """Write the files of a task."""
        return WrittenFiles(files=write_files(self._target, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Add all files to the table."""
        mode = "overwrite" if self._overwrite else "append"
        commit_files(self._target, _files(messages), self._transaction, mode=mode)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove the files if they are certainly not part of the table."""
        discard_files(self._target, _files(messages), self._transaction)


class DeltaStreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches, each in one commit."""

    def __init__(self, target: DeltaTarget, app_id: str) -> None:
        self._target, self._app_id = target, app_id

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenFiles:
        """Write the files of a task."""
        task = TaskContext.get()
        assert task is not None
        query_id = task.getLocalProperty(_QUERY_ID)
        assert query_id is not None
        return WrittenFiles(query_id, write_files(self._target, iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Add all files to the table, unless an earlier attempt of the micro-batch did."""
        if (app_id := self._app_of(messages)) is not None:
            commit_files(self._target, _files(messages), (app_id, batchId))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Remove the files if they are certainly not part of the table."""
        if (app_id := self._app_of(messages)) is not None:
            discard_files(self._target, _files(messages), (app_id, batchId))

    def _app_of(self, messages: list[WriterCommitMessage | None]) -> str | None:
        """Return the id of the writer; None if no task has written."""
        ids = {one.query_id for one in messages if isinstance(one, WrittenFiles)}
        return (self._app_id or ids.pop()) if ids else None


def read_delta(
    session: SparkSession,
    path: str,
    *,
    version: int | None = None,
    prune: str | None = None,
) -> DataFrame:
    """Return the rows of a Delta table.

    Args:
        version: Number of the commit to read; the newest if None.
        prune: A condition in SQL, such as `date >= '2026-01-31'`. Files without a matching row are
            skipped; other files are read completely, so the rows still have to be filtered.
    """
    table = deltalake.DeltaTable(path, version=version)
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    files = table.file_uris(file_pruning_predicate=prune)
    if not files:
        return session.createDataFrame([], schema)
    rows = session.read.schema(schema).option("basePath", path).parquet(*files)
    return rows.select(schema.fieldNames())  # Spark puts the columns of folders last


def commit_files(
    target: DeltaTarget,
    files: Sequence[WrittenFile],
    transaction: tuple[str, int] | None,
    *,
    mode: str = "append",
) -> bool:
    """Add files to the table; create the table if it does not exist.

    Args:
        transaction: Id of the writer, and a number that rises with each of its writes.

    Returns:
        False if the table has the transaction already; the files are removed then.
    """
    table = _table(target)
    properties = None
    if transaction is not None:
        if has_transaction(table, transaction):
            remove_files(target, files)
            return False
        properties = CommitProperties(app_transactions=[Transaction(*transaction)])
    unix_ms = Clock().unix_ms()
    actions = [
        AddAction(one.path, one.bytes_count, dict(one.partition), unix_ms, True, one.stats)
        for one in files
    ]
    try:
        table.create_write_transaction(
            list(actions),
            mode,
            deltalake.Schema.from_arrow(target.schema),
            list(target.partition_by),
            commit_properties=properties,
        )
    except Exception as error:
        # A commit may also write a checkpoint, which may fail after the commit has succeeded.
        if not is_committed(deltalake.DeltaTable(target.path), files, transaction):
            raise
        log.warning(
            "commit succeeded although it reported an error path=%s error=%s", target.path, error
        )
    return True


def discard_files(
    target: DeltaTarget, files: Sequence[WrittenFile], transaction: tuple[str, int] | None
) -> None:
    """Remove files, unless any may be part of the table; a vacuum removes the others later."""
    try:
        committed = is_committed(deltalake.DeltaTable(target.path), files, transaction)
    except TableNotFoundError:
        committed = False
    except Exception as error:  # noqa: BLE001  any error: what is committed is unknown
        log.warning(
            "files are not removed, a vacuum will remove them path=%s error=%s", target.path, error
        )
        return
    if not committed:
        remove_files(target, files)


def _table(target: DeltaTarget) -> deltalake.DeltaTable:
    """Return the table, created if needed, with the new columns of the rows added."""
    schema = deltalake.Schema.from_arrow(target.schema)
    if not deltalake.DeltaTable.is_deltatable(target.path):
        Path(target.path).mkdir(parents=True, exist_ok=True)
        deltalake.DeltaTable.create(
            target.path, schema, mode="ignore", partition_by=list(target.partition_by)
        )
    table = deltalake.DeltaTable(target.path)
    columns = tuple(table.metadata().partition_columns)
    if columns != target.partition_by:
        raise BadOption(
            f"the table is partitioned by {columns}, option partitionBy is {target.partition_by}"
        )
    known = {each.name: each.type for each in table.schema().fields}
    for each in schema.fields:
        if known.get(each.name, each.type) != each.type:
            raise BadOption(f"column {each.name} of the table is {known[each.name]}")
    if missing := [each for each in schema.fields if each.name not in known]:
        table.alter.add_columns(missing)
    return table


def _target(options: Mapping[str, str], schema: StructType) -> DeltaTarget:
    given = {name.lower(): value for name, value in options.items()}
    if unknown := sorted(given.keys() - _OPTIONS - _SPARK_OPTIONS):
        raise BadOption(f"unknown option {unknown[0]}; known are {', '.join(sorted(_OPTIONS))}")
    if not (path := given.get("path", "")):
        raise BadOption("option path is missing")
    if (view := given.get("view", "rows")) not in ("rows", "metrics"):
        raise BadOption(f"option view must be rows or metrics, got {view!r}")
    arrow = to_arrow_schema(schema, timezone="UTC")
    table = pa.schema([each.with_nullable(True) for each in arrow])
    if view == "metrics":
        if missing := sorted(set(MESSAGES.names) - set(table.names)):
            raise BadOption(
                f"the view metrics needs rows of messages: column {missing[0]} is missing"
            )
        table = DATED
    names = tuple(name.strip() for name in given.get("partitionby", "").split(",") if name.strip())
    if missing := sorted(set(names) - set(table.names)):
        raise BadOption(f"option partitionBy: there is no column {missing[0]}")
    folder = path.removeprefix("file://")
    return DeltaTarget(folder, table, names, given.get("compression", "zstd"), view == "metrics")


def _transaction(options: Mapping[str, str]) -> tuple[str, int] | None:
    given = {name.lower(): value for name, value in options.items()}
    app_id, version = given.get("txnappid", ""), given.get("txnversion", "")
    if bool(app_id) != bool(version) or not (version or "0").isdecimal():
        raise BadOption(
            "options txnAppId and txnVersion must be given together; txnVersion is a number"
        )
    return (app_id, int(version)) if app_id else None


def _files(messages: Sequence[WriterCommitMessage | None]) -> list[WrittenFile]:
    return [file for one in messages if isinstance(one, WrittenFiles) for file in one.files]
