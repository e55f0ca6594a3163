"""Columns that jobs derive from rows of `schemas.METRICS`."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from batonmq._core.log_buckets import BUCKETS

CLOCK_SKEW_MAX_S = 60
"""Maximum difference between the clocks of source and broker for the source's time to be used."""
PUBLISH_DELAY_MAX_S = 10
"""Maximum difference between an event's time for alerts and its store time."""


def struct(ddl: str) -> StructType:
    """Return the schema of DDL; requires a Spark session."""
    found = StructType.fromDDL(ddl)
    assert isinstance(found, StructType)
    return found


def event_time() -> Column:
    """Return the time of an event by its source's clock, or the store time if they disagree.

    Otherwise one source with a wrong clock would move the watermark of all sources, or change
    old windows.
    """
    apart_s = F.abs(F.col("time").cast("double") - F.col("store_time").cast("double"))
    agrees = apart_s <= CLOCK_SKEW_MAX_S
    return F.when(agrees, F.col("time")).otherwise(F.coalesce("store_time", "time"))


def by_source_clock(events: DataFrame) -> DataFrame:
    """Return the events with a store time at which `event_time` is the time of their source.

    So are all events of a process of which one was stored soon: its clock is right, and events that
    were stored later have waited, as those that a stopped process has left to the next one.
    """
    apart_s = F.abs(F.col("time").cast("double") - F.col("store_time").cast("double"))
    right = events.groupBy("producer_id").agg((F.min(apart_s) <= CLOCK_SKEW_MAX_S).alias("right"))
    joined = events.join(F.broadcast(right), "producer_id")
    stored = F.when(F.col("right") & F.col("time").isNotNull(), F.col("time")).otherwise(
        F.col("store_time")
    )
    return joined.withColumn("store_time", stored).select(*events.columns)


def alert_time() -> Column:
    """Return the time of an event by its source's clock, limited to the store time +- 10 s.

    An event that is published late, because storage was down, is thus not too late for alerts, and
    a wrong clock does not make the events of other sources late. Events of a source keep their
    order.
    """
    stored = F.coalesce("store_time", "time")
    within = F.expr(f"INTERVAL {PUBLISH_DELAY_MAX_S} SECONDS")
    return F.greatest(F.least(F.coalesce("time", stored), stored + within), stored - within)


def window_start(time: Column, width_s: Column | int) -> Column:
    """Return the start of the window of `width_s` seconds that contains a time."""
    width_ms = (F.lit(width_s) if isinstance(width_s, int) else width_s) * 1_000
    return F.timestamp_millis(F.floor(F.unix_millis(time) / width_ms) * width_ms)


def attribute(name: str) -> Column:
    """Return a number in `attrs`; 0 if it is absent, as zeros are not stored."""
    return F.coalesce(F.try_element_at("attrs", F.lit(name)).try_cast("bigint"), F.lit(0))


def has_attribute(name: str) -> Column:
    """Return whether a value in `attrs` is present: neither 0, false nor empty."""
    return F.try_element_at("attrs", F.lit(name)).isNotNull()


def is_sketch() -> Column:
    """Return whether the buckets of an event exist; a sketch of others would have no end."""
    end = F.col("first_bucket").cast("bigint") + F.size("buckets")
    return (F.col("first_bucket") >= 0) & (F.size("buckets") > 0) & (end <= BUCKETS)


def without_repeats(messages: DataFrame, within: str = "10 minutes") -> DataFrame:
    """Remove messages of BATON_SYS_METRICS from batches that were read before.

    The watermark is in read time, so that no message is ever too late, however long its broker was
    down.

    Args:
        messages: Messages with the columns `producer_id` and `seq`.
        within: A repeat that is read later than this is not recognized.
    """
    read = messages.withColumn("read_time", F.current_timestamp())
    known = read.withWatermark("read_time", within)
    return known.dropDuplicatesWithinWatermark(["producer_id", "seq"]).drop("read_time")
