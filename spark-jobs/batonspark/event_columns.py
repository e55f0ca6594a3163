"""What every job does first with rows of `schemas.METRICS`."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

CLOCK_SKEW_MAX_S = 60
"""A source whose clock is further away from that of the broker is not believed."""
TOLD_WITHIN_S = 10
"""What is stored so much later than it happened has happened then, for alerts."""


def struct(ddl: str) -> StructType:
    """The columns that DDL names; there has to be a session."""
    found = StructType.fromDDL(ddl)
    assert isinstance(found, StructType)
    return found


def event_time() -> Column:
    """When it happened, by the clock of the source; by that of the broker if the two disagree.

    One source with a wrong clock would otherwise move the watermark of all, or write into windows
    of long ago.
    """
    apart_s = F.abs(F.col("time").cast("double") - F.col("store_time").cast("double"))
    believed = apart_s <= CLOCK_SKEW_MAX_S
    return F.when(believed, F.col("time")).otherwise(F.coalesce("store_time", "time"))


def alert_time() -> Column:
    """When it happened by the clock of the source, but within some seconds of its storing.

    So an event that its source told late, because storage was away, is not too late for alerts, and
    a wrong clock makes no others so. Events of a source keep their order.
    """
    stored = F.coalesce("store_time", "time")
    within = F.expr(f"INTERVAL {TOLD_WITHIN_S} SECONDS")
    return F.greatest(F.least(F.coalesce("time", stored), stored + within), stored - within)


def window_start(time: Column, width_s: Column | int) -> Column:
    """Beginning of the window of so many seconds that a time lies in."""
    width_ms = (F.lit(width_s) if isinstance(width_s, int) else width_s) * 1_000
    return F.timestamp_millis(F.floor(F.unix_millis(time) / width_ms) * width_ms)


def attribute(name: str) -> Column:
    """A number in `attrs`; what is 0 is not there."""
    return F.coalesce(F.try_element_at("attrs", F.lit(name)).try_cast("bigint"), F.lit(0))


def has_attribute(name: str) -> Column:
    """Whether something in `attrs` is neither 0, false nor empty."""
    return F.try_element_at("attrs", F.lit(name)).isNotNull()


def without_repeats(messages: DataFrame, within: str = "10 minutes") -> DataFrame:
    """Of messages of BATON_SYS_METRICS that hold the same batch, the first that is read.

    What counts is the time of reading: no message is ever too late to be taken, however long its
    broker was away.

    Args:
        messages: With `producer_id` and `seq`.
        within: A repeat that is read so much later is not known as one any more.
    """
    read = messages.withColumn("read_time", F.current_timestamp())
    known = read.withWatermark("read_time", within)
    return known.dropDuplicatesWithinWatermark(["producer_id", "seq"]).drop("read_time")
