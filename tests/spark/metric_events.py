"""Metric events for tests, as services tell them, and rows of them as Spark reads them."""

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
    """An event `at_ms` after noon; `fields` are those of its kind."""
    queue = queue_pb2.GroupQueue(group=group)
    if topic:
        queue.queue.CopyFrom(queue_pb2.QueueRef(topic=topic, broker="broker-0", queue_id=queue_id))
    told = pb.MetricEvent(unix_ms=NOON + at_ms)
    if group or topic:
        told.queue.CopyFrom(queue)
    kind_type = pb.MetricEvent.DESCRIPTOR.fields_by_name[kind].message_type
    assert kind_type is not None
    getattr(told, kind).CopyFrom(getattr(pb, kind_type.name)(**fields))
    return told


def batch(
    events: Iterable[pb.MetricEvent], seq: int = 1, source: str = "storage/broker-0"
) -> pb.MetricBatch:
    """What one message holds."""
    return pb.MetricBatch(source=source, seq=seq, incarnation_id=7, events=events, vocabulary=1)


def rows(spark: SparkSession, events: Sequence[pb.MetricEvent]) -> DataFrame:
    """Rows of METRICS; stored when they happened."""
    told = [batch([one], seq) for seq, one in enumerate(events, 1)]
    found = MetricMessages(
        QueueRef("BATON_SYS_METRICS", "broker-0", 0),
        [one.SerializeToString() for one in told],
        np.arange(len(told)),
        np.array([one.unix_ms for one in events]),
    )
    table = pa.Table.from_batches([metric_rows(found, METRICS)])
    return spark.createDataFrame(table, METRICS_DDL)


def assert_same_rows(found: DataFrame, expected: DataFrame) -> None:
    """Both have the same columns and rows, both in any order; what may be null does not matter."""
    assert sorted(found.columns) == sorted(expected.columns)
    rows = expected.select(*found.columns).collect()
    wanted = found.sparkSession.createDataFrame(rows, found.schema)
    assertDataFrameEqual(found, wanted)
