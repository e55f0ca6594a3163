"""Goal: every event of the metrics streams becomes one row, even events of an unknown kind.

Method: an event of every kind of the contract, with every field set; and invalid batches. No
Spark.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from baton.metrics.v1.metrics_service_pb2 import (
    DeliveredRange,
    HandedOver,
    Latency,
    LogBuckets,
    MetricBatch,
    MetricEvent,
    RemoteDelivered,
)
from batonmq._core.queues import QueueRef
from batonspark.decode import METRICS
from batonspark.encoded_events import FEW, encoded_rows
from batonspark.event_rows import EVENTS, EventRows, event_rows
from batonspark.metric_columns import EVENT_COLUMNS, KINDS
from batonspark.metric_rows import MetricMessages, metric_rows

QUEUE = QueueRef("BATON_SYS_METRICS", "broker-0", 1)


def fill(message: Message, number: int) -> None:
    """Set every field; all values differ where the type allows it."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    for at, field in enumerate(fields, start=number):
        repeated = field.is_repeated
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            fill(
                getattr(message, field.name).add() if repeated else getattr(message, field.name), at
            )
            continue
        value: object = at + 1
        if field.type == FieldDescriptor.TYPE_STRING:
            value = f"{field.name} {at}"
        elif field.type == FieldDescriptor.TYPE_BOOL:
            value = True
        elif field.type == FieldDescriptor.TYPE_ENUM:
            assert field.enum_type is not None
            value = field.enum_type.values[1].number
        if repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)


def event(kind: str, unix_ms: int = 1_700_000_000_123) -> MetricEvent:
    made = MetricEvent(unix_ms=unix_ms)
    fill(made.queue, 0)
    made.queue.queue.queue_id = 3
    inner = getattr(made, kind)
    inner.SetInParent()  # also if it has no field
    fill(inner, 40)
    return made


def rows_of(*batches: bytes) -> list[dict[str, object]]:
    count = len(batches)
    row_batches = metric_rows(
        MetricMessages(QUEUE, batches, np.arange(count) + 100, np.full(count, 1_700_000_001_000)),
        METRICS,
    )
    row_batches.validate(full=True)
    rows: list[dict[str, object]] = row_batches.to_pylist()
    return sorted(rows, key=lambda row: (row["sys_offset"], row["event_index"]))


KNOWN = [field.name for field in MetricEvent.DESCRIPTOR.oneofs_by_name["kind"].fields]


def test_every_kind_of_the_contract_has_its_columns() -> None:
    assert sorted(KINDS) == sorted(KNOWN)


@pytest.mark.parametrize("kind", KNOWN)
def test_no_field_of_an_event_is_lost(kind: str) -> None:
    """Each field is in a column or in `attrs`; the row has a value for each that it fills."""
    made = event(kind)
    (row,) = event_rows([made]).rows.to_pylist()
    assert row["kind"] == kind
    assert int(row["time"].timestamp() * 1000) == made.unix_ms
    meant = KINDS[kind]
    for column in meant.columns:
        assert row[column] is not None, column
    assert {name for name, _ in row["attrs"] or ()} == set(meant.attrs)
    used = {
        getter.split(".")[0]
        for getter in [*meant.columns.values(), *meant.attrs.values()]
        if isinstance(getter, str)
    }
    derived = {
        "handed_over": {"contend_ms"},
        "lock_denied": {"count"},
        "fenced": {"count"},
        "process_started": {"previous_incarnation_id"},
        "rebalanced": {"moves"},
        "subscription_refused": {"differences"},
        "subscription_changed": {"differences"},
        "queue_lag": {"oldest_unacked_ms"},
        "operator_called": {"needs"},
    }
    fields = {field.name for field in getattr(made, kind).DESCRIPTOR.fields}
    assert fields == used | derived.get(kind, set())


def test_rows_of_a_batch_are_its_events_in_order() -> None:
    events = [event(kind, 1_700_000_000_000 + n) for n, kind in enumerate(KNOWN)]
    batch = MetricBatch(source="storage/a", seq=4, incarnation_id=255, vocabulary=1, events=events)
    rows = rows_of(batch.SerializeToString())
    assert [row["kind"] for row in rows] == KNOWN
    assert [int(row["time"].timestamp() * 1000) for row in rows] == [e.unix_ms for e in events]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KNOWN)
def test_many_events_of_a_kind_are_decoded_as_few_are(kind: str) -> None:
    """Above a limit they are decoded with numpy, also if fields are absent."""
    events = []
    for number in range(FEW + 50):
        made = event(kind, 1_700_000_000_000 + number)
        if number % 7 == 0:
            made.ClearField("queue")
        inner = getattr(made, kind)
        fields = inner.DESCRIPTOR.fields
        for at, field in enumerate(fields):
            if number % (at + 2) == 0:
                inner.ClearField(field.name)
        inner.SetInParent()
        events.append(made)
    decoded = encoded_rows([each.SerializeToString() for each in events])
    expected = event_rows(events)
    decoded.rows.validate(full=True)

    def in_order(rows: EventRows) -> list[dict[str, object]]:
        ordered: list[dict[str, object]] = rows.rows.take(np.argsort(rows.places)).to_pylist()
        return ordered

    assert in_order(decoded) == in_order(expected)


def test_invalid_event_does_not_affect_others() -> None:
    events = [event("appended").SerializeToString() for _ in range(FEW + 50)]
    events[7] = b"\x52\xff"
    decoded = encoded_rows(events)
    kinds = dict(zip(decoded.places.tolist(), decoded.rows.column("kind").to_pylist(), strict=True))
    assert kinds.pop(7) == "unreadable"
    assert len(kinds) == FEW + 49
    assert set(kinds.values()) == {"appended"}


def test_rows_identify_their_batch_and_position() -> None:
    def batch(seq: int, count: int) -> bytes:
        events = [event("appended") for _ in range(count)]
        made = MetricBatch(source="storage/a", seq=seq, incarnation_id=255, events=events)
        return made.SerializeToString()

    rows = rows_of(batch(1, 2), batch(2, 0), batch(3, 1))
    assert [(row["seq"], row["event_index"], row["sys_offset"]) for row in rows] == [
        (1, 0, 100),
        (1, 1, 100),
        (3, 0, 102),
    ]
    assert {row["producer_id"] for row in rows} == {"storage/a/00000000000000ff"}
    assert {(row["sys_broker"], row["sys_queue_id"]) for row in rows} == {("broker-0", 1)}


def test_unknown_kind_is_kept_with_its_bytes() -> None:
    known = MetricEvent(unix_ms=5).SerializeToString()
    payload = b"\x08\x01"
    newer = known + bytes([0xA2, 0x3E, len(payload)]) + payload  # field 996, length-delimited
    body = MetricBatch(source="s").SerializeToString() + b"\x22" + bytes([len(newer)]) + newer
    (row,) = rows_of(body)
    assert (row["kind"], row["payload"]) == ("field_996", payload)


def test_dropped_events_are_a_row() -> None:
    made = MetricBatch(source="s", seq=9, dropped_count=17)
    (row,) = rows_of(made.SerializeToString())
    assert (row["kind"], row["count"], row["event_index"]) == ("dropped", 17, -1)


def test_message_that_is_not_a_batch_does_not_affect_others() -> None:
    good = MetricBatch(source="s", events=[event("sent")]).SerializeToString()
    bad, fine = rows_of(b"\xff\xff\xff", good)
    assert (bad["kind"], bad["payload"], bad["seq"]) == ("unreadable", b"\xff\xff\xff", 100)
    assert fine["kind"] == "sent"


def test_empty_values_are_null() -> None:
    made = MetricEvent(unix_ms=1)
    made.lock_granted.token = 3
    (row,) = event_rows([made]).rows.to_pylist()
    assert row["topic"] is row["consumer_group"] is row["queue_id"] is row["attrs"] is None
    assert row["client_id"] is None
    assert (row["token"], row["duration_ms"]) == (3, 0)


def test_enumerations_are_decoded_to_names() -> None:
    made = MetricEvent(unix_ms=1)
    made.latency.operation = Latency.OPERATION_FSYNC
    (row,) = event_rows([made]).rows.to_pylist()
    assert row["operation"] == "FSYNC"


def test_schemas_agree() -> None:
    assert list(EVENT_COLUMNS) == EVENTS.names
    assert METRICS.names[5:-4] == EVENTS.names


@pytest.mark.parametrize("count", [1, FEW + 1])
def test_numbers_out_of_range_do_not_affect_other_rows(count: int) -> None:
    made = event("appended")
    made.queue.queue.queue_id = (1 << 32) - 2
    made.appended.message_count = (1 << 64) - 3
    greatest = MetricBatch(
        source="s",
        seq=(1 << 64) - 1,
        vocabulary=(1 << 32) - 1,
        dropped_count=(1 << 64) - 4,
        events=[made] * count,
    )
    dropped, row, *_ = rows_of(greatest.SerializeToString())
    assert (row["queue_id"], row["count"], row["seq"], row["vocabulary"]) == (-2, -3, -1, -1)
    assert dropped["count"] == -4


@pytest.mark.parametrize("count", [1, FEW + 1])
def test_sums_and_lists_of_numbers_out_of_range_do_not_affect_other_rows(count: int) -> None:
    largest, most = (1 << 64) - 1, (1 << 63) - 1
    bad = [
        MetricEvent(
            handed_over=HandedOver(contend_ms=most, drain_ms=most, fence_ms=most, persist_ms=most)
        ),
        MetricEvent(latency=Latency(us=LogBuckets(counts=[largest, largest, 1]))),
        MetricEvent(delivered=DeliveredRange(runs=[largest, 1])),
        MetricEvent(remote_delivered=RemoteDelivered(runs=[0, 1 << 63])),
    ]
    events = [*(one for one in bad for _ in range(count)), event("member_seen")]
    by_kind = {row["kind"]: row for row in rows_of(MetricBatch(events=events).SerializeToString())}
    assert by_kind["handed_over"]["duration_ms"] == -4
    assert (by_kind["latency"]["buckets"], by_kind["latency"]["count"]) == ([-1, -1, 1], -1)
    assert by_kind["delivered"]["runs"] == [-1, 1]
    assert by_kind["remote_delivered"]["runs"] == [0, -(1 << 63)]
    assert by_kind["member_seen"]["client_id"]


@pytest.mark.parametrize("unix_ms", [-1, 1_700_000_000_000_000, (1 << 63) - 1])
def test_time_out_of_range_becomes_the_store_time(unix_ms: int) -> None:
    made = [event("appended", unix_ms), event("appended", 5_000)]
    row, fine = rows_of(MetricBatch(source="s", events=made).SerializeToString())
    assert row["time"] == row["store_time"]
    assert fine["time"] == datetime.fromtimestamp(5, UTC)
