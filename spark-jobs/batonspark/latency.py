"""Latency percentiles from sketches: windows of 10 s and of 1 min by source.

A row of the result has the form of its events: first bucket, counts, sum. Sketches are merged by
adding the counts of equal buckets, so rows can be folded again, in any order and grouping; the
rows of minutes are folded from those of 10 s. Sums too large for BIGINT are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from batonmq._core.log_buckets import PER_DOUBLING
from batonspark.event_columns import event_time, is_sketch, struct, window_start

KEYS = ("window_start", "source", "operation", "consumer_group", "topic")
WINDOWS_S = (10, 60)
PERCENTILES = (50, 95, 99)
BASE = """
    window_start TIMESTAMP, source STRING, operation STRING, consumer_group STRING, topic STRING,
    first_bucket INT, buckets ARRAY<BIGINT>, value_sum BIGINT
"""
LATENCY = f"""
    window_s INT, {BASE}, date DATE, minute TIMESTAMP,
    count BIGINT, mean_us DOUBLE, p50_us DOUBLE, p95_us DOUBLE, p99_us DOUBLE
"""
"""`consumer_group` and `topic` are null if the source does not measure by group and topic."""


def measures(events: DataFrame) -> DataFrame:
    """Return rows of BASE, one for each sketch."""
    latencies = events.where((F.col("kind") == "latency") & is_sketch())
    start = window_start(event_time(), WINDOWS_S[0])
    columns = [field.name for field in struct(BASE)][1:]
    return latencies.select(start.alias("window_start"), *columns)


def fold(rows: DataFrame, keys: Sequence[str] = KEYS) -> DataFrame:
    """Merge rows of BASE, one result for each value of `keys`; results may be folded again."""
    opened = rows.select(
        *keys, "first_bucket", "value_sum", F.posexplode("buckets").alias("place", "n")
    )
    bucket = (F.col("first_bucket") + F.col("place")).alias("bucket")
    once = F.when(F.col("place") == 0, F.col("value_sum")).otherwise(0)
    counted = opened.groupBy(*keys, bucket).agg(
        F.try_sum("n").alias("n"), F.try_sum(once).alias("value")
    )
    filled = F.when(F.col("n") > 0, F.struct("bucket", "n"))
    merged = counted.groupBy(*keys).agg(
        F.array_sort(F.collect_list(filled)).alias("filled"), F.try_sum("value").alias("value_sum")
    )
    first, last = F.col("filled")[0]["bucket"], F.element_at("filled", -1)["bucket"]
    counts = F.map_from_entries("filled")
    dense = F.transform(
        F.sequence(first, last), lambda at: F.coalesce(F.try_element_at(counts, at), F.lit(0))
    )
    dense_rows = merged.where(F.size("filled") > 0).withColumns(
        {"first_bucket": first, "buckets": dense}
    )
    return dense_rows.select(*keys, "first_bucket", "buckets", "value_sum")


def windows(base: DataFrame) -> DataFrame:
    """Return rows of LATENCY from the folded rows of BASE of whole minutes."""
    wide = base.withColumn("window_s", F.explode(F.array(*map(F.lit, WINDOWS_S))))
    start = window_start(F.col("window_start"), F.col("window_s"))
    both = fold(wide.withColumn("window_start", start), ("window_s", *KEYS))
    count = F.aggregate("buckets", F.lit(0).cast("bigint"), F.try_add)
    rows = both.withColumns(
        {
            "date": F.to_date("window_start"),
            "minute": F.date_trunc("minute", "window_start"),
            "count": count,
        }
    ).withColumns(
        {
            "mean_us": F.col("value_sum") / F.col("count"),
            **{f"p{p}_us": percentile(p) for p in PERCENTILES},
        }
    )
    return rows.to(struct(LATENCY))


def latency(events: DataFrame) -> DataFrame:
    """Return rows of LATENCY from all events of whole minutes."""
    return windows(fold(measures(events)))


def percentile(hundredth: int) -> Column:
    """Return a percentile of `buckets`, as `batonmq._core.log_buckets.percentile` computes it."""
    wanted = F.greatest(F.col("count") * hundredth / 100, F.lit(1.0))
    start = F.struct(F.lit(0).cast("bigint").alias("seen"), F.lit(0).alias("place"))

    def next_place(at: Column, n: Column) -> Column:
        seen = at["seen"] + n
        below = F.when(seen < wanted, 1).otherwise(0)
        return F.struct(seen.alias("seen"), (at["place"] + below).alias("place"))

    bucket = F.col("first_bucket") + F.aggregate("buckets", start, next_place)["place"]
    middle = F.pow(F.lit(2.0), (bucket - 0.5) / PER_DOUBLING)
    return F.when(bucket <= 0, F.lit(1.0)).otherwise(middle)
