"""Progress of the streaming queries, as Prometheus metrics and log lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge
from pyspark.sql.streaming.listener import StreamingQueryListener

log = logging.getLogger(__name__)

_GAUGES = {
    "running": "1 while the query runs, 0 after it has ended.",
    "batch_id": "Number of the last completed micro-batch.",
    "input_rows": "Rows in the last micro-batch.",
    "input_rows_per_second": "Rows that arrived per second.",
    "processed_rows_per_second": "Rows processed per second during the last micro-batch.",
    "batch_duration_seconds": "Duration of the last micro-batch, in seconds.",
    "backlog": "Messages of the topic, or commits of the table, that are not read yet.",
    "state_rows": "Rows in the state of the query.",
    "state_bytes": "Memory used by the state of the query, in bytes.",
    "late_rows": "Rows of the last micro-batch that were ignored because they were too late.",
    "progress_time_seconds": "Time of the last progress report, in Unix seconds.",
}


class ProgressListener(StreamingQueryListener):
    """Sets the gauges `baton_spark_<name>{query=...}` and logs a line for each micro-batch."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._names: dict[str, str] = {}
        self._gauges = {
            name: Gauge(f"baton_spark_{name}", text, ["query"], registry=registry)
            for name, text in _GAUGES.items()
        }

    def onQueryStarted(self, event: Any) -> None:
        """See StreamingQueryListener."""
        name = self._names[str(event.runId)] = event.name or str(event.id)
        self._gauges["running"].labels(name).set(1)
        log.info("query started query=%s id=%s", name, event.id)

    def onQueryProgress(self, event: Any) -> None:
        """See StreamingQueryListener."""
        progress = json.loads(event.progress.json)
        name, values = progress["name"] or progress["id"], gauge_values(progress)
        for gauge, value in values.items():
            self._gauges[gauge].labels(name).set(value)
        self._gauges["progress_time_seconds"].labels(name).set_to_current_time()
        log.info(
            "query progress query=%s batch=%d rows=%d rows_per_s=%.0f backlog=%d duration_ms=%.0f",
            name,
            values["batch_id"],
            values["input_rows"],
            values["processed_rows_per_second"],
            values["backlog"],
            values["batch_duration_seconds"] * 1000,
        )

    def onQueryIdle(self, event: Any) -> None:
        """See StreamingQueryListener."""

    def onQueryTerminated(self, event: Any) -> None:
        """See StreamingQueryListener."""
        name = self._names.pop(str(event.runId), str(event.id))
        self._gauges["running"].labels(name).set(0)
        if event.exception:
            log.error("query failed query=%s error=%s", name, event.exception.splitlines()[0])
        else:
            log.info("query ended query=%s", name)


def gauge_values(progress: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of the gauges, from the JSON of a StreamingQueryProgress."""
    operators = progress.get("stateOperators", ())
    return {
        "batch_id": progress["batchId"],
        "input_rows": progress["numInputRows"],
        "input_rows_per_second": _number(progress.get("inputRowsPerSecond")),
        "processed_rows_per_second": _number(progress.get("processedRowsPerSecond")),
        "batch_duration_seconds": progress.get("durationMs", {}).get("triggerExecution", 0) / 1000,
        "backlog": sum(_behind(source) for source in progress.get("sources", ())),
        "state_rows": sum(each["numRowsTotal"] for each in operators),
        "state_bytes": sum(each["memoryUsedBytes"] for each in operators),
        "late_rows": sum(each["numRowsDroppedByWatermark"] for each in operators),
    }


def _behind(source: Mapping[str, Any]) -> int:
    """Return the distance from the end of a source's micro-batch to its newest offsets."""
    latest, end = _offsets(source.get("latestOffset")), _offsets(source.get("endOffset"))
    return sum(max(0, value - end.get(key, 0)) for key, value in latest.items())


def _offsets(reported: Any) -> dict[str, int]:
    is_json = isinstance(reported, str) and reported.startswith("{")
    offsets = json.loads(reported) if is_json else reported
    if not isinstance(offsets, Mapping):
        return {}
    return {key: int(value) for key, value in offsets.items() if key != "topic_id"}


def _number(rate: Any) -> float:
    """Return a rate as a number; Spark reports text such as NaN if no time was measured."""
    return float(rate) if isinstance(rate, int | float) else 0.0
