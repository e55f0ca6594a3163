"""The report `capacity_forecast`: growth, full disks, hot queues and suggested queues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from batonspark.event_columns import attribute
from batonspark.reports import Report, ReportScope

PEAK_S = 10
"""Length of the intervals; the highest average rate of one is the peak."""
BEHIND_MIN = 1_000
"""Minimum lag at which the delivery rate of a queue counts as its maximum."""
HEADROOM = 1.5
"""Factor on the peak rate for which queues are suggested."""
SKEW_MAX = 2.0
"""A queue with this many times the mean rate of its topic is hot."""
_QUEUE = ("topic", "broker", "queue_id")


def growth(events: DataFrame) -> DataFrame:
    """Return one row for each queue: append rates, on average and at the peak.

    `share` is the share of the queue in its topic. `skew` is its rate divided by the mean of the
    queues of the topic: 1 if all rates are equal.
    """
    appended = events.where("kind = 'appended'")
    slot = F.floor(F.unix_millis("time") / (1000 * PEAK_S))
    slots = appended.groupBy(*_QUEUE, slot.alias("slot")).agg(
        F.sum("count").alias("count"), F.sum("byte_count").alias("byte_count")
    )
    queues = slots.groupBy(*_QUEUE).agg(
        F.sum("count").alias("message_count"),
        F.sum("byte_count").alias("byte_count"),
        (F.max("count") / PEAK_S).alias("peak_rate"),
    )
    span = events.agg(_seconds(F.min("time"), F.max("time")).alias("seconds"))
    topic = Window.partitionBy("topic")
    mean = F.avg("message_count").over(topic)
    return queues.crossJoin(F.broadcast(span)).select(
        *_QUEUE,
        "message_count",
        "byte_count",
        (F.col("message_count") / F.col("seconds")).alias("message_rate"),
        (F.col("byte_count") / F.col("seconds")).alias("byte_rate"),
        "peak_rate",
        (F.col("message_count") / F.sum("message_count").over(topic)).alias("share"),
        (F.col("message_count") / mean).alias("skew"),
    )


def volumes(events: DataFrame) -> DataFrame:
    """Return one row for each storage node: used and free bytes, growth, time until full.

    `growth_rate` is the slope of a straight line through all samples, in bytes per second, so
    deletion by retention is included. `hours_until_full` is null unless the usage grows.
    """
    volume_states = events.where("kind = 'volume_state'")
    at = F.col("time").cast("double")
    sampled = volume_states.select(
        "source", "time", "byte_count", attribute("free_bytes").alias("free_bytes"), at.alias("at")
    )
    rows = sampled.groupBy("source").agg(
        F.max_by("byte_count", "time").alias("used_bytes"),
        F.max_by("free_bytes", "time").alias("free_bytes"),
        F.count("*").alias("samples"),
        F.regr_slope("byte_count", "at").alias("growth_rate"),
    )
    hours = F.when(F.col("growth_rate") > 0, F.col("free_bytes") / F.col("growth_rate") / 3600)
    return rows.withColumn("hours_until_full", hours)


def topics(events: DataFrame) -> DataFrame:
    """One row for each topic: its growth, its hottest queue, how many queues would be right.

    `queue_rate` is what one owner was seen to be delivered of one queue at most while it was
    behind: what one queue can do. It is null if no group was ever behind; then nothing is known
    to be too little. `suggested_queues` is enough for `HEADROOM` times the peak, and for every
    member of the largest group; never less than there are. More queues do not help a queue that is
    hot because of one key.
    """
    queues = growth(events)
    hottest = F.max_by(F.struct("broker", "queue_id", "skew"), "skew")
    rows = queues.groupBy("topic").agg(
        F.count("*").alias("active_queues"),
        F.sum("message_count").alias("message_count"),
        F.sum("byte_count").alias("byte_count"),
        F.sum("message_rate").alias("message_rate"),
        F.sum("byte_rate").alias("byte_rate"),
        hottest.alias("hottest"),
    )
    found = (
        rows.join(_peaks(events), "topic", "left")
        .join(_known_queues(events), "topic", "left")
        .join(_abilities(events), "topic", "left")
        .join(_members(events), "topic", "left")
    )
    count = F.greatest("active_queues", F.coalesce("known_queues", F.lit(0)))
    needed = F.ceil(F.lit(HEADROOM) * F.col("peak_rate") / F.col("queue_rate"))
    return found.select(
        "topic",
        count.alias("queue_count"),
        "message_count",
        "byte_count",
        "message_rate",
        "byte_rate",
        "peak_rate",
        F.col("hottest.broker").alias("hottest_broker"),
        F.col("hottest.queue_id").alias("hottest_queue_id"),
        F.col("hottest.skew").alias("skew"),
        "queue_rate",
        F.coalesce("member_count", F.lit(0)).alias("member_count"),
        F.greatest(count, F.coalesce(needed, F.lit(0)), F.coalesce("member_count", F.lit(0)))
        .cast("bigint")
        .alias("suggested_queues"),
    )


def forecast(events: DataFrame, scope: ReportScope) -> Report:
    """Return the report."""
    within = scope.in_time(events)
    within = within.where(F.col("topic").isNull() | ~F.col("topic").startswith("BATON_SYS_"))
    within = within.cache()
    subject = (
        within
        if scope.topic is None
        else within.where((F.col("topic") == scope.topic) | (F.col("kind") == "rebalanced"))
    )
    rows = growth(subject).orderBy(*_QUEUE)
    found = [row.asDict() for row in topics(subject).orderBy(F.desc("byte_rate")).collect()]
    disks = [row.asDict() for row in volumes(within).orderBy("source").collect()]
    summary = {"asked": scope.described(), "topics": found, "volumes": disks}
    return Report(summary, list(lines(summary)), rows)


def lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Return the summary as lines for a terminal."""
    for one in summary["volumes"]:
        hours = one["hours_until_full"]
        until = "does not grow" if hours is None else f"full in {hours:,.1f} hours"
        yield (
            f"{one['source']}: {one['used_bytes'] / 1e9:,.2f} GB used, "
            f"{one['free_bytes'] / 1e9:,.2f} GB free, "
            f"{(one['growth_rate'] or 0) * 3600 / 1e9:+,.3f} GB/h, {until}"
        )
    for one in summary["topics"]:
        yield (
            f"{one['topic']}: {one['byte_rate'] * 3600 / 1e9:,.3f} GB/h, "
            f"{one['message_rate']:,.0f} messages/s, peak {one['peak_rate']:,.0f}"
        )
        if one["skew"] >= SKEW_MAX:
            yield (
                f"  hot queue {one['hottest_broker']}/{one['hottest_queue_id']}: "
                f"{one['skew']:.1f} times the mean; look at its keys"
            )
        yield f"  {one['queue_count']} queues, suggested {one['suggested_queues']}: {_reason(one)}"


def _reason(one: Mapping[str, Any]) -> str:
    if one["suggested_queues"] <= one["queue_count"]:
        return "enough"
    if one["suggested_queues"] == one["member_count"]:
        return f"a group has {one['member_count']} members"
    return f"one queue was delivered at {one['queue_rate']:,.0f} messages/s at most"


def _peaks(events: DataFrame) -> DataFrame:
    slot = F.floor(F.unix_millis("time") / (1000 * PEAK_S))
    slots = events.where("kind = 'appended'").groupBy("topic", slot.alias("slot"))
    sums = slots.agg((F.sum("count") / PEAK_S).alias("rate"))
    return sums.groupBy("topic").agg(F.max("rate").alias("peak_rate"))


def _known_queues(events: DataFrame) -> DataFrame:
    """Return the number of queues of each topic in any event, idle queues included."""
    named = events.where("topic IS NOT NULL AND queue_id IS NOT NULL").select(*_QUEUE).distinct()
    return named.groupBy("topic").agg(F.count("*").alias("known_queues"))


def _abilities(events: DataFrame) -> DataFrame:
    """Return the highest delivery rate of a queue with lag, by topic."""
    key = ("consumer_group", *_QUEUE, "slot")
    slotted = events.withColumn("slot", F.floor(F.unix_millis("time") / (1000 * PEAK_S)))
    lag = F.col("next_offset") - F.col("committed_offset") - attribute("acked_beyond_count")
    behind = slotted.where("kind = 'queue_lag'").groupBy(*key).agg(F.max(lag).alias("lag"))
    delivered = slotted.where("kind = 'delivered'").groupBy(*key)
    rates = delivered.agg((F.sum("count") / PEAK_S).alias("rate"))
    busy = rates.join(behind.where(F.col("lag") >= BEHIND_MIN), list(key), "left_semi")
    return busy.groupBy("topic").agg(F.max("rate").alias("queue_rate"))


def _members(events: DataFrame) -> DataFrame:
    """Return the number of members of the largest consumer group of each topic."""
    sizes = events.where("kind = 'rebalanced'").groupBy("consumer_group")
    members = sizes.agg(F.max_by("count", "time").alias("members"))
    delivered = events.where("kind = 'delivered' AND token > 0")
    groups = delivered.select("topic", "consumer_group").distinct()
    joined = groups.join(members, "consumer_group")
    return joined.groupBy("topic").agg(F.max("members").alias("member_count"))


def _seconds(begin: Column, end: Column) -> Column:
    """Return the seconds between two times, at least 1."""
    return F.greatest(end.cast("double") - begin.cast("double"), F.lit(1.0))
