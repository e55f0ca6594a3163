"""Goal: the verdict is "clean" only if the events are complete, and repeats are counted exactly.

Method: the events of a small history, decoded as Spark decodes them; then the same history with
missing events, repeated events, or events outside the requested range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._core.queues import QueueRef
from batonspark.audit import audit
from batonspark.decode import METRICS
from batonspark.metric_rows import MetricMessages, metric_rows
from batonspark.reports import Report, ReportScope, events_around, parse_arguments
from batonspark.schemas import METRICS as METRICS_DDL
from tests.spark.metric_events import NOON, batch, event

pytestmark = pytest.mark.spark

QUEUE: dict[str, Any] = {"group": "g", "topic": "orders"}
STORAGE, LOCKMGR, OFFSETS = "storage/broker-0", "lockmgr/lockmgr-0", "offsets/offsets-0"
CRASH = pb.HandedOver.MANNER_LEASE_EXPIRED


def delivered(second: int, token: int, first: int, next_: int, **more: Any) -> pb.MetricEvent:
    offsets = {"first_offset": first, "next_offset": next_}
    count = next_ - first
    return event(
        "delivered", second * 1000, **(QUEUE | more), range=offsets, token=token,
        client_id=f"c{token}", message_count=count,
    )  # fmt: skip


def committed(second: int, token: int, offset: int, reach: int) -> pb.MetricEvent:
    return event(
        "committed", second * 1000, **QUEUE, token=token, committed_offset=offset,
        delivered_offset=reach,
    )  # fmt: skip


HISTORY = [
    batch([delivered(1, 1, 0, 100)], 1, STORAGE),
    batch([committed(3, 1, 90, 100)], 1, OFFSETS),
    batch([
        event("lock_granted", 40_000, **QUEUE, client_id="c2", previous_client_id="c1", token=2,
              stolen=True),
        event("handed_over", 40_000, **QUEUE, client_id="c2", previous_client_id="c1", token=2,
              previous_token=1, manner=CRASH),
    ], 1, LOCKMGR),
    batch([delivered(41, 2, 90, 200)], 2, STORAGE),
    batch([committed(60, 2, 200, 200)], 2, OFFSETS),
    batch([event("volume_state", 75_000, used_bytes=1)], 3, STORAGE),
]  # fmt: skip
"""A crash with ten messages in flight, in the events of three services."""


def rows(
    spark: SparkSession, batches: Sequence[pb.MetricBatch], late: Sequence[pb.MetricBatch] = ()
) -> DataFrame:
    """Return the rows of batches; those in `late` are stored an hour after their events."""
    decoded = MetricMessages(
        QueueRef("BATON_SYS_METRICS", "broker-0", 0),
        [one.SerializeToString() for one in batches],
        np.arange(len(batches)),
        np.array([one.events[0].unix_ms + 3_600_000 * (one in late) for one in batches]),
    )
    return spark.createDataFrame(
        pa.Table.from_batches([metric_rows(decoded, METRICS)]), METRICS_DDL
    )


def report(spark: SparkSession, batches: Sequence[pb.MetricBatch], scope: ReportScope) -> Report:
    return audit(events_around(rows(spark, batches), scope), scope)


def at(second: int) -> datetime:
    return datetime.fromtimestamp(NOON / 1000 + second, UTC).replace(tzinfo=None)


@pytest.mark.long
def test_crash_is_found_and_repeated_batches_change_nothing(
    spark: SparkSession,
) -> None:
    audit = report(spark, [*HISTORY, HISTORY[3], HISTORY[0]], ReportScope())
    assert (audit.summary["verdict"], audit.ok) == ("clean", True)
    assert audit.summary["counts"] == {"crash": 10}
    assert audit.summary["delivered_count"] == 210
    (row,) = audit.rows.collect()
    assert (row.consumer_group, row.topic, row.queue_id) == ("g", "orders", 0)
    assert (row.first_offset, row.next_offset, row["count"]) == (90, 100, 10)
    assert (row.previous_client_id, row.previous_token) == ("c1", 1)
    assert (row.client_id, row.token, row.time) == ("c2", 2, at(41))
    assert "graceful duplicates (bugs): 0" in audit.lines
    assert "explained duplicates: 10" in audit.lines


def test_redelivery_of_acked_messages_is_a_bug(spark: SparkSession) -> None:
    again = batch([delivered(42, 3, 50, 60)], 4, STORAGE)
    granted = event("lock_granted", 41_500, **QUEUE, client_id="c3", token=3)
    audit = report(spark, [*HISTORY, again, batch([granted], 2, LOCKMGR)], ReportScope())
    assert (audit.summary["verdict"], audit.ok) == ("duplicates", False)
    assert audit.summary["counts"] == {"acked": 10, "crash": 10}
    assert "graceful duplicates (bugs): 10" in audit.lines


def handed_out(second: int, client_id: str, first: int, next_: int) -> pb.MetricEvent:
    offsets = {"first_offset": first, "next_offset": next_}
    return event(
        "remote_delivered", second * 1000, **QUEUE, range=offsets, token=1,
        client_id=client_id, message_count=next_ - first,
    )  # fmt: skip


@pytest.mark.long
def test_repeats_of_remote_clients_are_explained_and_those_of_acked_messages_are_bugs(
    spark: SparkSession,
) -> None:
    gateway = "gateway/gateway-0"
    first = batch([handed_out(2, "shop-1", 0, 100)], 1, gateway)
    again = batch([handed_out(32, "shop-2", 95, 98)], 2, gateway)
    audit = report(spark, [*HISTORY, first, again], ReportScope())
    assert audit.summary["counts"] == {"crash": 10, "lease": 3}
    assert audit.ok
    (row,) = audit.rows.where("cause = 'lease'").collect()
    assert (row.previous_client_id, row.client_id) == ("shop-1", "shop-2")
    late = batch([handed_out(33, "shop-2", 80, 92)], 2, gateway)
    audit = report(spark, [*HISTORY, first, late], ReportScope())
    assert audit.summary["counts"] == {"crash": 10, "acked": 10, "lease": 2}
    assert not audit.ok
    later = batch([handed_out(32, "shop-2", 95, 98)], 3, gateway)
    audit = report(spark, [*HISTORY, first, later], ReportScope())
    assert "missing" in {one["what"] for one in audit.summary["gaps"]}


@pytest.mark.parametrize(
    ("batches", "gap"),
    [
        ([one for one in HISTORY if one is not HISTORY[3]], "uncovered"),
        ([*HISTORY, batch([delivered(70, 2, 200, 300)], 5, STORAGE)], "missing"),
        ([one for one in HISTORY if one.source != OFFSETS], "unheard"),
    ],
    ids=["delivery", "batch", "offsets"],
)  # fmt: skip
def test_missing_events_make_the_audit_incomplete(
    spark: SparkSession, batches: list[pb.MetricBatch], gap: str
) -> None:
    audit = report(spark, batches, ReportScope())
    assert (audit.summary["verdict"], audit.ok) == ("incomplete", False)
    assert gap in {one["what"] for one in audit.summary["gaps"]}


def test_dropped_events_and_restarts_of_a_source_are_gaps(
    spark: SparkSession,
) -> None:
    dropping = batch([delivered(80, 2, 200, 210)], 4, STORAGE)
    dropping.dropped_count = 7
    anew = batch([committed(85, 2, 205, 210)], 2, OFFSETS)
    anew.incarnation_id = 9
    audit = report(spark, [*HISTORY, dropping, anew], ReportScope())
    gaps = {(one["what"], one["place"], one["count"]) for one in audit.summary["gaps"]}
    assert gaps == {("dropped", STORAGE, 7), ("restarted", OFFSETS, 1), ("missing", OFFSETS, 1)}
    begins = {one["what"]: (one["begin"], one["end"]) for one in audit.summary["gaps"]}
    assert begins["dropped"] == (at(75), at(80))


def of_life(life: int, seq: int, second: int, *events: pb.MetricEvent) -> pb.MetricBatch:
    """Return a batch of an incarnation, with an event at `second` before the others."""
    found = batch([event("volume_state", second * 1000, used_bytes=1), *events], seq)
    found.incarnation_id = life
    return found


def started(second: int, previous: int) -> pb.MetricEvent:
    return event("process_started", second * 1000, previous_incarnation_id=previous)


def stopped(second: int) -> pb.MetricEvent:
    return event("process_stopped", second * 1000)


FIRST = of_life(7, 1, 60, started(60, 0))
LAST = of_life(7, 2, 80, stopped(81))
NEXT = of_life(8, 1, 85, started(85, 7))
RESTARTS: dict[str, tuple[list[pb.MetricBatch], set[str]]] = {
    "marked": ([FIRST, LAST, NEXT], set()),
    "published late": ([FIRST, NEXT, LAST], set()),
    "published twice": ([FIRST, LAST, NEXT, LAST, NEXT], set()),
    "several times": ([FIRST, LAST, NEXT, of_life(8, 2, 87, stopped(87)),
                       of_life(9, 1, 90, started(90, 8))], set()),
    "in one batch": ([of_life(7, 1, 60, started(60, 0), stopped(62)), NEXT], set()),
    "file lost": ([FIRST, NEXT], {"restarted"}),
    "killed": ([FIRST, of_life(8, 1, 85, started(85, 0))], {"restarted"}),
    "one lost in between": ([FIRST, LAST, of_life(9, 1, 85, started(85, 8))], {"restarted"}),
    "one killed in between": ([FIRST, LAST, of_life(9, 1, 85, started(85, 0))], {"restarted"}),
    "events after the mark": ([FIRST, LAST, of_life(7, 3, 82), NEXT], {"restarted"}),
    "batch lost before the mark": ([FIRST, of_life(7, 3, 80, stopped(81)), NEXT], {"missing"}),
    "first batch lost": ([FIRST, LAST, of_life(8, 2, 86)], {"restarted", "missing"}),
    "earlier version": ([of_life(7, 1, 60), of_life(8, 1, 85)], {"restarted"}),
}  # fmt: skip
"""Batches of one source each, and the gaps between its processes."""


def test_restart_is_a_gap_unless_the_last_batch_is_marked_and_the_next_process_names_it(
    spark: SparkSession,
) -> None:
    batches: list[pb.MetricBatch] = []
    for name, (some, _) in RESTARTS.items():
        for one in some:
            batches.append(pb.MetricBatch.FromString(one.SerializeToString()))
            batches[-1].source = f"gateway/{name}"
    audit = report(spark, [*HISTORY, *batches], ReportScope())
    found: dict[str, set[str]] = {name: set() for name in RESTARTS}
    for one in audit.summary["gaps"]:
        found[one["place"].removeprefix("gateway/")].add(one["what"])
    assert found == {name: gaps for name, (_, gaps) in RESTARTS.items()}
    assert audit.summary["verdict"] == "incomplete"


def test_audit_of_a_restarted_storage_node_is_clean_and_counts_each_delivery_once(
    spark: SparkSession,
) -> None:
    last = batch([delivered(80, 2, 200, 210), stopped(81)], 4, STORAGE)
    following = of_life(8, 1, 85, started(85, 7), delivered(85, 2, 210, 220))
    audit = report(spark, [*HISTORY, last, following, last], ReportScope())
    assert (audit.summary["verdict"], audit.summary["gaps"]) == ("clean", [])
    assert audit.summary["delivered_count"] == 230
    assert audit.summary["counts"] == {"crash": 10}


def test_batch_that_is_published_long_after_a_stop_keeps_its_time(spark: SparkSession) -> None:
    again = delivered(77, 2, 200, 205)
    last = batch([delivered(77, 2, 200, 210), again, stopped(77)], 4, STORAGE)
    acked = batch([committed(79, 2, 210, 210)], 3, OFFSETS)
    following = of_life(8, 1, 85, started(85, 7), delivered(85, 2, 210, 220))
    events = rows(spark, [*HISTORY, last, acked, following], late=[last])
    audit_ = audit(events_around(events, ReportScope()), ReportScope())
    assert (audit_.summary["verdict"], audit_.summary["gaps"]) == ("clean", [])
    assert audit_.summary["counts"] == {"crash": 10, "repeated": 5}
    scope = ReportScope(until=at(100))
    assert events_around(events, scope).where("token = 2 AND kind = 'delivered'").count() == 4


@pytest.mark.long
def test_storage_without_events_at_the_end_makes_the_audit_incomplete(spark: SparkSession) -> None:
    other = batch([event("volume_state", 44_000, used_bytes=1)], 1, "storage/broker-1")
    later = batch([event("volume_state", 75_000, used_bytes=1)], 2, "storage/broker-1")
    place = {("silent", "storage/broker-1")}

    def gaps(scope: ReportScope, *more: pb.MetricBatch) -> set[tuple[str, str]]:
        gap_rows = report(spark, [*HISTORY, *more], scope).summary["gaps"]
        return {(one["what"], one["place"]) for one in gap_rows}

    assert gaps(ReportScope(), other) == place
    assert gaps(ReportScope(), other, later) == set()
    assert gaps(ReportScope(until=at(44)), other) == set()
    assert gaps(ReportScope(until=at(46)), other) == place
    assert gaps(ReportScope(until=at(130)), later) == set()
    assert gaps(ReportScope(until=at(140)), later) == place | {("silent", STORAGE)}


def test_audit_without_events_is_empty_not_clean(spark: SparkSession) -> None:
    audit = report(spark, HISTORY, ReportScope(group="unknown"))
    assert (audit.summary["verdict"], audit.ok) == ("empty", False)


@pytest.mark.long
def test_scope_bounds_the_repeats_and_not_their_causes(
    spark: SparkSession,
) -> None:
    whole = ReportScope(since=at(30), until=at(45))
    assert report(spark, HISTORY, whole).summary["counts"] == {"crash": 10}
    assert report(spark, HISTORY, replace(whole, until=at(41))).summary["counts"] == {}
    some = replace(whole, first_offset=95, next_offset=98)
    assert report(spark, HISTORY, some).summary["counts"] == {"crash": 3}


def test_command_line_accepts_times_with_and_without_a_zone() -> None:
    given = ["--since", "2026-01-01T13:00:00+01:00", "--until", "2026-01-01T12:00:45"]
    scope = parse_arguments("duplicate_audit", [*given, "--group", "g", "--next-offset", "5"])
    assert scope == ReportScope(at(0), at(45), "g", None, None, 5)
