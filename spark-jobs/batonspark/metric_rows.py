"""Decode bodies of BATON_SYS_METRICS to rows with the columns METRICS. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError

from batonmq._core.queues import QueueRef
from batonspark.encoded_events import encoded_rows, shallow_batch
from batonspark.event_rows import EVENTS, TYPES, signed, timestamps
from batonspark.metric_columns import DROPPED, DROPPED_INDEX, UNREADABLE, producer_id

TIME_MAX_US = 253_370_764_800_000_000
"""Times before 1970, or in 9999 and later, become null: few readers support them."""
Int64Array = npt.NDArray[np.int64]
Batches = Sequence[Any]
"""MetricBatches with events as bytes; None for a body that is not a MetricBatch."""


@dataclass(frozen=True, slots=True)
class MetricMessages:
    """Messages of one queue; each field has one value for each message."""

    queue: QueueRef
    bodies: Sequence[bytes]
    offsets: Int64Array
    store_unix_ms: Int64Array


class _Head(NamedTuple):
    """Values that all rows of a message share."""

    source: str
    producer_id: str
    seq: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of events, with the message of each and its index in the batch of that message."""

    events: pa.RecordBatch
    message: Int64Array
    index: Int64Array


def metric_rows(messages: MetricMessages, schema: pa.Schema) -> pa.RecordBatch:
    """Return all events of the messages, and rows for dropped events and unreadable messages.

    Rows of one message need not be adjacent.
    """
    batches = [_parsed(body) for body in messages.bodies]
    parts = [
        *_of_events(batches),
        *_dropped(batches),
        *_unreadable(batches, messages),
    ]
    count = sum(part.events.num_rows for part in parts)
    if not count:
        return pa.RecordBatch.from_pylist([], schema)
    message = pa.array(np.concatenate([part.message for part in parts]))
    index = pa.array(np.concatenate([part.index for part in parts]).astype(np.int32))
    heads = [
        _head(batch, messages.queue, offset)
        for batch, offset in zip(batches, messages.offsets.tolist(), strict=True)
    ]
    events = pa.Table.from_batches([part.events for part in parts], EVENTS).combine_chunks()
    columns = {
        "source": pa.array([head.source for head in heads]).take(message),
        "producer_id": pa.array([head.producer_id for head in heads]).take(message),
        "seq": pa.array([head.seq for head in heads], pa.int64()).take(message),
        "event_index": index,
        "vocabulary": pa.array([head.vocabulary for head in heads], pa.int32()).take(message),
        "sys_broker": pa.repeat(pa.scalar(messages.queue.broker), count),
        "sys_queue_id": pa.repeat(pa.scalar(messages.queue.queue_id, pa.int32()), count),
        "sys_offset": pa.array(messages.offsets).take(message),
        "store_time": timestamps(messages.store_unix_ms).take(message),
    }
    for name, column in zip(EVENTS.names, events.columns, strict=True):
        columns[name] = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    columns["time"] = _valid_times(columns["time"])
    if columns["time"].null_count:  # rows without an event, or without its time
        columns["time"] = pc.coalesce(columns["time"], columns["store_time"])
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _head(batch: Any, queue: QueueRef, offset: int) -> _Head:
    if batch is None:
        return _Head("unknown", str(queue), offset, 0)
    identity = producer_id(batch.source, batch.incarnation_id)
    return _Head(batch.source, identity, signed(batch.seq), signed(batch.vocabulary, 32))


def _valid_times(times: pa.Array) -> pa.Array:
    """Return the times; null for times out of range."""
    bounds = pc.min_max(times.cast(pa.int64())).as_py()
    if bounds["min"] is None or (bounds["min"] >= 0 and bounds["max"] < TIME_MAX_US):
        return times
    micros = times.cast(pa.int64())
    known = pc.and_(pc.greater_equal(micros, 0), pc.less(micros, TIME_MAX_US))
    return pc.if_else(known, times, pa.scalar(None, TYPES["timestamp"]))


def _parsed(body: bytes) -> Any:
    try:
        return shallow_batch().FromString(body)
    except DecodeError:
        return None


def _of_events(batches: Batches) -> list[_Rows]:
    lists = [batch.events if batch is not None else () for batch in batches]
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    if not counts.any():
        return []
    decoded = encoded_rows(list(chain.from_iterable(lists)))
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    message = np.repeat(np.arange(len(counts)), counts)
    return [_Rows(decoded.rows, message[decoded.places], index[decoded.places])]


def _dropped(batches: Batches) -> list[_Rows]:
    counts = {
        number: signed(batch.dropped_count)
        for number, batch in enumerate(batches)
        if batch is not None and batch.dropped_count
    }
    return _special([{"kind": DROPPED, "count": count} for count in counts.values()], list(counts))


def _unreadable(batches: Batches, messages: MetricMessages) -> list[_Rows]:
    numbers = [number for number, batch in enumerate(batches) if batch is None]
    return _special(
        [{"kind": UNREADABLE, "payload": messages.bodies[number]} for number in numbers], numbers
    )


def _special(rows: Sequence[dict[str, object]], numbers: Sequence[int]) -> list[_Rows]:
    if not rows:
        return []
    index = np.full(len(rows), DROPPED_INDEX)
    return [_Rows(pa.RecordBatch.from_pylist(rows, EVENTS), np.array(numbers), index)]
