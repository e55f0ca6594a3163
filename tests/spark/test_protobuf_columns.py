"""Goal: fields decoded with numpy are equal to those that Protobuf decodes.

Method: Hypothesis fills messages of the metrics contract, which has all types of fields in use,
with numbers at the edges of their types; bytes are cut and changed.
"""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from baton.metrics.v1.metrics_service_pb2 import LogBuckets, MetricEvent
from batonspark.protobuf_columns import MalformedProtobuf, Messages, packed, zigzag

INT64 = st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from(
    [0, 1, 127, 128, (1 << 56) - 1, 1 << 56, (1 << 63) - 1, -1, -(1 << 63)]
)
UINT64 = st.integers(0, (1 << 64) - 1)
EVENTS = st.builds(MetricEvent, unix_ms=INT64)
BUCKETS = st.builds(
    LogBuckets,
    first_bucket=st.integers(-(1 << 31), (1 << 31) - 1),
    counts=st.lists(UINT64, max_size=12),
    sum=UINT64,
)


def signed(value: int) -> int:
    return value if value < 1 << 63 else value - (1 << 64)


@given(st.lists(EVENTS, min_size=1, max_size=20))
def test_numbers_of_any_length_are_decoded(events: list[MetricEvent]) -> None:
    fields = Messages.of([event.SerializeToString() for event in events]).fields()
    values = fields[1].values.tolist() if 1 in fields else [0] * len(events)
    assert values == [event.unix_ms for event in events]


@given(st.lists(BUCKETS, min_size=1, max_size=20))
def test_packed_and_zigzag_numbers_are_decoded(buckets: list[LogBuckets]) -> None:
    messages = Messages.of([each.SerializeToString() for each in buckets])
    fields = messages.fields()
    if 1 in fields:
        assert zigzag(fields[1].values).tolist() == [each.first_bucket for each in buckets]
    if 2 in fields:
        counts, numbers = packed(messages.data, fields[2])
        assert counts.tolist() == [len(each.counts) for each in buckets]
        assert numbers.tolist() == [signed(n) for each in buckets for n in each.counts]
    if 3 in fields:
        assert fields[3].values.tolist() == [signed(each.sum) for each in buckets]


@given(st.lists(st.text(max_size=20), min_size=1, max_size=20))
def test_nested_messages_are_decoded(names: list[str]) -> None:
    events = [MetricEvent() for _ in names]
    for number, (event, name) in enumerate(zip(events, names, strict=True)):
        event.sent.client_id = name
        if number % 3 == 0:
            event.queue.queue.queue_id = number + 1
    messages = Messages.of([event.SerializeToString() for event in events])
    fields = messages.fields()
    sent = messages.within(fields[33]).fields()
    if 1 in sent:
        texts = [
            messages.data[begin:end].decode()
            for begin, end in zip(sent[1].values, sent[1].ends, strict=True)
        ]
        assert texts == names
    queues = messages.within(messages.within(fields[2]).fields()[2]).fields()
    assert queues[3].values.tolist() == [0 if n % 3 else n + 1 for n in range(len(names))]


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_arbitrary_bytes_are_decoded_as_protobuf_decodes_them(first: bytes, second: bytes) -> None:
    """Only where this module decodes at all, and without unknown fields."""
    try:
        fields = Messages.of([first, second]).fields()
    except MalformedProtobuf:
        return
    for number, raw in enumerate((first, second)):
        try:
            event = MetricEvent.FromString(raw)
        except DecodeError:
            continue
        if event.unix_ms and 1 in fields:
            assert fields[1].values[number] == event.unix_ms


@pytest.mark.parametrize("raw", [b"\x08", b"\x12\x05ab", b"\x0b", b"\x08" + b"\xff" * 11, b"\x80"])
def test_truncated_messages_are_rejected(raw: bytes) -> None:
    with pytest.raises(MalformedProtobuf):
        Messages.of([b"\x08\x01", raw]).fields()


def test_last_of_several_values_counts() -> None:
    fields = Messages.of([b"\x08\x01\x08\x02"]).fields()
    assert fields[1].values.tolist() == [2]


def test_no_messages_have_no_fields() -> None:
    assert Messages.of([]).fields() == {}
    assert Messages.of([b"", b""]).fields() == {}
    assert np.array_equal(Messages.of([b"", b"\x08\x01"]).fields()[1].present, [False, True])
