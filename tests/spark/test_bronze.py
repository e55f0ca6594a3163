"""Goal: every message of the metrics topic becomes rows, even without a batch or if it is lost.

Method: the functions that run on executors, over hand-made messages; no session.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonspark import bronze
from batonspark.bronze import DATED, events_of, with_names
from batonspark.decode import LOST_COUNT, MESSAGES
from tests.spark.metric_events import NOON, batch, event


def message(
    offset: int, body: bytes | None, queue_id: int = 0, properties: Mapping[str, str] | None = None
) -> dict[str, object]:
    return {
        "topic": "BATON_SYS_METRICS",
        "broker": "broker-0",
        "queue_id": queue_id,
        "offset": offset,
        "body": body,
        "properties": list((properties or {}).items()),
        "store_time": NOON * 1_000,
    }


def stored(*batches: pb.MetricBatch) -> list[dict[str, object]]:
    return [message(n, one.SerializeToString(), n % 2) for n, one in enumerate(batches)]


def opened(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    batches = list(events_of(iter([pa.RecordBatch.from_pylist(rows, MESSAGES)])))
    assert all(part.schema.equals(DATED) for part in batches)
    return [row for part in batches for row in part.to_pylist()]


def named(rows: list[dict[str, object]]) -> list[tuple[str, int]]:
    (batch,) = with_names(iter([pa.RecordBatch.from_pylist(rows, MESSAGES)]))
    assert batch.schema.names[:-2] == MESSAGES.names
    return list(zip(*(batch[name].to_pylist() for name in ("producer_id", "seq")), strict=True))


def test_batch_is_identified_by_source_incarnation_and_number() -> None:
    rows = stored(batch([], 3, "storage/a"), batch([], 4, "storage/b"))
    assert named(rows) == [
        ("storage/a/0000000000000007", 3),
        ("storage/b/0000000000000007", 4),
    ]


def test_message_without_a_batch_is_identified_by_queue_and_offset() -> None:
    queue = "BATON_SYS_METRICS/broker-0/0"
    rows = [message(5, b"\xff"), message(6, b""), message(7, None)]
    assert named(rows) == [(queue, 5), (queue, 6), (queue, 7)]


def test_events_of_several_queues_keep_queue_and_offset() -> None:
    batches = [batch([event("member_seen", n, group="g")] * 2, n + 1) for n in range(4)]
    rows = opened(stored(*batches))
    places = sorted((r["sys_queue_id"], r["sys_offset"], r["seq"], r["event_index"]) for r in rows)
    assert places == [(n % 2, n, n + 1, i) for n in (0, 2, 1, 3) for i in range(2)]


def test_many_messages_are_decoded_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = stored(*(batch([event("member_seen", n)] * 3, n + 1) for n in range(20)))
    rows.insert(7, message(40, None))
    (whole,) = events_of(iter([pa.RecordBatch.from_pylist(one_queue(rows), MESSAGES)]))
    monkeypatch.setattr(bronze, "PORTION_BYTES", 100)
    parts = list(events_of(iter([pa.RecordBatch.from_pylist(one_queue(rows), MESSAGES)])))
    assert len(parts) > 5
    assert pa.Table.from_batches(parts).equals(pa.Table.from_batches([whole]))


def one_queue(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{**row, "queue_id": 0} for row in rows]


def test_rows_have_the_date_of_their_store_time() -> None:
    assert {row["date"] for row in opened(stored(batch([event("member_seen", 1)])))} == {
        datetime.fromtimestamp(NOON / 1_000, UTC).date()
    }


def test_batch_identity_is_that_of_the_decoded_rows() -> None:
    rows = [*stored(batch([event("member_seen", 1)], 9)), message(5, b"\xff")]
    assert named(rows) == [(row["producer_id"], row["seq"]) for row in opened(rows)]


def test_lost_messages_are_a_row_that_counts_them() -> None:
    rows = [
        message(40, None, properties={LOST_COUNT: "17"}),
        *stored(batch([event("member_seen", 1)])),
    ]
    lost, kept = sorted(opened(rows), key=lambda row: row["kind"] != "data_loss")
    assert (lost["kind"], lost["count"]) == ("data_loss", 17)
    assert (lost["first_offset"], lost["next_offset"], lost["sys_offset"]) == (40, 57, 40)
    assert kept["kind"] == "member_seen"


def test_message_with_a_body_is_not_a_lost_one() -> None:
    body = batch([event("member_seen", 1)]).SerializeToString()
    for count in ("17", "many"):
        (row,) = opened([message(40, body, properties={LOST_COUNT: count})])
        assert row["kind"] == "member_seen"


def test_batch_with_a_number_beyond_int64_is_identified() -> None:
    assert named(stored(batch([], (1 << 64) - 1))) == [("storage/broker-0/0000000000000007", -1)]


def test_unreadable_message_is_a_row_with_its_bytes() -> None:
    (row,) = opened([message(5, b"\xff")])
    assert (row["kind"], row["payload"], row["sys_offset"]) == ("unreadable", b"\xff", 5)
