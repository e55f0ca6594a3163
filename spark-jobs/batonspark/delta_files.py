"""Parquet files of a Delta table: write them, and find out whether they are committed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import quote

import deltalake
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batonspark.bronze import events_of

_ROWS_PER_GROUP = 128 * 1024
_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class DeltaTarget:
    """The Delta table to which rows are written.

    Attributes:
        path: Folder of the table, the same on all nodes.
        schema: Arrow schema of the table.
        partition_by: Columns with the values that decide the folder of a file.
        opened: Whether the input rows are messages, so that their events are written.
    """

    path: str
    schema: pa.Schema
    partition_by: tuple[str, ...]
    compression: str
    opened: bool = False

    @property
    def file_schema(self) -> pa.Schema:
        """Schema of the files: without the partition columns."""
        return pa.schema([each for each in self.schema if each.name not in self.partition_by])


@dataclass(frozen=True)
class WrittenFile:
    """A Parquet file that is not part of the table yet."""

    path: str
    bytes_count: int
    partition: Mapping[str, str | None]
    stats: str


def write_files(target: DeltaTarget, batches: Iterator[pa.RecordBatch]) -> list[WrittenFile]:
    """Write one Parquet file for each partition with rows."""
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


def has_transaction(table: deltalake.DeltaTable, transaction: tuple[str, int]) -> bool:
    """Return whether the table has this write, or a later one of the same writer."""
    app_id, version = transaction
    done = table.transaction_version(app_id)
    return done is not None and done >= version


def is_committed(
    table: deltalake.DeltaTable,
    files: Sequence[WrittenFile],
    transaction: tuple[str, int] | None,
) -> bool:
    """Return whether the table has the commit of these files.

    The transaction shows it even if a compaction has moved the rows to new files.
    """
    if transaction is not None and has_transaction(table, transaction):
        return True
    named = {uri.rpartition("/")[2] for uri in table.file_uris()}
    return any(one.path.rpartition("/")[2] in named for one in files)


def remove_files(target: DeltaTarget, files: Sequence[WrittenFile]) -> None:
    """Delete files."""
    for one in files:
        (Path(target.path) / one.path).unlink(missing_ok=True)


class _File:
    """A Parquet file that is being written."""

    def __init__(self, target: DeltaTarget, values: tuple[str | None, ...]) -> None:
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
            use_dictionary=texts or False,  # numbers are smaller and faster without
        )
        self._waiting: list[pa.RecordBatch] = []

    def write(self, rows: pa.RecordBatch) -> None:
        self._waiting.append(rows)
        if sum(each.num_rows for each in self._waiting) >= _ROWS_PER_GROUP:
            self._flush()

    def close(self) -> WrittenFile:
        """Make the file durable and return it."""
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
    """Split rows by partition; return the partition's values, as Delta writes them, and rows."""
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
    """Return the statistics of a file in Delta's format: its row count and column bounds."""
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
        except OverflowError:  # a time out of the range of Python
            continue
        if after is not None:
            least[name], most[name] = _bound(low), _bound(after)
        elif isinstance(low, int):
            least[name], most[name] = low, high
    return json.dumps({"numRecords": metadata.num_rows, "minValues": least, "maxValues": most})


def _bound(time: datetime) -> str:
    known = time if time.tzinfo else time.replace(tzinfo=UTC)  # a TIMESTAMP_NTZ: written as it is
    return f"{known.astimezone(UTC).isoformat(timespec='milliseconds')[:-6]}Z"
