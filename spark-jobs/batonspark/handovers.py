"""The report `handover_report`: hand-overs with their phases, and the owners of each queue."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from batonspark.event_columns import attribute
from batonspark.reports import Report, ReportScope

QUEUE = ("consumer_group", "topic", "broker", "queue_id")
PHASES = ("contend_ms", "drain_ms", "fence_ms", "persist_ms")
FIRST_PULL_MAX_MS = 60_000
"""A first pull later than this is not counted: the queue had nothing to deliver."""
OUTLIER_MIN_MS = 250
"""A hand-over that took less is never an outlier."""
PERCENTILES = (50, 95, 99)
PAGE_ROWS_MAX = 20_000
"""Maximum of hand-overs, and of ownerships, that are drawn: the newest ones."""


def handovers(events: DataFrame, scope: ReportScope) -> DataFrame:
    """Return one row for each hand-over.

    `total_ms` is the time until the new owner holds the queue. `first_pull_ms` follows it: the time
    until the first delivery event, at most one second too long, since events are published once a
    second; null without a delivery within a minute. `outlier`: `total_ms` is above the upper
    quartile by more than three times the interquartile range.
    """
    handed_over = scope.in_time(scope.of_subject(events.where("kind = 'handed_over'")))
    phases = [attribute(name).alias(name) for name in PHASES]
    rows = handed_over.select(
        "time",
        *QUEUE,
        "previous_client_id",
        attribute("previous_token").alias("previous_token"),
        "client_id",
        "token",
        F.col("reason").alias("manner"),
        *phases,
        F.col("duration_ms").alias("total_ms"),
    )
    delivered = events.where("kind = 'delivered'")
    pulls = delivered.groupBy(*QUEUE, "token").agg(F.min("time").alias("pull_time"))
    wait_ms = F.unix_millis("pull_time") - F.unix_millis("time")
    first_pull = F.when(wait_ms <= FIRST_PULL_MAX_MS, F.greatest(wait_ms, F.lit(0)))
    timed = rows.join(pulls, [*QUEUE, "token"], "left").withColumn("first_pull_ms", first_pull)
    return _with_outliers(timed).select(*rows.columns, "first_pull_ms", "outlier")


def owners(events: DataFrame, scope: ReportScope) -> DataFrame:
    """Return the owner of each queue with its token, from `begin` to `end` (null: until now)."""
    kinds = ("lock_granted", "lock_forced", "lock_released")
    rows = scope.of_subject(events.where(F.col("kind").isin(*kinds)))
    released = (
        rows.where("kind = 'lock_released'")
        .groupBy(*QUEUE, "token")
        .agg(F.min("time").alias("released"))
    )
    taken = rows.where("kind <> 'lock_released'")
    ordered = Window.partitionBy(*QUEUE).orderBy("token", "time")
    ownerships = taken.withColumn("next_time", F.lead("time").over(ordered))
    found = ownerships.where("kind = 'lock_granted'").join(released, [*QUEUE, "token"], "left")
    begin, end = F.col("time").alias("begin"), F.least("released", "next_time").alias("end")
    spans = found.select(*QUEUE, "client_id", "token", begin, end)
    if scope.since is not None:
        spans = spans.where(F.coalesce("end", F.lit(scope.since)) >= F.lit(scope.since))
    return spans if scope.until is None else spans.where(F.col("begin") < F.lit(scope.until))


def percentiles(rows: DataFrame) -> list[dict[str, Any]]:
    """Return one row for each phase: the count, and percentiles in milliseconds."""
    names = (*PHASES, "first_pull_ms", "total_ms")
    shares = F.array(*[F.lit(percent / 100) for percent in PERCENTILES])
    wanted = [F.percentile(name, shares).alias(name) for name in names]
    counted = [F.count(name).alias(f"{name}_n") for name in names]
    greatest = [F.max(name).alias(f"{name}_max") for name in names]
    (row,) = rows.agg(*wanted, *counted, *greatest).collect()
    return [
        {
            "phase": name.removesuffix("_ms"),
            "count": row[f"{name}_n"],
            **dict(zip((f"p{p}" for p in PERCENTILES), row[name] or [None] * 3, strict=True)),
            "max": row[f"{name}_max"],
        }
        for name in names
    ]


def report(events: DataFrame, scope: ReportScope) -> Report:
    """Return the report with its page."""
    from batonspark.handover_page import page  # noqa: PLC0415  loads matplotlib

    rows = handovers(events.cache(), scope).cache()
    spans = owners(events, scope)
    manners = {one.manner: one["count"] for one in rows.groupBy("manner").count().collect()}
    phases = percentiles(rows)
    count, outliers = sum(manners.values()), rows.where("outlier").count()
    summary = {
        "asked": scope.described(),
        "count": count,
        "outlier_count": outliers,
        "manners": manners,
        "phases": phases,
    }
    drawn = rows.orderBy(F.desc("time")).limit(PAGE_ROWS_MAX).toPandas()
    timeline = spans.orderBy(F.desc("begin")).limit(PAGE_ROWS_MAX).toPandas()
    lines = [f"hand-overs: {count:,}, {outliers:,} of them outliers"]
    lines += [f"  {manner.lower()}: {n:,}" for manner, n in sorted(manners.items())]
    lines += [_line(one) for one in phases]
    return Report(summary, lines, rows, page(drawn, timeline, summary))


def _with_outliers(rows: DataFrame) -> DataFrame:
    quartiles = F.percentile("total_ms", F.array(F.lit(0.25), F.lit(0.75)))
    bounds = rows.agg(quartiles.alias("quartiles"))
    low, high = F.col("quartiles")[0], F.col("quartiles")[1]
    limit = F.greatest(high + 3 * (high - low), F.lit(OUTLIER_MIN_MS))
    return rows.crossJoin(F.broadcast(bounds)).withColumn("outlier", F.col("total_ms") > limit)


def _line(one: dict[str, Any]) -> str:
    if not one["count"]:
        return f"  {one['phase']:<11} none"
    percentiles = "  ".join(f"p{p} {one[f'p{p}']:,.0f}" for p in PERCENTILES)
    return f"  {one['phase']:<11} {percentiles}  max {one['max']:,} ms"
