"""The report `duplicate_audit`: messages that a group received more than once.

Delivery events have exact offsets, so the result is exact. Missing events are reported as gaps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from batonmq._core.retries import retry_topic
from batonspark.event_columns import attribute, event_time, has_attribute
from batonspark.metric_columns import PREVIOUS, STARTED, STOPPED
from batonspark.repeated_ranges import (
    BUGS,
    HARMLESS,
    CommitEvent,
    DeliveryEvent,
    OwnerChange,
    QueueHistory,
    RepeatCause,
    RepeatedRange,
    ResetEvent,
    repeated_ranges,
    undelivered_commits,
)
from batonspark.reports import Report, ReportScope

QUEUE = ("consumer_group", "topic", "broker", "queue_id")
_QUEUE_DDL = "consumer_group STRING, topic STRING, broker STRING, queue_id INT"
REPEATS = f"""
    {_QUEUE_DDL}, first_offset BIGINT, next_offset BIGINT, count BIGINT, cause STRING,
    previous_client_id STRING, previous_token BIGINT, previous_time TIMESTAMP,
    client_id STRING, token BIGINT, time TIMESTAMP, flagged_count BIGINT, why STRING
"""
"""One row for each range of messages that was delivered to one owner and then to another."""
GAPS = "what STRING, place STRING, begin TIMESTAMP, end TIMESTAMP, count BIGINT"
"""Gaps in the events: `what` is missing, dropped, restarted, silent, data_loss, unreadable,
unheard, or uncovered; `place` is a source, or a queue with offsets."""
SILENT_S = 30
"""A storage node without events for this long is down: a running one publishes the state of its
disk every ten seconds."""
SETTLING_MS = 10_000
"""Commits in this time before the newest event are not checked against the deliveries: the event
of a commit may be published before that of its delivery."""
ROWS_MAX = 100
_SERVICES = ("storage", "lockmgr", "offsets", "gateway")
"""Services with events that the audit needs."""
_KINDS = (
    "delivered", "committed", "lock_granted", "lock_forced", "handed_over", "progress_reset",
    "remote_delivered",
)  # fmt: skip
_HISTORY = f"""
    {_QUEUE_DDL}, kind STRING, unix_ms BIGINT, client_id STRING, previous_client_id STRING,
    token BIGINT, previous_token BIGINT, first_offset BIGINT, next_offset BIGINT,
    committed_offset BIGINT, delivered_offset BIGINT, redelivered_count BIGINT, runs ARRAY<BIGINT>,
    reason STRING, operator STRING, stolen BOOLEAN, settled_ms BIGINT
"""
_UNCOVERED = f"{_QUEUE_DDL}, first_offset BIGINT, next_offset BIGINT"


def repeat_rows(events: DataFrame, scope: ReportScope) -> DataFrame:
    """Return rows of REPEATS for the deliveries in the scope."""
    found = _history(events, scope).groupBy(*QUEUE).applyInPandas(_repeats_of, REPEATS)
    for name, bound, clip in (
        ("first_offset", scope.first_offset, F.greatest),
        ("next_offset", scope.next_offset, F.least),
    ):
        if bound is not None:
            found = found.withColumn(name, clip(F.col(name), F.lit(bound)))
    found = found.where("first_offset < next_offset")
    found = found.withColumn("count", F.col("next_offset") - F.col("first_offset"))
    return scope.in_time(found)


def gap_rows(events: DataFrame, scope: ReportScope) -> DataFrame:
    """Return rows of GAPS; none if the events are complete."""
    parts = [
        _of_batches(events),
        _silent(events, scope),
        _lost(events),
        _without_offsets_events(events),
        _uncovered(events, scope),
    ]
    found = parts[0]
    for part in parts[1:]:
        found = found.unionByName(part)
    return found


def audit(events: DataFrame, scope: ReportScope) -> Report:
    """Return the report."""
    events = events.cache()
    rows, missing = repeat_rows(events, scope).cache(), gap_rows(events, scope).cache()
    by_group = rows.groupBy("consumer_group", "cause").agg(F.sum("count").alias("n")).collect()
    groups = sorted((row.consumer_group, row.cause, row.n) for row in by_group)
    counts: Counter[str] = Counter()
    for _, cause, count in groups:
        counts[cause] += count
    delivered = scope.in_time(scope.of_subject(events.where("kind = 'delivered'")))
    total = delivered.agg(F.sum("count").alias("n"), F.min("time"), F.max("time")).collect()[0]
    bugs = sum(counts[cause] for cause in BUGS)
    incomplete = [
        row.asDict() for row in missing.orderBy("begin", "what").limit(ROWS_MAX).collect()
    ]
    harmful = rows.where(~F.col("cause").isin(*HARMLESS)).orderBy("time", *QUEUE, "first_offset")
    summary = {
        "verdict": _verdict(bugs, total["n"], bool(incomplete) or RepeatCause.UNKNOWN in counts),
        "asked": scope.described(),
        "delivered_count": total["n"] or 0,
        "from_time": total[1],
        "to_time": total[2],
        "bug_count": bugs,
        "duplicate_count": sum(n for cause, n in counts.items() if cause not in HARMLESS),
        "counts": counts,
        "groups": [
            dict(zip(("consumer_group", "cause", "count"), one, strict=True)) for one in groups
        ],
        "gap_count": len(incomplete) if len(incomplete) < ROWS_MAX else missing.count(),
        "gaps": incomplete,
        "duplicates": [row.asDict() for row in harmful.limit(ROWS_MAX).collect()],
    }
    return Report(summary, list(lines(summary)), rows, ok=summary["verdict"] == "clean")


def lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Return the summary as lines for a terminal."""
    yield f"duplicate audit: {summary['verdict'].upper()}"
    yield (
        f"{summary['delivered_count']:,} messages delivered "
        f"from {summary['from_time']} to {summary['to_time']} UTC"
    )
    yield f"graceful duplicates (bugs): {summary['bug_count']:,}"
    yield f"explained duplicates: {summary['duplicate_count'] - summary['bug_count']:,}"
    for cause in RepeatCause:
        if count := summary["counts"].get(cause, 0):
            note = "  (never started twice)" if cause in HARMLESS else ""
            yield f"  {cause:<11} {count:>10,}{note}"
    for row in summary["duplicates"]:
        yield (
            f"  {row['time']:%H:%M:%S} {row['consumer_group']} {row['topic']}/{row['broker']}"
            f"/{row['queue_id']} [{row['first_offset']}, {row['next_offset']}) {row['cause']}: "
            f"{row['previous_client_id'] or '-'} token {row['previous_token']} -> "
            f"{row['client_id']} token {row['token']}: {row['why']}"
        )
    if summary["gap_count"]:
        yield f"incomplete: {summary['gap_count']:,} gaps in the events:"
        for row in summary["gaps"]:
            yield f"  {row['what']} {row['place']} {row['begin']} - {row['end']}: {row['count']:,}"


def _verdict(bugs: int, delivered: int | None, incomplete: bool) -> str:
    if bugs:
        return "duplicates"
    if incomplete:
        return "incomplete"
    return "clean" if delivered else "empty"


def _history(events: DataFrame, scope: ReportScope) -> DataFrame:
    """Return rows of _HISTORY."""
    rows = scope.of_subject(events.where(F.col("kind").isin(*_KINDS)))
    newest = _needed(events).agg(F.max(F.unix_millis(event_time())).alias("newest"))
    settled = (newest.collect()[0].newest or 0) - SETTLING_MS
    operator = F.try_element_at("attrs", F.lit("by"))
    return (
        rows.where(" AND ".join(f"{name} IS NOT NULL" for name in QUEUE))
        .withColumn("unix_ms", F.unix_millis(event_time()))
        .withColumn("previous_token", attribute("previous_token"))
        .withColumn("operator", operator)
        .withColumn("stolen", has_attribute("stolen"))
        .withColumn("settled_ms", F.lit(settled))
        .select(*_names(_HISTORY))
    )


def _of_pandas(rows: pd.DataFrame) -> QueueHistory:
    """Return the history of one queue."""
    found: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
    for row in rows.astype(object).where(rows.notna(), None).itertuples(index=False):
        found[row.kind].append(_EVENT_OF[row.kind](row))
    group, topic = rows["consumer_group"].iloc[0], rows["topic"].iloc[0]
    return QueueHistory(
        deliveries=found["delivered"],
        passings=[*found["handed_over"], *found["lock_granted"], *found["lock_forced"]],
        commits=found["committed"],
        resets=found["progress_reset"],
        hand_outs=found["remote_delivered"],
        is_retry=topic == retry_topic(group),
        settled_unix_ms=int(rows["settled_ms"].iloc[0]),
    )


def _delivery(row: Any) -> DeliveryEvent:
    runs = () if row.runs is None else [int(one) for one in row.runs]
    numbers = (int(row.first_offset), int(row.next_offset))
    flagged = int(row.redelivered_count or 0)
    return DeliveryEvent(
        int(row.unix_ms), int(row.token or 0), row.client_id or "", *numbers, runs, flagged
    )


def _passing(row: Any) -> OwnerChange:
    manner = {"handed_over": row.reason or "", "lock_forced": "FORCED"}.get(row.kind, "")
    return OwnerChange(
        int(row.unix_ms),
        int(row.token or 0),
        row.client_id or "",
        int(row.previous_token or 0),
        row.previous_client_id or "",
        manner,
        bool(row.stolen),
    )


def _commit(row: Any) -> CommitEvent:
    offsets = (int(row.committed_offset or 0), int(row.delivered_offset or 0))
    return CommitEvent(int(row.unix_ms), int(row.token or 0), *offsets)


def _reset(row: Any) -> ResetEvent:
    to_offset = int(row.committed_offset or 0)
    return ResetEvent(int(row.unix_ms), to_offset, row.operator or "", row.reason or "")


_EVENT_OF = {
    "delivered": _delivery,
    "remote_delivered": _delivery,
    "committed": _commit,
    "lock_granted": _passing,
    "lock_forced": _passing,
    "handed_over": _passing,
    "progress_reset": _reset,
}


def _repeats_of(rows: pd.DataFrame) -> pd.DataFrame:
    queue = [rows[name].iloc[0] for name in QUEUE]
    found = [[*queue, *_row(one)] for one in repeated_ranges(_of_pandas(rows))]
    return pd.DataFrame(found, columns=_names(REPEATS))


def _row(one: RepeatedRange) -> list[Any]:
    previous = pd.Timestamp(one.previous_unix_ms, unit="ms")
    return [
        one.first_offset,
        one.next_offset,
        one.count,
        str(one.cause),
        one.previous_client_id,
        one.previous_token,
        previous,
        one.client_id,
        one.token,
        pd.Timestamp(one.unix_ms, unit="ms"),
        one.flagged_count,
        one.why,
    ]


def _of_batches(events: DataFrame) -> DataFrame:
    """Return gaps: missing batches, dropped events and restarted sources.

    A restart is no gap if the last batch of the incarnation before has the mark of a graceful stop,
    and the next incarnation names it as the one before: then no other one ran in between.
    """
    rows = _needed(events).where("event_index >= 0 OR kind = 'dropped'")
    dropped = F.max(F.when(F.col("kind") == "dropped", F.col("count")))
    before = F.when(F.col("kind") == STARTED, F.try_element_at("attrs", F.lit(PREVIOUS)))
    batches = rows.groupBy("source", "producer_id", "seq").agg(
        F.min("time").alias("time"),
        F.coalesce(dropped, F.lit(0)).alias("dropped"),
        F.max(F.col("kind") == STOPPED).alias("stopped"),
        F.max(before).alias("before"),
    )
    life = Window.partitionBy("producer_id").orderBy("seq")
    source = Window.partitionBy("source").orderBy("began", "producer_id", "seq")
    ordered = (
        batches.withColumn("began", F.min("time").over(Window.partitionBy("producer_id")))
        .withColumn("previous_seq", F.lag("seq").over(life))
        .withColumn("previous_dropped", F.lag("dropped").over(life))
        .withColumn("previous_life", F.lag("producer_id").over(source))
        .withColumn("previous_time", F.lag("time").over(source))
        .withColumn("previous_stopped", F.lag("stopped").over(source))
        .withColumn("before", F.max("before").over(Window.partitionBy("producer_id")))
    )
    first, anew = F.col("previous_seq").isNull(), F.col("previous_life").isNotNull()
    known = ~first | anew | (F.col("seq") == 1)
    missing = F.when(known, F.col("seq") - F.coalesce("previous_seq", F.lit(0)) - 1)
    fresh = F.when(known | (F.col("dropped") > 0), F.col("dropped"))
    fresh = fresh - F.coalesce("previous_dropped", F.lit(0))
    previous = F.substring_index("previous_life", "/", -1)
    follows = F.col("previous_stopped") & F.col("before").eqNullSafe(previous)
    restarted = F.when(first & anew & ~follows, F.lit(1))
    found = {"missing": missing, "dropped": fresh, "restarted": restarted}
    kinds = [
        F.struct(F.lit(what).alias("what"), n.cast("bigint").alias("count"))
        for what, n in found.items()
    ]
    begin = F.coalesce("previous_time", "time")
    each = ordered.select(
        "source",
        begin.alias("begin"),
        F.col("time").alias("end"),
        F.explode(F.array(*kinds)).alias("gap"),
    )
    return each.where("gap.count > 0").select(
        "gap.what", F.col("source").alias("place"), "begin", "end", "gap.count"
    )


def _silent(events: DataFrame, scope: ReportScope) -> DataFrame:
    """Return gaps: storage nodes without events at the end of the scope."""
    each = events.where(F.col("source").startswith("storage/")).groupBy("source")
    last = each.agg(F.max(event_time()).alias("begin"))
    newest = last.withColumn("newest", F.max("begin").over(Window.partitionBy()))
    end = F.expr(f"newest - INTERVAL {SILENT_S} SECONDS")
    if scope.until is not None:
        until = F.lit(scope.until)
        end = F.greatest(F.least(end, until), until - F.expr(f"INTERVAL {2 * SILENT_S} SECONDS"))
    return newest.where(F.col("begin") < end).select(
        F.lit("silent").alias("what"),
        F.col("source").alias("place"),
        "begin",
        end.alias("end"),
        F.lit(1).cast("bigint").alias("count"),
    )


def _lost(events: DataFrame) -> DataFrame:
    """Return gaps: messages of the metrics topic that are lost or unreadable."""
    rows = events.where(F.col("kind").isin("data_loss", "unreadable"))
    place = F.concat_ws("/", F.lit("BATON_SYS_METRICS"), "sys_broker", "sys_queue_id")
    return rows.groupBy(F.col("kind").alias("what"), place.alias("place")).agg(
        F.min("time").alias("begin"),
        F.max("time").alias("end"),
        F.sum(F.coalesce("count", F.lit(1))).cast("bigint").alias("count"),
    )


def _without_offsets_events(events: DataFrame) -> DataFrame:
    """Return a gap if messages are delivered and the offsets service has no events."""
    of_offsets = F.col("source").startswith("offsets/")
    is_delivery = F.col("kind") == "delivered"
    found = events.agg(
        F.max(of_offsets.cast("int")).alias("has_offsets_events"),
        F.count_if(is_delivery).alias("count"),
        F.min(F.when(is_delivery, F.col("time"))).alias("begin"),
        F.max(F.when(is_delivery, F.col("time"))).alias("end"),
    )
    return found.where("count > 0 AND has_offsets_events = 0").select(
        F.lit("unheard").alias("what"), F.lit("offsets").alias("place"), "begin", "end", "count"
    )


def _uncovered(events: DataFrame, scope: ReportScope) -> DataFrame:
    """Return gaps: committed offsets without an event of their delivery."""
    history = _history(events, scope)
    found = history.groupBy(*QUEUE).applyInPandas(
        _unseen_of, f"{_UNCOVERED}, begin TIMESTAMP, end TIMESTAMP"
    )
    queue = F.concat_ws("/", "topic", "broker", "queue_id")
    place = F.format_string(
        "%s %s [%d, %d)",
        F.col("consumer_group"),
        queue,
        F.col("first_offset"),
        F.col("next_offset"),
    )
    count = F.col("next_offset") - F.col("first_offset")
    return found.select(
        F.lit("uncovered").alias("what"), place.alias("place"), "begin", "end", count.alias("count")
    )


def _unseen_of(rows: pd.DataFrame) -> pd.DataFrame:
    queue = [rows[name].iloc[0] for name in QUEUE]
    times = [
        pd.Timestamp(rows["unix_ms"].min(), unit="ms"),
        pd.Timestamp(rows["unix_ms"].max(), unit="ms"),
    ]
    found = [[*queue, *run, *times] for run in undelivered_commits(_of_pandas(rows))]
    return pd.DataFrame(found, columns=[*_names(_UNCOVERED), "begin", "end"])


def _needed(events: DataFrame) -> DataFrame:
    """Return the events of the services that the audit needs."""
    return events.where(F.split_part("source", F.lit("/"), F.lit(1)).isin(*_SERVICES))


def _names(ddl: str) -> list[str]:
    return [column.split()[0] for column in ddl.split(",")]
