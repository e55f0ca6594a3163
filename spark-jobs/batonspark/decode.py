"""Decode stored batches to Arrow rows: messages, or the metric events in them. Pure.

There is no Python loop over messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batonmq._columns.batch_columns import RecordColumns, check_batch, record_columns
from batonmq._core.queues import QueueRef
from batonmq._core.records import Header, decode_properties
from batonmq.errors import OldTopic
from batonspark.event_rows import EVENTS, TYPES, one_batch
from batonspark.metric_columns import BATCH_COLUMNS, DROPPED_INDEX
from batonspark.metric_rows import MetricMessages, metric_rows

Int64Array = npt.NDArray[np.int64]
Bounds = Mapping[str, Int64Array]

MESSAGES: pa.Schema = pa.schema(
    [
        ("topic", pa.string()),
        ("broker", pa.string()),
        ("queue_id", pa.int32()),
        ("offset", pa.int64()),
        ("key", pa.string()),
        ("tag", pa.string()),
        ("properties", TYPES["texts"]),
        ("body", pa.binary()),
        ("store_time", TYPES["timestamp"]),
    ]
)
METRICS: pa.Schema = pa.schema(
    [
        *((name, TYPES[kind]) for name, kind in BATCH_COLUMNS.items()),
        *EVENTS,
        ("sys_broker", pa.string()),
        ("sys_queue_id", pa.int32()),
        ("sys_offset", pa.int64()),
        ("store_time", TYPES["timestamp"]),
    ]
)
LOST_COUNT = "baton.lost_count"
DATA_LOSS = "data_loss"
_NAME_END, _VALUE_END = 1, 2


@dataclass(frozen=True, slots=True)
class QueueSlice:
    """Messages [first_offset, next_offset) of a queue.

    Attributes:
        topic_id: Id of the queue's topic; 0 for any.
    """

    queue: QueueRef
    first_offset: int
    next_offset: int
    topic_id: int = 0


def messages(batches: Sequence[bytes], wanted: QueueSlice) -> pa.RecordBatch:
    """Return the messages of a slice, from stored batches.

    Raises:
        BadBatch, BadChecksum: a batch is damaged.
        OldTopic: a batch belongs to another topic with the same name.
    """
    return one_batch([_messages(part, wanted) for part in _parts(batches, wanted)], MESSAGES)


def metrics(batches: Sequence[bytes], wanted: QueueSlice) -> pa.RecordBatch:
    """Return the metric events in the messages of a slice, from stored batches.

    Raises:
        BadBatch, BadChecksum, OldTopic: as `messages`.
    """
    bodies: list[bytes] = []
    offsets: list[Int64Array] = []
    times: list[Int64Array] = []
    for part in _parts(batches, wanted):
        bounds = part.columns.bounds[:, 4:].tolist()
        bodies += [part.columns.section[begin:end] for begin, end in bounds]
        offsets.append(part.offsets)
        times.append(np.full(len(bounds), part.header.store_unix_ms))
    if not bodies:
        return pa.RecordBatch.from_pylist([], METRICS)
    return metric_rows(
        MetricMessages(wanted.queue, bodies, np.concatenate(offsets), np.concatenate(times)),
        METRICS,
    )


def lost_messages(lost: QueueSlice, unix_ms: int) -> pa.RecordBatch:
    """Return the row that represents removed messages."""
    row = {
        "topic": lost.queue.topic,
        "broker": lost.queue.broker,
        "queue_id": lost.queue.queue_id,
        "offset": lost.first_offset,
        "properties": [(LOST_COUNT, str(lost.next_offset - lost.first_offset))],
        "store_time": unix_ms * 1_000,
    }
    return pa.RecordBatch.from_pylist([row], MESSAGES)


def lost_metrics(lost: QueueSlice, unix_ms: int) -> pa.RecordBatch:
    """Return the row that represents removed messages of the metrics topic."""
    queue = lost.queue
    row = {
        "source": "spark",
        "producer_id": str(queue),
        "seq": lost.first_offset,
        "event_index": DROPPED_INDEX,
        "kind": DATA_LOSS,
        "time": unix_ms * 1_000,
        "topic": queue.topic,
        "broker": queue.broker,
        "queue_id": queue.queue_id,
        "first_offset": lost.first_offset,
        "next_offset": lost.next_offset,
        "count": lost.next_offset - lost.first_offset,
        "sys_broker": queue.broker,
        "sys_queue_id": queue.queue_id,
        "sys_offset": lost.first_offset,
        "store_time": unix_ms * 1_000,
    }
    return pa.RecordBatch.from_pylist([row], METRICS)


@dataclass(frozen=True, slots=True)
class _Part:
    """The records of a batch that belong to the slice."""

    header: Header
    columns: RecordColumns
    offsets: Int64Array


def _parts(batches: Sequence[bytes], wanted: QueueSlice) -> Iterator[_Part]:
    for batch in batches:
        header = check_batch(batch, stamped=True)
        if wanted.topic_id not in (0, header.topic_id):
            raise OldTopic(
                f"{wanted.queue} has topic id {header.topic_id}, expected {wanted.topic_id}",
                facts={"topic_id": header.topic_id, "current": wanted.topic_id},
            )
        begin = max(wanted.first_offset - header.first_offset, 0)
        end = min(wanted.next_offset - header.first_offset, header.count)
        if begin >= end:
            continue
        columns = record_columns(batch, header)
        offsets = np.arange(header.first_offset + begin, header.first_offset + end)
        yield _Part(header, RecordColumns(columns.section, columns.bounds[begin:end]), offsets)


def _messages(part: _Part, wanted: QueueSlice) -> pa.RecordBatch:
    count, queue = len(part.offsets), wanted.queue
    bounds, section = part.columns.bounds, part.columns.section
    first, after = int(bounds[0, 0]), int(bounds[-1, 5])
    pieces = _pieces(section, np.append((bounds[:, :5]).ravel(), after))
    places = 5 * np.arange(count)
    lengths = np.diff(bounds, axis=1)
    arrays = [
        pa.repeat(pa.scalar(queue.topic), count),
        pa.repeat(pa.scalar(queue.broker), count),
        pa.repeat(pa.scalar(queue.queue_id, pa.int32()), count),
        pa.array(part.offsets),
        _text(pieces.take(pa.array(places + 1, mask=lengths[:, 1] == 0))),
        _text(pieces.take(pa.array(places + 2, mask=lengths[:, 2] == 0))),
        _properties(section[first:after], bounds[:, 3] - first, bounds[:, 4] - first),
        pieces.take(pa.array(places + 4)),
        pa.repeat(pa.scalar(part.header.store_unix_ms * 1_000, TYPES["timestamp"]), count),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=MESSAGES)


def _pieces(data: bytes, bounds: Int64Array) -> pa.BinaryArray:
    """Return the pieces of `data` between consecutive bounds, without a copy."""
    offsets = pa.py_buffer(bounds.astype(np.int32))
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(bounds) - 1, [None, offsets, pa.py_buffer(data)]
    )


def _text(raw: pa.BinaryArray) -> pa.StringArray:
    """Return raw bytes as text; bytes that are not UTF-8 become U+FFFD."""
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        values = raw.to_pylist()
        return pa.array(
            [None if value is None else value.decode("utf-8", "replace") for value in values],
            pa.string(),
        )


def _properties(data: bytes, begins: Int64Array, ends: Int64Array) -> pa.MapArray:
    """Return the properties of each record: name 0x01 value 0x02, repeated, in [begin, end)."""
    if (begins == ends).all():
        offsets = pa.array(np.zeros(len(begins) + 1, np.int32))
        empty = pa.array([], pa.string())
        return pa.MapArray.from_arrays(offsets, empty, empty).cast(TYPES["texts"])
    raw = np.frombuffer(data, np.uint8)
    marks = np.flatnonzero((raw == _NAME_END) | (raw == _VALUE_END))
    record = np.searchsorted(ends, marks, "right")  # the record whose properties may hold it
    inside = marks >= begins[np.minimum(record, len(begins) - 1)]
    marks, record = marks[inside & (record < len(begins))], record[inside & (record < len(begins))]
    kinds = raw[marks]
    closed = raw[ends[ends > begins] - 1] == _VALUE_END
    regular = len(marks) % 2 == 0 and closed.all()
    if not regular or (kinds[::2] != _NAME_END).any() or (kinds[1::2] != _VALUE_END).any():
        return _irregular_properties(data, begins, ends)
    name_ends, value_ends, owners = marks[::2], marks[1::2], record[1::2]
    first = np.append(True, owners[1:] != owners[:-1])
    name_begins = np.where(first, begins[owners], np.append(0, value_ends[:-1]) + 1)
    names = _cut(data, name_begins, name_ends)
    values = _cut(data, name_ends + 1, value_ends)
    counts = np.bincount(owners, minlength=len(begins))
    offsets = pa.array(np.append(0, np.cumsum(counts)).astype(np.int32))
    return pa.MapArray.from_arrays(offsets, _text(names), _text(values)).cast(TYPES["texts"])


def _cut(data: bytes, begins: Int64Array, ends: Int64Array) -> pa.BinaryArray:
    """Return the pieces [begins[i], ends[i]) of `data`; the bounds ascend and may have gaps."""
    bounds = np.empty(2 * len(begins) + 1, np.int64)
    bounds[:-1:2], bounds[1::2], bounds[-1] = begins, ends, ends[-1]
    return _pieces(data, bounds).take(pa.array(2 * np.arange(len(begins))))


def _irregular_properties(data: bytes, begins: Int64Array, ends: Int64Array) -> pa.MapArray:
    """Return properties that do not have the usual form, one record at a time."""
    rows = [
        list(decode_properties(data[begin:end]).items())
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
    ]
    return pa.array(rows, TYPES["texts"])


def rows_within(batch: pa.RecordBatch, rows_max: int) -> Iterator[pa.RecordBatch]:
    """Split a record batch into parts of at most `rows_max` rows, without a copy."""
    for begin in range(0, batch.num_rows, rows_max):
        yield batch.slice(begin, rows_max)
