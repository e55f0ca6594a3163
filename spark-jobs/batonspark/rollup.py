"""Windows of 10 s and of 1 min over the metric events: by queue, by topic and by group.

Each event becomes a row of measures for its queue and its 10 s; `fold` adds rows up. The order and
the grouping of the additions do not matter, so a window is the same whether its events arrive in
one micro-batch or in many, early or late. `windows` makes the rest from the rows of 10 s: minutes,
topics, groups, rates and ratios. Sums that are too large for BIGINT are left out, because an error
would end the query at the same event after each restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from batonspark.event_columns import attribute, event_time, has_attribute, struct, window_start

WINDOWS_S = (10, 60)
KEYS = ("window_start", "consumer_group", "topic", "broker", "queue_id")
SUMS = (
    "appended_count", "appended_bytes", "delivered_count", "delivered_bytes", "filtered_count",
    "redelivered_count", "handled_count", "failed_count", "retried_count", "dead_lettered_count",
    "lock_grant_count", "lock_denial_count", "steal_count", "forced_count", "fenced_count",
    "rebalance_count", "moved_queue_count", "conflict_count", "expired_member_count",
)  # fmt: skip
"""Additive measures."""
LAG = ("lag_time", "lag", "lag_ms", "in_flight")
"""Measures of the last lag event of a queue in the window."""
FIRST_COMMIT = ("first_commit_time", "first_committed_offset")
LAST_COMMIT = ("last_commit_time", "committed_offset")
RATES = ("appended_count", "appended_bytes", "delivered_count", "delivered_bytes")
PERCENTILES = (50, 95, 99)

BASE = f"""
    window_start TIMESTAMP, consumer_group STRING, topic STRING, broker STRING, queue_id INT,
    {", ".join(f"{name} BIGINT" for name in SUMS)},
    lag_time TIMESTAMP, lag BIGINT, lag_ms BIGINT, in_flight BIGINT,
    lag_max BIGINT, lag_ms_max BIGINT,
    first_commit_time TIMESTAMP, first_committed_offset BIGINT,
    last_commit_time TIMESTAMP, committed_offset BIGINT, hand_over_ms ARRAY<BIGINT>
"""
"""Measures of one queue over 10 s. An event without a queue, such as a rebalance, has nulls."""
ROLLUP = f"""
    level STRING, window_s INT, {BASE}, date DATE, minute TIMESTAMP,
    appended_rate DOUBLE, appended_bytes_rate DOUBLE,
    delivered_rate DOUBLE, delivered_bytes_rate DOUBLE, committed_rate DOUBLE,
    redelivery_ratio DOUBLE, lag_s DOUBLE, hand_over_count BIGINT,
    {", ".join(f"hand_over_p{p}_ms BIGINT" for p in PERCENTILES)}
"""
"""`level` is `queue`, `topic` or `group`; lag and in_flight of topics and groups are sums."""


def measures(events: DataFrame) -> DataFrame:
    """Return rows of BASE, one for each event with measures."""
    known = events.where(F.col("kind").isin(*sorted(_KINDS)))
    timed = known.withColumn("at", event_time())
    start = window_start(F.col("at"), WINDOWS_S[0])
    columns = [value.alias(name) for name, value in (_counts() | _gauges()).items()]
    return timed.select(start.alias(KEYS[0]), *KEYS[1:], *columns)


def fold(rows: DataFrame, keys: Sequence[str] = KEYS) -> DataFrame:
    """Add up rows of BASE, one result for each value of `keys`; results may be folded again."""
    added = rows.groupBy(*keys).agg(
        *(F.try_sum(name).alias(name) for name in SUMS),
        _of_latest(LAG).alias("last"),
        F.max("lag_max").alias("lag_max"),
        F.max("lag_ms_max").alias("lag_ms_max"),
        F.min(F.when(F.col(FIRST_COMMIT[0]).isNotNull(), F.struct(*FIRST_COMMIT))).alias("early"),
        _of_latest(LAST_COMMIT).alias("late"),
        F.sort_array(F.flatten(F.collect_list("hand_over_ms"))).alias("hand_over_ms"),
    )
    flat = [*keys, *SUMS, *(f"last.{name}" for name in LAG), "lag_max", "lag_ms_max"]
    flat += [f"early.{name}" for name in FIRST_COMMIT] + [f"late.{name}" for name in LAST_COMMIT]
    return added.select(*flat, "hand_over_ms")


def windows(base: DataFrame) -> DataFrame:
    """Return rows of ROLLUP from the folded rows of BASE of whole minutes."""
    wide = base.withColumn("window_s", F.explode(F.array(*map(F.lit, WINDOWS_S))))
    start = window_start(F.col("window_start"), F.col("window_s"))
    queues = fold(wide.withColumn("window_start", start), ("window_s", *KEYS))
    return _with_derived(_levels(queues.withColumn("committed_rate", _commit_rate())))


def rollup(events: DataFrame) -> DataFrame:
    """Return rows of ROLLUP from all events of whole minutes."""
    return windows(fold(measures(events)))


def _levels(queues: DataFrame) -> DataFrame:
    """Return the rows of queues, and their sums by topic and by group."""
    named = {"topic": "topic", "group": "consumer_group"}
    levels = [F.when(F.col(name).isNotNull(), F.lit(level)) for level, name in named.items()]
    wide = queues.withColumn("level", F.explode(F.array_compact(F.array(F.lit("queue"), *levels))))
    queue = F.col("level") == "queue"
    kept = {
        "consumer_group": queue | (F.col("level") == "group"),
        "topic": queue | (F.col("level") == "topic"),
        **dict.fromkeys(("broker", "queue_id", *FIRST_COMMIT, *LAST_COMMIT), queue),
    }
    wide = wide.withColumns({name: F.when(at, F.col(name)) for name, at in kept.items()})
    greatest = ("lag_time", "lag_ms", "lag_max", "lag_ms_max", *FIRST_COMMIT, *LAST_COMMIT)
    return wide.groupBy("level", "window_s", *KEYS).agg(
        *(F.try_sum(name).alias(name) for name in (*SUMS, "lag", "in_flight", "committed_rate")),
        *(F.max(name).alias(name) for name in greatest),
        F.sort_array(F.flatten(F.collect_list("hand_over_ms"))).alias("hand_over_ms"),
    )


def _with_derived(rows: DataFrame) -> DataFrame:
    """Add the derived columns, and order all columns."""
    delivered, again = F.col("delivered_count"), F.col("redelivered_count")
    hand_overs = F.col("hand_over_ms")
    made: dict[str, Column] = {
        "date": F.to_date("window_start"),
        "minute": F.date_trunc("minute", "window_start"),
        **{name.replace("_count", "") + "_rate": F.col(name) / F.col("window_s") for name in RATES},
        "redelivery_ratio": F.when(delivered > 0, again / delivered),
        "lag_s": F.col("lag_ms") / 1000,
        "hand_over_count": F.size(hand_overs).cast("bigint"),
        **{f"hand_over_p{p}_ms": _rank(hand_overs, p) for p in PERCENTILES},
    }
    return rows.withColumns(made).to(struct(ROLLUP))


def _of_latest(names: Sequence[str]) -> Column:
    """Return the columns of the row with the greatest first one; ties compare the next."""
    return F.max(F.when(F.col(names[0]).isNotNull(), F.struct(*names)))


def _commit_rate() -> Column:
    """Return the messages per second between the first and the last commit of a window."""
    seconds = F.col(LAST_COMMIT[0]).cast("double") - F.col(FIRST_COMMIT[0]).cast("double")
    moved = F.try_subtract(LAST_COMMIT[1], FIRST_COMMIT[1])
    return F.when(seconds > 0, moved / seconds)


def _rank(ordered: Column, percentile: int) -> Column:
    """Return a percentile of an ordered array; null if it is empty."""
    rank = F.ceil(F.size(ordered) * percentile / 100).cast("int")
    return F.when(F.size(ordered) > 0, F.element_at(ordered, F.greatest(rank, F.lit(1))))


_COUNTED: Mapping[str, tuple[str, str]] = {
    "appended_count": ("appended", "count"),
    "appended_bytes": ("appended", "byte_count"),
    "delivered_count": ("delivered", "count"),
    "delivered_bytes": ("delivered", "byte_count"),
    "filtered_count": ("delivered", "filtered_count"),
    "redelivered_count": ("delivered", "redelivered_count"),
    "handled_count": ("handled", "count"),
    "retried_count": ("retried", "count"),
    "dead_lettered_count": ("dead_lettered", "count"),
    "lock_denial_count": ("lock_denied", "count"),
    "fenced_count": ("fenced", "count"),
}
"""Measures that sum a column of the events of one kind."""
_NUMBERED = {
    "lock_grant_count": "lock_granted",
    "forced_count": "lock_forced",
    "rebalance_count": "rebalanced",
    "expired_member_count": "member_expired",
}
"""Measures that count the events of one kind."""
_KINDS = {kind for kind, _ in _COUNTED.values()} | set(_NUMBERED.values())
_KINDS |= {"queue_lag", "committed", "handed_over", "subscription_refused", "subscription_changed"}


def _counts() -> dict[str, Column]:
    """Return the additive measures of an event."""
    kind, one = F.col("kind"), F.lit(1)
    disagree = (kind == "subscription_refused") | (
        (kind == "subscription_changed") & has_attribute("differences")
    )
    moves = F.json_array_length(F.try_element_at("attrs", F.lit("moves")))
    columns = {name: F.when(kind == of, F.col(column)) for name, (of, column) in _COUNTED.items()}
    columns |= {name: F.when(kind == of, one) for name, of in _NUMBERED.items()}
    columns |= {
        "failed_count": F.when(kind == "handled", attribute("failed_count")),
        "steal_count": F.when((kind == "lock_granted") & has_attribute("stolen"), one),
        "moved_queue_count": F.when(kind == "rebalanced", moves),
        "conflict_count": F.when(disagree, one),
    }
    return {
        name: F.coalesce(columns[name].cast("bigint"), F.lit(0).cast("bigint")) for name in SUMS
    }


def _gauges() -> dict[str, Column]:
    """Return the other measures of an event; null if its kind does not have them."""
    lag, committed = F.col("kind") == "queue_lag", F.col("kind") == "committed"
    unfinished = F.try_add("committed_offset", attribute("acked_beyond_count"))
    waiting = F.greatest(F.try_subtract("next_offset", unfinished), F.lit(0))
    in_flight = F.greatest(F.try_subtract("delivered_offset", unfinished), F.lit(0))
    return {
        "lag_time": F.when(lag, F.col("at")),
        "lag": F.when(lag, waiting),
        "lag_ms": F.when(lag, F.col("duration_ms")),
        "in_flight": F.when(lag, in_flight),
        "lag_max": F.when(lag, waiting),
        "lag_ms_max": F.when(lag, F.col("duration_ms")),
        "first_commit_time": F.when(committed, F.col("at")),
        "first_committed_offset": F.when(committed, F.col("committed_offset")),
        "last_commit_time": F.when(committed, F.col("at")),
        "committed_offset": F.when(committed, F.col("committed_offset")),
        "hand_over_ms": F.when(F.col("kind") == "handed_over", F.array("duration_ms")),
    }
