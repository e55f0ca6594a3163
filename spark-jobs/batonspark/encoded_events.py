"""Rows of encoded metric events, thousands at once.

Numpy decodes the events of a kind together. Kinds with few events, or with a computed column, are
decoded one by one by `batonspark.event_rows`; the rows are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from baton.metrics.v1.metrics_service_pb2 import MetricBatch, MetricEvent
from batonspark.event_rows import (
    EVENTS,
    TYPES,
    EventRows,
    enum_names,
    event_rows,
    filled,
    one_batch,
    queue_columns,
    timestamps,
)
from batonspark.metric_columns import EVENT_COLUMNS, KINDS, UNREADABLE, Getter, Total
from batonspark.protobuf_columns import (
    Field,
    Int64Array,
    MalformedProtobuf,
    Messages,
    packed,
    zigzag,
)

FEW = 100
"""At most this many events of a kind are decoded one by one, which is faster."""
_TIME, _QUEUE, _FIRST_KIND = 1, 2, 10
_SIGNED = (FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SINT64)
_WHOLE = (
    *_SIGNED,
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_BOOL,
    FieldDescriptor.TYPE_ENUM,
)
Path = tuple[int, ...]


@cache
def shallow_batch() -> type[Any]:
    """Return the class of a MetricBatch with `events` as bytes."""
    file = FileDescriptorProto(name="shallow.proto", package="baton.shallow", syntax="proto3")
    batch = file.message_type.add()
    MetricBatch.DESCRIPTOR.CopyToProto(batch)
    for field in batch.field:
        if field.name == "events":
            field.type = FieldDescriptorProto.TYPE_BYTES
            field.ClearField("type_name")
    pool = DescriptorPool()
    pool.Add(file)
    made: type[Message] = GetMessageClass(pool.FindMessageTypeByName("baton.shallow.MetricBatch"))
    return made


def encoded_rows(encoded: Sequence[bytes]) -> EventRows:
    """Return the rows of encoded events; bytes that are not an event have the kind `unreadable`."""
    try:
        return _rows(encoded)
    except (MalformedProtobuf, pa.ArrowInvalid):
        return _one_by_one(encoded, np.arange(len(encoded)))


def _rows(encoded: Sequence[bytes]) -> EventRows:
    events = Messages.of(encoded)
    fields = events.fields()
    times, queues = fields.get(_TIME), fields.get(_QUEUE)
    undecoded = np.ones(len(encoded), np.bool_)
    parts: list[EventRows] = []
    by_number = MetricEvent.DESCRIPTOR.fields_by_number
    for number, field in fields.items():
        places = np.flatnonzero(field.present)
        if number < _FIRST_KIND or len(places) <= FEW or number not in by_number:
            continue
        plan = _plan(by_number[number].name)
        if plan is None or times is None or not bool(undecoded[places].all()):
            continue
        undecoded[places] = False
        columns = _queue_columns(events.data, queues, places)
        columns |= plan.columns(events.within(field).some(places))
        columns["kind"] = pa.repeat(pa.scalar(by_number[number].name), len(places))
        columns["time"] = timestamps(times.values[places])
        parts.append(EventRows(filled(columns, len(places)), places))
    if undecoded.any():
        parts.append(_one_by_one(encoded, np.flatnonzero(undecoded)))
    return _joined(parts)


def _joined(parts: Sequence[EventRows]) -> EventRows:
    places = np.concatenate([part.places for part in parts] or [np.zeros(0, np.int64)])
    return EventRows(one_batch([part.rows for part in parts], EVENTS), places)


def _one_by_one(encoded: Sequence[bytes], places: Int64Array) -> EventRows:
    events: list[MetricEvent] = []
    read: list[int] = []
    bad: list[int] = []
    for place in places.tolist():
        try:
            events.append(MetricEvent.FromString(encoded[place]))
            read.append(place)
        except DecodeError:
            bad.append(place)
    decoded = event_rows(events)
    parts = [EventRows(decoded.rows, np.array(read, np.int64)[decoded.places])] if events else []
    if bad:
        rows = [{"kind": UNREADABLE, "payload": encoded[place]} for place in bad]
        parts.append(EventRows(pa.RecordBatch.from_pylist(rows, EVENTS), np.array(bad)))
    return _joined(parts)


def _queue_columns(data: bytes, field: Field | None, places: Int64Array) -> dict[str, pa.Array]:
    if field is None:
        return {}
    bounds = zip(field.values[places].tolist(), field.ends[places].tolist(), strict=True)
    return queue_columns([data[begin:end] for begin, end in bounds])


@dataclass(frozen=True, slots=True)
class _Source:
    """The field of a column, or of an entry of `attrs`.

    Attributes:
        path: Numbers of the fields that lead to it.
        described: Descriptor of the field.
        total: Whether the value is the sum of a repeated field.
    """

    path: Path
    described: FieldDescriptor
    total: bool = False


@dataclass(frozen=True, slots=True)
class _Plan:
    """The fields of the columns of a kind."""

    sources: Mapping[str, _Source]
    attrs: Mapping[str, _Source]

    def columns(self, messages: Messages) -> dict[str, pa.Array]:
        """Return the columns that are specific to the kind."""
        scanned = _Scanned(messages)
        columns = {
            name: scanned.column(source, EVENT_COLUMNS[name])
            for name, source in self.sources.items()
        }
        if self.attrs:
            columns["attrs"] = scanned.attrs(self.attrs)
        return columns


class _Scanned:
    """Fields of messages of one kind; fields of nested messages are decoded on demand."""

    def __init__(self, messages: Messages) -> None:
        self._messages: dict[Path, Messages] = {(): messages}
        self._fields: dict[Path, Mapping[int, Field]] = {(): messages.fields()}
        self._count = len(messages.begins)
        nothing = np.zeros(self._count, np.int64)
        self._absent = Field(np.zeros(self._count, np.bool_), nothing, nothing)

    def column(self, source: _Source, kind: str) -> pa.Array:
        """Return one column."""
        field, data = self._field(source.path), self._messages[()].data
        if source.total or kind == "bigints":
            counts, numbers = packed(data, field)
            ends = np.append(0, np.cumsum(counts))
            if source.total:
                sums = np.append(0, np.cumsum(numbers))
                return pa.array(sums[ends[1:]] - sums[ends[:-1]])
            offsets = pa.array(ends.astype(np.int32))
            return pa.ListArray.from_arrays(offsets, pa.array(numbers), type=TYPES[kind])
        if source.described.type == FieldDescriptor.TYPE_STRING:
            return _texts(data, field)
        values = self._numbers(source, field)
        if source.described.enum_type is not None:
            names = enum_names(source.described.enum_type)
            known, codes = np.unique(values, return_inverse=True)
            texts = [names.get(number, str(number)) for number in known.tolist()]
            return pa.array(texts, pa.string()).take(pa.array(codes))
        return pa.array(values).cast(TYPES[kind])

    def attrs(self, sources: Mapping[str, _Source]) -> pa.Array:
        """Return the column `attrs`: of each row the values that are not 0, false or empty."""
        texts: list[pa.Array] = []
        given: list[npt.NDArray[np.bool_]] = []
        for source in sources.values():
            field = self._field(source.path)
            if source.described.type == FieldDescriptor.TYPE_STRING:
                texts.append(_texts(self._messages[()].data, field))
                given.append(field.values < field.ends)
                continue
            values = self._numbers(source, field)
            given.append(values != 0)
            if source.described.type == FieldDescriptor.TYPE_BOOL:
                texts.append(pa.repeat(pa.scalar("true"), self._count))
            else:
                texts.append(pa.array(values).cast(pa.string()))
        is_given = np.stack(given, axis=1)
        if not is_given.any():
            return pa.nulls(self._count, TYPES["texts"])
        rows, names = np.nonzero(is_given)
        values = pa.concat_arrays(texts).take(pa.array(names * self._count + rows))
        keys = pa.array(list(sources)).take(pa.array(names))
        counts = is_given.sum(axis=1)
        offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
        nulls = pa.array(offsets, mask=np.append(counts == 0, False))
        return pa.MapArray.from_arrays(nulls, keys, values, type=TYPES["texts"])

    def _field(self, path: Path) -> Field:
        outer, number = path[:-1], path[-1]
        if outer not in self._fields:
            self._messages[outer] = self._messages[outer[:-1]].within(self._field(outer))
            self._fields[outer] = self._messages[outer].fields()
        return self._fields[outer].get(number, self._absent)

    def _numbers(self, source: _Source, field: Field) -> Int64Array:
        return zigzag(field.values) if source.described.type in _SIGNED else field.values


def _texts(data: bytes, field: Field) -> pa.Array:
    """Return a column of text, with null for empty text."""
    given = field.values < field.ends
    begins, ends = field.values[given], field.ends[given]
    bounds = np.empty(2 * len(begins) + 1, np.int32)
    bounds[:-1:2], bounds[1::2] = begins, ends
    bounds[-1] = ends[-1] if len(ends) else 0
    pieces = pa.BinaryArray.from_buffers(
        pa.binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    )
    places = pa.array(2 * (np.cumsum(given) - 1), mask=~given)
    return pieces.take(places).cast(pa.string())


@cache
def _plan(kind: str) -> _Plan | None:
    """Return the fields of a kind; None if it is unknown, or if one of its columns is computed."""
    meant = KINDS.get(kind)
    if meant is None:
        return None
    sources = {name: _source(kind, getter) for name, getter in meant.columns.items()}
    attrs = {name: _source(kind, getter) for name, getter in meant.attrs.items()}
    known = {name: source for name, source in sources.items() if source is not None}
    known_attrs = {name: source for name, source in attrs.items() if source is not None}
    if len(known) + len(known_attrs) < len(sources) + len(attrs):
        return None
    return _Plan(known, known_attrs)


def _source(kind: str, getter: Getter) -> _Source | None:
    if not isinstance(getter, str | Total):
        return None
    path = getter.path if isinstance(getter, Total) else getter
    message = MetricEvent.DESCRIPTOR.fields_by_name[kind].message_type
    numbers: list[int] = []
    for name in path.split("."):
        assert message is not None
        described = message.fields_by_name[name]
        numbers.append(described.number)
        message = described.message_type
    if described.type not in (*_WHOLE, FieldDescriptor.TYPE_STRING):
        return None
    return _Source(tuple(numbers), described, isinstance(getter, Total))
