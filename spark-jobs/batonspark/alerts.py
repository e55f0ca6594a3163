"""Alerts from metric events: events become signals of a subject, which evaluators of rules read.

Evaluators run in event time: alerts depend on the events alone, not on when they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from batonspark.alert_changes import Signal
from batonspark.alert_rules import RuleBook
from batonspark.alert_subject import KINDS, Alert, AlertSubject
from batonspark.event_columns import alert_time, attribute, has_attribute, is_sketch, struct

STATE_VERSION = 1
"""Version of the state in Spark; a new version starts a new checkpoint."""
SIGNALS = """
    subject STRING, kind STRING, at TIMESTAMP, unix_ms BIGINT, client_id STRING, reason STRING,
    text STRING, committed_offset BIGINT, delivered_offset BIGINT, next_offset BIGINT,
    acked_beyond_count BIGINT, oldest_unacked_ms BIGINT, silent_ms BIGINT,
    generation BIGINT, first_bucket INT, buckets ARRAY<BIGINT>
"""
CHANGES = """
    subject STRING, rule STRING, severity STRING, state STRING, detail STRING,
    since_unix_ms BIGINT, unix_ms BIGINT, summary STRING, reason STRING,
    value DOUBLE, limit DOUBLE
"""
ALERTS = """
    alert_id STRING, state STRING, rule STRING, severity STRING, detail STRING,
    consumer_group STRING, topic STRING, broker STRING, queue_id INT,
    source STRING, operation STRING,
    since TIMESTAMP, time TIMESTAMP, summary STRING, reason STRING,
    value DOUBLE, limit DOUBLE, date DATE
"""
"""`alert_id` is the same for FIRING and RESOLVED; (alert_id, state) is written once."""
COLUMNS = (
    "source, kind, time, topic, consumer_group, broker, queue_id, client_id, next_offset,"
    " committed_offset, delivered_offset, generation, reason, duration_ms, operation,"
    " first_bucket, buckets,"
    " attrs, store_time"
)
"""The columns of bronze that alerts need."""
_STATE = "stored STRING, wake_unix_ms BIGINT"
_QUEUE_KINDS = KINDS["lag"]
_NAMES = ("consumer_group", "topic", "broker")
"""Names in a subject, which has none of an event with a missing or an invalid one."""
_LATENCY = r"^latency\|(.*)\|([^|]*)$"
"""The subject of a latency; a source may have a |, because a client id may have one."""
_CLOCK = "volume_state"
"""Kind of event that brokers publish even without traffic."""


def signals(events: DataFrame, book: RuleBook) -> DataFrame:
    """Return rows of SIGNALS from rows of `schemas.METRICS`: the events that a rule reads."""
    kind = F.col("kind")
    operations = sorted({rule.operation for rule in book.latency})
    group_kinds = {each for kinds in KINDS.values() for each in kinds} - {*_QUEUE_KINDS, "latency"}
    wanted = (
        F.when(kind == "latency", F.col("operation").isin(operations) & is_sketch())
        .when(kind == "lock_granted", has_attribute("stolen"))
        .otherwise(kind.isin(_CLOCK, *_QUEUE_KINDS, *sorted(group_kinds)))
    )
    names = [F.when(~F.contains(name, F.lit("|")), F.col(name)) for name in _NAMES]
    queue = F.concat(F.lit("queue"), *(F.concat(F.lit("|"), name) for name in names))
    queue = F.concat(queue, F.lit("|"), "queue_id")
    source = F.concat_ws("|", F.lit("latency"), "source", "operation")
    subject = (
        F.when(kind == "latency", source)
        .when(kind == _CLOCK, F.concat_ws("|", F.lit("clock"), "source"))
        .when(kind.isin(*_QUEUE_KINDS), queue)
        .otherwise(F.concat(F.lit("group|"), names[0]))
    )
    text = F.coalesce(
        F.try_element_at("attrs", F.lit("message")), F.try_element_at("attrs", F.lit("differences"))
    )
    columns: dict[str, Column] = {
        "subject": subject,
        "at": alert_time(),
        "unix_ms": F.unix_millis(alert_time()),
        "text": text,
        "acked_beyond_count": attribute("acked_beyond_count"),
        "oldest_unacked_ms": F.when(kind == "queue_lag", F.col("duration_ms")),
        "silent_ms": F.when(kind == "member_expired", F.col("duration_ms")),
        "generation": F.when(kind == "rebalanced", F.col("generation")),
    }
    rows = events.where(wanted).withColumns(columns).where("subject IS NOT NULL")
    return rows.to(struct(SIGNALS))


def alerts(seen: DataFrame, book: RuleBook, watermark_s: int) -> DataFrame:
    """Return rows of ALERTS from rows of SIGNALS, by a stateful query."""
    changes = (
        seen.withWatermark("at", f"{watermark_s} seconds")
        .groupBy("subject")
        .transformWithState(
            SubjectProcessor(book),
            outputStructType=struct(CHANGES),
            outputMode="Append",
            timeMode="EventTime",
        )
    )
    return alert_rows(changes)


def alert_rows(changes: DataFrame) -> DataFrame:
    """Return rows of ALERTS from rows of CHANGES."""
    parts = F.split("subject", r"\|")
    of_kind = parts[0]

    def part(kind: str, place: int) -> Column:
        return F.when(of_kind == kind, F.get(parts, F.lit(place)))

    columns: dict[str, Column] = {
        "alert_id": F.concat_ws("|", "rule", "subject", "detail", "since_unix_ms"),
        "consumer_group": F.coalesce(part("queue", 1), part("group", 1)),
        "topic": part("queue", 2),
        "broker": part("queue", 3),
        "queue_id": part("queue", 4).cast("int"),
        "source": F.when(of_kind == "latency", F.regexp_extract("subject", _LATENCY, 1)),
        "operation": F.when(of_kind == "latency", F.regexp_extract("subject", _LATENCY, 2)),
        "since": F.timestamp_millis("since_unix_ms"),
        "time": F.timestamp_millis("unix_ms"),
        "date": F.to_date(F.timestamp_millis("unix_ms")),
    }
    return changes.withColumns(columns).to(struct(ALERTS))


class SubjectProcessor(StatefulProcessor):
    """Keeps the state of each subject as JSON, with one timer for its next wake-up."""

    def __init__(self, book: RuleBook) -> None:
        self._book = book

    def init(self, handle: StatefulProcessorHandle) -> None:
        """See StatefulProcessor."""
        self._handle = handle
        self._state = handle.getValueState("subject", _STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        """Process the signals of a micro-batch in the order of their time."""
        (name,) = key
        subject, wake = self._opened(name)
        ordered = sorted(map(_signal, rows), key=lambda signal: signal.unix_ms)
        for alert in subject.feed(ordered):
            yield _row(name, alert)
        self._keep(subject, wake)

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Row]:
        """Advance the event time of the subject."""
        (name,) = key
        subject, _ = self._opened(name)
        for alert in subject.advance(timerValues.getCurrentWatermarkInMs()):
            yield _row(name, alert)
        self._keep(subject, None)

    def close(self) -> None:
        """Do nothing: there is no resource to release."""

    def _opened(self, name: str) -> tuple[AlertSubject, int | None]:
        stored = self._state.get()
        if stored is None:
            return AlertSubject(name, self._book), None
        return AlertSubject(name, self._book, stored[0]), stored[1]

    def _keep(self, subject: AlertSubject, timer: int | None) -> None:
        """Store the subject, or remove it if there is no state to keep.

        Args:
            timer: Time of the timer that is registered now.
        """
        wake = subject.wake_unix_ms
        if timer is not None and timer != wake:
            self._handle.deleteTimer(timer)
        if wake is None:
            self._state.clear()
            return
        if timer != wake:
            self._handle.registerTimer(wake)
        self._state.update((subject.stored, wake))


def _signal(row: Row) -> Signal:
    return Signal(
        kind=row.kind,
        unix_ms=row.unix_ms,
        client_id=row.client_id or "",
        reason=row.reason or "",
        text=row.text or "",
        committed_offset=row.committed_offset or 0,
        delivered_offset=row.delivered_offset or 0,
        next_offset=row.next_offset or 0,
        acked_beyond_count=row.acked_beyond_count,
        oldest_unacked_ms=-1 if row.oldest_unacked_ms is None else row.oldest_unacked_ms,
        silent_ms=row.silent_ms or 0,
        generation=row.generation or 0,
        first_bucket=row.first_bucket or 0,
        buckets=row.buckets or (),
    )


def _row(subject: str, alert: Alert) -> Row:
    change = alert.change
    return Row(
        subject=subject,
        rule=alert.rule,
        severity=alert.severity,
        state=str(change.state),
        detail=str(change.detail),
        since_unix_ms=change.since_unix_ms,
        unix_ms=change.unix_ms,
        summary=change.summary,
        reason=change.reason,
        value=change.value,
        limit=change.limit,
    )
