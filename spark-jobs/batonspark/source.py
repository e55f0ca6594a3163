"""`format("baton")`: read topics as tables and streams of Spark, and write rows as messages.

Spark creates readers in several processes of the driver and on every executor. They share nothing
but offsets and partitions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from batonspark.cluster import ClusterClient, StoredExtent
from batonspark.decode import MESSAGES, METRICS, QueueSlice
from batonspark.offsets import TOPIC_ID, Offsets, batch_end, queue_of, queue_offsets, sorted_offsets
from batonspark.options import BadOption, ReadOptions, read_options, write_options
from batonspark.read_plan import ReadFilter, batch_slices, narrow, resolve_offsets, stored_extents
from batonspark.schemas import MESSAGES as MESSAGES_DDL
from batonspark.schemas import METRICS as METRICS_DDL
from batonspark.sink import MessageStreamWriter, MessageWriter
from batonspark.slice_reader import MessagesLost, read_slice


class BatonDataSource(DataSource):
    """The data source `baton`; docs/reference/spark.md describes its options."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)`."""
        return "baton"

    def schema(self) -> str:
        """Return the columns of the view."""
        return METRICS_DDL if self._reading().view == "metrics" else MESSAGES_DDL

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch read."""
        options = _checked(self._reading(), schema)
        return PushedQueueReader(options) if options.push_down else QueueReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a stream."""
        return QueueStreamReader(_checked(self._reading(), schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch write."""
        if overwrite:
            raise BadOption("mode overwrite is not supported for messages: use mode append")
        return MessageWriter(write_options(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer of a stream."""
        return MessageStreamWriter(write_options(self.options), schema)

    def _reading(self) -> ReadOptions:
        return read_options(self.options)


@dataclass(frozen=True)
class SlicePartition(InputPartition):
    """One partition of a read: a slice of one queue."""

    slice: QueueSlice


class QueueReader(DataSourceReader):
    """Reads a topic in one batch."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._wanted = ReadFilter()

    def partitions(self) -> Sequence[SlicePartition]:
        """Return one slice of each queue."""
        with ClusterClient(self._options.connection) as cluster:
            return list(map(SlicePartition, batch_slices(cluster, self._options, self._wanted)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of a slice."""
        return _read(self._options, partition)


class PushedQueueReader(QueueReader):
    """A `QueueReader` that skips messages which the query's filters exclude."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Use the filters to read less; Spark still applies all of them to the rows."""
        prefix = "sys_" if self._options.view == "metrics" else ""
        self._wanted = narrow(self._wanted, filters, prefix)
        return filters


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a topic as a stream; the offsets are those of its queues."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._cluster: ClusterClient | None = None
        self._initial: Offsets | None = None
        self._ceiling: Offsets | None = None
        self._seen: Offsets | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cluster": None}

    def initialOffset(self) -> Offsets:
        """Return the start of a query without checkpoint; Spark needs the same answer twice."""
        if self._initial is None:
            options, cluster = self._options, self._opened()
            extents = stored_extents(cluster, options)
            found = resolve_offsets(cluster, options, extents, options.starting)
            self._initial = _as_offsets(found, extents)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of `maxRowsPerTrigger`."""
        rows_max = self._options.rows_max
        return ReadMaxRows(rows_max) if rows_max else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Limit the query to the messages that are stored now."""
        self._ceiling = self._ends()

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """Return the end of the next micro-batch.

        Raises:
            MessagesLost: the topic was deleted and created again, or a queue became shorter.
        """
        ends = self._ceiling or self._ends()
        self._seen = self._ceiling or ends
        begin = start
        if start.get(TOPIC_ID, ends[TOPIC_ID]) != ends[TOPIC_ID]:
            self._lost(f"topic {self._options.topic} was deleted and created again")
            begin = {TOPIC_ID: ends[TOPIC_ID]}
        for key in queue_offsets(begin).keys() & queue_offsets(ends).keys():
            if ends[key] < begin[key]:
                self._lost(f"queue {key} ends at {ends[key]}, before {begin[key]}")
                begin = {**begin, key: ends[key]}
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else 0
        found = batch_end(queue_offsets(begin), queue_offsets(ends), rows_max)
        return sorted_offsets({**found, TOPIC_ID: ends[TOPIC_ID]})

    def reportLatestOffset(self) -> Offsets | None:
        """Return the newest offsets, from which Spark computes the backlog."""
        return self._seen

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[SlicePartition]:
        """Return one slice of each queue with new messages."""
        topic_id = end.get(TOPIC_ID, 0)
        begin = queue_offsets(start) if start.get(TOPIC_ID, topic_id) == topic_id else {}
        return [
            SlicePartition(
                QueueSlice(queue_of(self._options.topic, key), begin.get(key, 0), after, topic_id)
            )
            for key, after in queue_offsets(end).items()
            if after > begin.get(key, 0)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of a slice."""
        return _read(self._options, partition)

    def stop(self) -> None:
        """Close the connections."""
        if self._cluster is not None:
            self._cluster.__exit__(None, None, None)
            self._cluster = None

    def _opened(self) -> ClusterClient:
        if self._cluster is None:
            self._cluster = ClusterClient(self._options.connection).__enter__()
        return self._cluster

    def _ends(self) -> Offsets:
        extents = stored_extents(self._opened(), self._options)
        return _as_offsets({key: each.next_offset for key, each in extents.items()}, extents)

    def _lost(self, what: str) -> None:
        if self._options.fail_on_data_loss:
            raise MessagesLost(
                f"{what}. Start with a new checkpoint, or set failOnDataLoss "
                "to false to continue with the messages that are stored."
            )


def starting_offsets(options: Mapping[str, str]) -> str:
    """Where a stream with these options would begin now, for the option `startingOffsets`.

    A stream that begins at the end, or at a time, resolves that position when it first runs. If it
    is killed before its first micro-batch is done, it resolves the position again and skips the
    messages in between. To avoid that, call this once and store the result.
    """
    read = read_options(options)
    with ClusterClient(read.connection) as cluster:
        extents = stored_extents(cluster, read)
        found = resolve_offsets(cluster, read, extents, read.starting)
    return json.dumps(sorted_offsets(found))


def _read(options: ReadOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    if not isinstance(partition, SlicePartition):  # Spark passes its own partition if there is none
        return iter(())
    return read_slice(options, partition.slice)


def _as_offsets(found: Offsets, extents: Mapping[str, StoredExtent]) -> Offsets:
    return sorted_offsets(
        {**found, TOPIC_ID: max((e.topic_id for e in extents.values()), default=0)}
    )


def _checked(options: ReadOptions, schema: StructType) -> ReadOptions:
    """Return the options; raise BadOption if the schema is not that of their view."""
    meant = METRICS if options.view == "metrics" else MESSAGES
    if schema.fieldNames() != meant.names:
        raise BadOption(f"the view {options.view} has fixed columns: remove schema(...)")
    return options
