"""Decode the messages of BATON_SYS_METRICS into events, without batches that were stored twice.

Repeated batches are removed before they are decoded, so that the state of the query has one row
for each message and not one for each event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError
from pyspark.sql import DataFrame

from batonmq._core.queues import QueueRef
from batonspark.decode import LOST_COUNT, METRICS, QueueSlice, lost_metrics
from batonspark.encoded_events import shallow_batch
from batonspark.event_columns import without_repeats
from batonspark.event_rows import signed
from batonspark.metric_columns import producer_id
from batonspark.metric_rows import MetricMessages, metric_rows
from batonspark.schemas import MESSAGES as MESSAGES_DDL

STATE_VERSION = 1
"""Version of the state in Spark; a new version starts a new checkpoint."""
DATED = METRICS.append(pa.field("date", pa.date32()))
"""Rows of METRICS with the date of their store time, the partition column of the table."""
PORTION_BYTES = 4 << 20


def bronze(messages: DataFrame) -> DataFrame:
    """Return the messages of BATON_SYS_METRICS without repeated batches.

    The sink decodes them, with `events_of`: passing a row of 36 columns for each event through
    Spark would cost more than to make and to write it.
    """
    named = messages.mapInArrow(with_names, f"{MESSAGES_DDL}, producer_id STRING, seq BIGINT")
    return without_repeats(named).drop("producer_id", "seq")


def with_names(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Add the columns producer_id and seq, which identify the batch in each message."""
    for batch in batches:
        queues = _queues(batch)
        offsets = batch.column("offset").to_pylist()
        bodies = batch.column("body").to_pylist()
        names = [_name(*each) for each in zip(bodies, queues, offsets, strict=True)]
        producers = pa.array([name for name, _ in names], pa.string())
        yield pa.RecordBatch.from_arrays(
            [*batch.columns, producers, pa.array([seq for _, seq in names], pa.int64())],
            names=[*batch.schema.names, "producer_id", "seq"],
        )


def _name(body: bytes | None, queue: QueueRef, offset: int) -> tuple[str, int]:
    """Return (producer_id, seq) of a batch; queue and offset for any other body."""
    try:
        batch = shallow_batch().FromString(body or b"")
    except DecodeError:
        return str(queue), offset
    if not batch.source:
        return str(queue), offset
    return producer_id(batch.source, batch.incarnation_id), signed(batch.seq)


def events_of(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the events in messages, and a row for lost messages, as rows of DATED."""
    for batch in batches:
        places: defaultdict[QueueRef, list[int]] = defaultdict(list)
        for place, queue in enumerate(_queues(batch)):
            places[queue].append(place)
        for queue, some in places.items():
            messages = batch.take(pa.array(some))
            for rows in chain.from_iterable(_of_queue(m, queue) for m in _portions(messages)):
                yield rows.append_column(DATED.field("date"), rows["store_time"].cast(pa.date32()))


def _portions(messages: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split messages by the size of their bodies: decoded events need about ten times as much."""
    lengths = pc.fill_null(pc.binary_length(messages["body"]), 0).to_numpy(zero_copy_only=False)
    portion = np.cumsum(lengths, dtype=np.int64) // PORTION_BYTES
    bounds = [0, *(np.flatnonzero(np.diff(portion)) + 1).tolist(), len(portion)]
    for begin, end in pairwise(bounds):
        yield messages.slice(begin, end - begin)


def _of_queue(messages: pa.RecordBatch, queue: QueueRef) -> Iterator[pa.RecordBatch]:
    offsets = messages.column("offset").to_numpy()
    stored = messages.column("store_time").cast(pa.int64()).to_numpy() // 1_000
    properties = messages.column("properties").to_pylist()
    is_none = messages.column("body").is_null().to_pylist()
    lost = [
        int(dict(each or ()).get(LOST_COUNT, 0)) if none else 0
        for each, none in zip(properties, is_none, strict=True)
    ]
    for place in np.flatnonzero(lost):
        first = int(offsets[place])
        gap = QueueSlice(queue, first, first + lost[place])
        yield lost_metrics(gap, int(stored[place]))
    kept = np.flatnonzero(np.array(lost) == 0)
    bodies = messages.column("body").take(pa.array(kept)).to_pylist()
    found = MetricMessages(queue, [body or b"" for body in bodies], offsets[kept], stored[kept])
    yield metric_rows(found, METRICS)


def _queues(messages: pa.RecordBatch) -> list[QueueRef]:
    """Return the queue of each message."""
    columns = [messages.column(name).to_pylist() for name in ("topic", "broker", "queue_id")]
    return [QueueRef(*each) for each in zip(*columns, strict=True)]
