"""`format("baton")`: topics as tables and streams of Spark, and rows as messages.

Spark makes readers anew in several processes of the driver and on every executor: nothing that one
of them learns is known to another but through offsets and partitions.
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
    """See the module; docs/reference/spark.md has the options."""

    @classmethod
    def name(cls) -> str:
        """What stands in `format(...)`."""
        return "baton"

    def schema(self) -> str:
        """The columns of the view."""
        return METRICS_DDL if self._reading().view == "metrics" else MESSAGES_DDL

    def reader(self, schema: StructType) -> DataSourceReader:
        """Of a batch read."""
        options = _checked(self._reading(), schema)
        return PushedQueueReader(options) if options.push_down else QueueReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Of a stream."""
        return QueueStreamReader(_checked(self._reading(), schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Of a batch write."""
        if overwrite:
            raise BadOption("messages can't be overwritten: use mode append")
        return MessageWriter(write_options(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Of a streaming write."""
        return MessageStreamWriter(write_options(self.options), schema)

    def _reading(self) -> ReadOptions:
        return read_options(self.options)


@dataclass(frozen=True)
class SlicePartition(InputPartition):
    """One partition: a slice of one queue."""

    slice: QueueSlice


class QueueReader(DataSourceReader):
    """Reads what a topic holds once."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._wanted = ReadFilter()

    def partitions(self) -> Sequence[SlicePartition]:
        """One slice of each queue."""
        with ClusterClient(self._options.connection) as cluster:
            return list(map(SlicePartition, batch_slices(cluster, self._options, self._wanted)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a slice."""
        return _read(self._options, partition)


class PushedQueueReader(QueueReader):
    """As `QueueReader`; filters spare it the reading of what they would throw away."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take notice of filters; Spark applies all of them to the rows that come."""
        prefix = "sys_" if self._options.view == "metrics" else ""
        self._wanted = narrow(self._wanted, filters, prefix)
        return filters


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a topic as it grows. Offsets are those of its queues."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._cluster: ClusterClient | None = None
        self._initial: Offsets | None = None
        self._ceiling: Offsets | None = None
        self._seen: Offsets | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cluster": None}

    def initialOffset(self) -> Offsets:
        """Where a query without checkpoint begins. Spark asks twice and has to be told the same."""
        if self._initial is None:
            options, cluster = self._options, self._opened()
            extents = stored_extents(cluster, options)
            found = resolve_offsets(cluster, options, extents, options.starting)
            self._initial = _as_offsets(found, extents)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """`maxRowsPerTrigger`."""
        rows_max = self._options.rows_max
        return ReadMaxRows(rows_max) if rows_max else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """The query ends with what is there now."""
        self._ceiling = self._ends()

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """Where the next micro-batch ends.

        Raises:
            MessagesLost: the topic was deleted and made again, or a queue has lost its end.
        """
        ends = self._ceiling or self._ends()
        self._seen = self._ceiling or ends
        begin = start
        if start.get(TOPIC_ID, ends[TOPIC_ID]) != ends[TOPIC_ID]:
            self._lost(f"topic {self._options.topic} was deleted and made again")
            begin = {TOPIC_ID: ends[TOPIC_ID]}
        for key in queue_offsets(begin).keys() & queue_offsets(ends).keys():
            if ends[key] < begin[key]:
                self._lost(f"queue {key} ends at {ends[key]}, before {begin[key]}")
                begin = {**begin, key: ends[key]}
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else 0
        found = batch_end(queue_offsets(begin), queue_offsets(ends), rows_max)
        return sorted_offsets({**found, TOPIC_ID: ends[TOPIC_ID]})

    def reportLatestOffset(self) -> Offsets | None:
        """What there is: with the end of a batch it tells how far the query is behind."""
        return self._seen

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[SlicePartition]:
        """One slice of each queue that has grown."""
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
        """The rows of a slice."""
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
                f"{what}. Begin anew with another checkpoint, or set failOnDataLoss "
                "to false to go on with what is there."
            )


def starting_offsets(options: Mapping[str, str]) -> str:
    """Where a stream with these options would begin now, for the option `startingOffsets`.

    A stream that is to begin at the end, or at a time, asks where that is when it first runs. If it
    is killed before its first micro-batch is done, it asks again, and has left something out. To
    find out once and keep the answer is safe.
    """
    read = read_options(options)
    with ClusterClient(read.connection) as cluster:
        extents = stored_extents(cluster, read)
        found = resolve_offsets(cluster, read, extents, read.starting)
    return json.dumps(sorted_offsets(found))


def _read(options: ReadOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    if not isinstance(partition, SlicePartition):  # Spark makes one of its own where there is none
        return iter(())
    return read_slice(options, partition.slice)


def _as_offsets(found: Offsets, extents: Mapping[str, StoredExtent]) -> Offsets:
    return sorted_offsets(
        {**found, TOPIC_ID: max((e.topic_id for e in extents.values()), default=0)}
    )


def _checked(options: ReadOptions, schema: StructType) -> ReadOptions:
    """The options, if the schema is that of their view."""
    meant = METRICS if options.view == "metrics" else MESSAGES
    if schema.fieldNames() != meant.names:
        raise BadOption(f"the view {options.view} has columns of its own: leave out schema(...)")
    return options
