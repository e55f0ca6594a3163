"""The streaming queries, each from its source to its sink."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from batonspark import alerts, bronze, rollup_writer
from batonspark.alert_rules import load_rules
from batonspark.alert_writer import AlertGauges, AlertWriter
from batonspark.cluster import ClusterClient
from batonspark.event_columns import event_time
from batonspark.options import METRICS_TOPIC, read_options
from batonspark.read_plan import stored_extents
from batonspark.settings import JobSettings
from batonspark.sink_delta import read_delta
from batonspark.tables import ALERTS, BRONZE, LATENCY, ROLLUP, Warehouse

ROLLUP_VERSION = 1
"""Version of the checkpoint of rollup; a new version recomputes the windows from bronze."""


@dataclass(frozen=True, slots=True)
class QueryContext:
    """Session, settings and gauges that a query uses."""

    session: SparkSession
    settings: JobSettings
    gauges: AlertGauges

    @property
    def warehouse(self) -> Warehouse:
        """The folder of tables and checkpoints."""
        return Warehouse(str(Path(self.settings.data_dir).absolute()))


def start_bronze(context: QueryContext) -> StreamingQuery:
    """Start the query `bronze`: events from the cluster to the table `bronze`."""
    settings, warehouse = context.settings, context.warehouse
    checkpoint = warehouse.checkpoint("bronze", bronze.STATE_VERSION)
    warehouse.ensure(BRONZE)
    source = {**settings.connection_options(), "topic": METRICS_TOPIC}
    beginning = _start_options(
        checkpoint, lambda: _after(read_delta(context.session, warehouse.table(BRONZE)), source)
    )
    options = {
        **source,
        **beginning,
        "readFrom": settings.read_from,
        "failOnDataLoss": str(settings.fail_on_data_loss).lower(),
        "maxRowsPerTrigger": str(settings.messages_per_trigger),
    }
    messages = context.session.readStream.format("baton").options(**options).load()
    writer = bronze.bronze(messages).writeStream.format("batondelta")
    writer = writer.options(view="metrics", partitionBy="date", path=warehouse.table(BRONZE))
    return _start(writer, "bronze", checkpoint, settings)


def start_rollup(context: QueryContext) -> StreamingQuery:
    """Start the query `rollup`: events of `bronze` to the tables `rollup` and `latency`."""
    settings, warehouse = context.settings, context.warehouse
    checkpoint = warehouse.checkpoint("rollup", ROLLUP_VERSION)
    warehouse.ensure(BRONZE, ROLLUP, LATENCY)
    beginning = _start_options(checkpoint, lambda: rollup_writer.delete_windows(warehouse))
    events = _events(context, rollup_writer.COLUMNS, {})
    if first_day := beginning.get("first_day"):
        events = events.where(F.to_date(event_time()) >= F.lit(first_day).cast("date"))
    windows = rollup_writer.WindowWriter(warehouse, lambda: _query_id(checkpoint))
    writer = events.writeStream.foreachBatch(windows.write)
    return _start(writer, "rollup", checkpoint, settings)


def start_alerts(context: QueryContext) -> StreamingQuery:
    """Start the query `alerts`: events of `bronze` to the table `alerts`, the topic and gauges.

    Raises:
        ConfigError: the rules are not valid.
    """
    settings, warehouse = context.settings, context.warehouse
    checkpoint = warehouse.checkpoint("alerts", alerts.STATE_VERSION)
    warehouse.ensure(BRONZE, ALERTS)
    book = load_rules(Path(settings.rules_file) if settings.rules_file else None)
    topic = (
        {**settings.connection_options(), "topic": settings.alerts_topic}
        if settings.alerts_topic
        else None
    )
    writes = AlertWriter(warehouse, lambda: _query_id(checkpoint), topic, context.gauges)
    beginning = _start_options(
        checkpoint, lambda: _after_alerts(warehouse, writes, context.session)
    )
    writes.restore()
    events = _events(context, alerts.COLUMNS, beginning)
    found = alerts.alerts(alerts.signals(events, book), book, settings.watermark_s)
    writer = found.writeStream.foreachBatch(writes.write)
    return _start(writer, "alerts", checkpoint, settings)


QUERIES: Mapping[str, Callable[[QueryContext], StreamingQuery]] = {
    "bronze": start_bronze,
    "rollup": start_rollup,
    "alerts": start_alerts,
}


def _events(context: QueryContext, columns: str, options: Mapping[str, str]) -> DataFrame:
    reader = context.session.readStream.format("batondelta").options(**options)
    reader = reader.option("columns", columns)
    reader = reader.option("maxRowsPerTrigger", str(context.settings.rows_per_trigger))
    return reader.load(context.warehouse.table(BRONZE))


def _start(
    writer: DataStreamWriter, name: str, checkpoint: str, settings: JobSettings
) -> StreamingQuery:
    named = writer.queryName(name).option("checkpointLocation", checkpoint)
    if settings.available_now:
        return named.trigger(availableNow=True).start()
    return named.trigger(processingTime=f"{settings.trigger_ms} milliseconds").start()


def _start_options(checkpoint: str, decide: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
    """Return the options of the query's start: decided once and kept with the checkpoint.

    Spark asks again if its first micro-batch was interrupted, and must get the same answer.
    """
    kept = Path(checkpoint, "beginning.json")
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    options = decide()
    kept.parent.mkdir(parents=True, exist_ok=True)
    written = kept.with_suffix(".written")
    written.write_text(json.dumps(options))
    written.replace(kept)
    return options


def _query_id(checkpoint: str) -> str:
    """Return the id of the query of a checkpoint, after its first start."""
    return str(json.loads(Path(checkpoint, "metadata").read_text())["id"])


def _after_alerts(
    warehouse: Warehouse, writes: AlertWriter, session: SparkSession
) -> Mapping[str, str]:
    """Return options that skip events which raised alerts before, if the table has alerts."""
    if not writes.close_all(session):
        return {}
    newest = deltalake.DeltaTable(warehouse.table(BRONZE)).version()
    return {"startingVersion": str(newest + 1)}


def _after(rows: DataFrame, source: Mapping[str, str]) -> Mapping[str, str]:
    """Return options that continue behind the rows of bronze, if it has rows.

    Queues that the topic no longer has, as those of a removed broker, are left out.
    """
    lost = F.when(F.col("kind") == "data_loss", F.col("next_offset"))
    end = F.max(F.coalesce(lost, F.col("sys_offset") + 1))
    found = rows.groupBy("sys_broker", "sys_queue_id").agg(end.alias("end")).collect()
    if not found:
        return {}
    options = read_options(source)
    with ClusterClient(options.connection) as cluster:
        known = stored_extents(cluster, options)
    ends = {f"{row.sys_broker}/{row.sys_queue_id}": row.end for row in found}
    kept = {key: end for key, end in sorted(ends.items()) if key in known}
    return {"startingOffsets": json.dumps(kept)}
