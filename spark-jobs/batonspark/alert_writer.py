"""Write alerts to their table, to their topic, and to Prometheus.

A micro-batch that is repeated after a crash has the same rows: the table recognizes its number,
and storage recognizes its messages. Gauges are set, not incremented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import deltalake
import pyarrow as pa
from prometheus_client import CollectorRegistry, Gauge
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from batonmq._common.clock import Clock
from batonspark.tables import ALERTS, Warehouse

LABELS = (
    "rule", "severity", "detail", "consumer_group", "topic", "broker", "queue_id", "source",
    "operation",
)  # fmt: skip
_TELLING = ("rule", "severity", "consumer_group", "topic")


class AlertGauges:
    """The metric `baton_alert{...}`: 1 for each firing alert; a resolved alert has no series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauge = Gauge(
            "baton_alert", "1 while the alert is firing.", LABELS, registry=registry
        )

    def set(self, alerts: Iterable[Mapping[str, Any]]) -> None:
        """Apply alert changes, oldest first."""
        for alert in alerts:
            values = ["" if (value := alert[name]) is None else str(value) for name in LABELS]
            if alert["state"] == "FIRING":
                self._gauge.labels(*values).set(1)
            else:  # the severity of its rule may have changed since it fired
                same = dict(zip(LABELS, values, strict=True))
                del same["severity"]
                self._gauge.remove_by_labels(same)


@dataclass(frozen=True, slots=True)
class AlertWriter:
    """Writes the alerts of each micro-batch.

    Attributes:
        query_id: Returns the id of the streaming query.
        topic: Options of `format("baton")`; None to send no messages.
    """

    warehouse: Warehouse
    query_id: Callable[[], str]
    topic: Mapping[str, str] | None
    gauges: AlertGauges

    def restore(self) -> None:
        """Set the gauges of the alerts that are firing according to the table."""
        self.gauges.set(_open(self._all()))

    def close_all(self, session: SparkSession) -> bool:
        """Resolve every firing alert, because its state is lost; False if the table is empty."""
        rows = self._all()
        unix_ms = Clock().unix_ms()
        now = datetime.fromtimestamp(unix_ms / 1000, UTC)
        ends = {"state": "RESOLVED", "time": now, "date": now.date(), "reason": "STATE_LOST"}
        closed = [{**row, **ends} for row in _open(rows)]
        if closed:
            schema = to_arrow_schema(ALERTS.schema, timezone="UTC")
            found = pa.Table.from_pylist(closed, schema)
            self._put(session, found, f"closed/{unix_ms}", 0)
        return bool(rows)

    def write(self, alerts: DataFrame, batch_id: int) -> None:
        """Write the alerts of a micro-batch to the table, the topic and the gauges."""
        found = alerts.orderBy("time", "alert_id", "state").toArrow()
        if found.num_rows:
            self._put(alerts.sparkSession, found, self.query_id(), batch_id)
            self.gauges.set(found.to_pylist())

    def _put(self, session: SparkSession, found: pa.Table, app_id: str, number: int) -> None:
        rows = session.createDataFrame(found, ALERTS.schema).coalesce(1)
        table = rows.write.format("batondelta").mode("append").option("partitionBy", "date")
        table = table.option("txnAppId", app_id).option("txnVersion", str(number))
        table.save(self.warehouse.table(ALERTS))
        if self.topic is not None:
            sent = messages(rows).write.format("baton").mode("append").options(**self.topic)
            sent.option("writeId", f"{app_id}/{number}").save()

    def _all(self) -> list[dict[str, Any]]:
        table = deltalake.DeltaTable(self.warehouse.table(ALERTS))
        rows: list[dict[str, Any]] = pa.table(table.scan().read_all()).to_pylist()
        return rows


def _open(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the alerts that are firing."""
    resolved = {row["alert_id"] for row in rows if row["state"] == "RESOLVED"}
    return [row for row in rows if row["alert_id"] not in resolved]


def messages(alerts: DataFrame) -> DataFrame:
    """Return messages of alerts: JSON with the alert's id as key and its state as tag."""
    body = F.to_json(F.struct(*(name for name in alerts.columns if name != "date")))
    properties = F.map_filter(
        F.create_map(*(each for name in _TELLING for each in (F.lit(name), F.col(name)))),
        lambda _, value: value.isNotNull(),
    )
    return alerts.select(
        body.alias("body"),
        F.col("alert_id").alias("key"),
        F.col("state").alias("tag"),
        properties.alias("properties"),
    )
