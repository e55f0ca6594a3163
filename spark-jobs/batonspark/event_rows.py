"""Rows of metric events, as Arrow columns.

Rows are built by kind, column by column, so that an event costs little more than the access to its
fields. `batonspark.encoded_events` is faster for many events of a kind.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.unknown_fields import UnknownFieldSet

from baton.common.v1.queue_pb2 import GroupQueue
from baton.metrics.v1.metrics_service_pb2 import MetricEvent
from batonspark.metric_columns import EVENT_COLUMNS, KINDS, NO_KIND, Getter, unknown_kind

Int64Array = npt.NDArray[np.int64]
Column = Callable[[Sequence[Any]], pa.Array]
"""Returns a column for messages of one kind."""

TYPES: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "bigints": pa.list_(pa.field("element", pa.int64())),
    "texts": pa.map_(pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string())),
    "binary": pa.binary(),
}
EVENTS: pa.Schema = pa.schema([(name, TYPES[kind]) for name, kind in EVENT_COLUMNS.items()])
"""Schema of the rows of events."""

_LENGTH_DELIMITED = 2
_LAST_COMMON_FIELD = 9


@dataclass(frozen=True, slots=True)
class EventRows:
    """Rows of events, grouped by kind.

    Attributes:
        rows: Rows with the schema EVENTS.
        places: Shape (rows,): index of the event of each row.
    """

    rows: pa.RecordBatch
    places: Int64Array


def event_rows(events: Sequence[MetricEvent]) -> EventRows:
    """Return the rows of events."""
    by_kind: defaultdict[str | None, list[int]] = defaultdict(list)
    for place, event in enumerate(events):
        by_kind[event.WhichOneof("kind")].append(place)
    parts = [
        rows_of_kind(kind, [events[place] for place in places]) for kind, places in by_kind.items()
    ]
    order = np.fromiter(chain.from_iterable(by_kind.values()), np.int64, len(events))
    return EventRows(one_batch(parts, EVENTS), order)


def one_batch(parts: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of all parts as one batch."""
    if len(parts) == 1:
        return parts[0]
    table = pa.Table.from_batches(parts, schema).combine_chunks()
    batches = table.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema)


def timestamps(unix_ms: Int64Array) -> pa.Array:
    """Return a column of times in Unix milliseconds."""
    return pa.array(unix_ms * 1_000).cast(TYPES["timestamp"])


def rows_of_kind(kind: str | None, events: Sequence[MetricEvent]) -> pa.RecordBatch:
    """Return the rows of events of one kind."""
    count = len(events)
    columns = queue_columns([event.queue.SerializeToString() for event in events])
    times = np.fromiter(map(attrgetter("unix_ms"), events), np.int64, count)
    columns["time"] = timestamps(times)
    if kind is None:
        names, payloads = zip(*map(_unknown, events), strict=True)
        columns["kind"] = pa.array(names, pa.string())
        columns["payload"] = pa.array(payloads, pa.binary())
    else:
        columns["kind"] = pa.repeat(pa.scalar(kind, pa.string()), count)
        messages = list(map(attrgetter(kind), events))
        for name, column in _plan(kind).items():
            columns[name] = column(messages)
    return filled(columns, count)


def filled(columns: Mapping[str, pa.Array], count: int) -> pa.RecordBatch:
    """Return rows with the schema EVENTS; columns that are not given are null."""
    arrays = [
        columns[field.name] if field.name in columns else pa.nulls(count, field.type)
        for field in EVENTS
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=EVENTS)


def queue_columns(encoded: Iterable[bytes]) -> dict[str, pa.Array]:
    """Return the columns of the encoded queues of events, of which there are few; null for none."""
    codes: dict[bytes, int] = {}
    places = [codes.setdefault(each, len(codes)) for each in encoded]
    queues = list(map(GroupQueue.FromString, codes))
    columns = {
        "consumer_group": [queue.group or None for queue in queues],
        "topic": [queue.queue.topic or None for queue in queues],
        "broker": [queue.queue.broker or None for queue in queues],
        "queue_id": [
            signed(queue.queue.queue_id, 32) if queue.HasField("queue") else None
            for queue in queues
        ],
    }
    taken = pa.array(np.array(places, np.int32))
    return {
        name: pa.array(values, TYPES[EVENT_COLUMNS[name]]).take(taken)
        for name, values in columns.items()
    }


def _unknown(event: MetricEvent) -> tuple[str, bytes | None]:
    """Return the kind and the bytes of an event of an unknown kind."""
    for one in UnknownFieldSet(event):  # type: ignore[attr-defined]  # its stub has no __iter__
        if one.wire_type == _LENGTH_DELIMITED and one.field_number > _LAST_COMMON_FIELD:
            return unknown_kind(one.field_number), one.data
    return NO_KIND, None


@cache
def _plan(kind: str) -> Mapping[str, Column]:
    """Return the function for each column of a kind."""
    meant = KINDS.get(kind)
    if meant is None:
        return {}
    message = MetricEvent.DESCRIPTOR.fields_by_name[kind].message_type
    assert message is not None
    plan: dict[str, Column] = {}
    for name, getter in meant.columns.items():
        described = message.fields_by_name.get(getter) if isinstance(getter, str) else None
        enum = described.enum_type if described is not None else None
        plan[name] = _column(_getting(getter), EVENT_COLUMNS[name], enum)
    if meant.attrs:
        plan["attrs"] = _attrs({name: _getting(getter) for name, getter in meant.attrs.items()})
    return plan


def _getting(getter: Getter) -> Callable[[Any], Any]:
    return attrgetter(getter) if isinstance(getter, str) else getter


def _column(get: Callable[[Any], Any], kind: str, enum: EnumDescriptor | None) -> Column:
    arrow = TYPES[kind]
    if kind == "bigints":
        return lambda messages: _lists([get(each) for each in messages])
    if enum is not None:
        names = enum_names(enum)
        return lambda messages: pa.array(
            [names.get(value, str(value)) for value in map(get, messages)], arrow
        )
    if kind == "string":
        return lambda messages: pa.array([text or None for text in map(get, messages)], arrow)
    return lambda messages: pa.array(
        [None if value is None else signed(value) for value in map(get, messages)], arrow
    )


def signed(value: int, bits: int = 64) -> int:
    """Return a number as a signed one of `bits` bits; larger numbers lose their upper bits."""
    half = 1 << (bits - 1)
    return value if -half <= value < half else (value + half) % (2 * half) - half


def _lists(lists: Sequence[Sequence[int]]) -> pa.Array:
    ends = np.cumsum([0, *map(len, lists)], dtype=np.int32)
    values = np.fromiter(chain.from_iterable(lists), np.uint64, int(ends[-1])).astype(np.int64)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values), type=TYPES["bigints"])


def enum_names(enum: EnumDescriptor) -> dict[int, str | None]:
    """Return the names of an enumeration without their prefix; None for UNSPECIFIED."""
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
    names: dict[int, str | None] = {
        number: value.name.removeprefix(prefix) for number, value in enum.values_by_number.items()
    }
    return names | {0: None}


def _attrs(getters: Mapping[str, Callable[[Any], Any]]) -> Column:
    def column(messages: Sequence[Any]) -> pa.Array:
        rows: list[list[tuple[str, str]]] = [[] for _ in messages]
        for name, get in getters.items():
            for pairs, value in zip(rows, map(get, messages), strict=True):
                if value:
                    pairs.append((name, _text(value)))
        if not any(rows):
            return pa.nulls(len(messages), TYPES["texts"])
        return pa.array([pairs or None for pairs in rows], TYPES["texts"])

    return column


def _text(value: object) -> str:
    return "true" if value is True else str(value)
