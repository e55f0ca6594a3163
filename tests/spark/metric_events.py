"""Metric events as services publish them, and the rows that Spark reads from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.testing import assertDataFrameEqual

from baton.common.v1 import queue_pb2
from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._core.queues import QueueRef
from batonspark.decode import METRICS
from batonspark.metric_rows import MetricMessages, metric_rows
from batonspark.schemas import METRICS as METRICS_DDL

NOON = 1_767_268_800_000
"""2026-01-01 12:00 UTC, in Unix milliseconds."""


def event(
    kind: str,
    at_ms: int,
    *,
    group: str = "",
    topic: str = "",
    queue_id: int = 0,
    **fields: Any,
) -> pb.MetricEvent:
    """Return an event `at_ms` after noon; `fields` are the fields of its kind."""
    queue = queue_pb2.GroupQueue(group=group)
    if topic:
        queue.queue.CopyFrom(queue_pb2.QueueRef(topic=topic, broker="broker-0", queue_id=queue_id))
    metric_event = pb.MetricEvent(unix_ms=NOON + at_ms)
    if group or topic:
        metric_event.queue.CopyFrom(queue)
    kind_type = pb.MetricEvent.DESCRIPTOR.fields_by_name[kind].message_type
    assert kind_type is not None
    getattr(metric_event, kind).CopyFrom(getattr(pb, kind_type.name)(**fields))
    return metric_event


def batch(
    events: Iterable[pb.MetricEvent], seq: int = 1, source: str = "storage/broker-0"
) -> pb.MetricBatch:
    """Return a batch, the body of one message."""
    return pb.MetricBatch(source=source, seq=seq, incarnation_id=7, events=events, vocabulary=1)


def rows(spark: SparkSession, events: Sequence[pb.MetricEvent]) -> DataFrame:
    """Return rows of METRICS whose store time is the time of the event."""
    batches = [batch([one], seq) for seq, one in enumerate(events, 1)]
    decoded = MetricMessages(
        QueueRef("BATON_SYS_METRICS", "broker-0", 0),
        [one.SerializeToString() for one in batches],
        np.arange(len(batches)),
        np.array([one.unix_ms for one in events]),
    )
    table = pa.Table.from_batches([metric_rows(decoded, METRICS)])
    return spark.createDataFrame(table, METRICS_DDL)


def assert_same_rows(actual: DataFrame, expected: DataFrame) -> None:
    """Assert that both have the same columns and rows, in any order; nullability is ignored."""
    assert sorted(actual.columns) == sorted(expected.columns)
    rows = expected.select(*actual.columns).collect()
    wanted = actual.sparkSession.createDataFrame(rows, actual.schema)
    assertDataFrameEqual(actual, wanted)
