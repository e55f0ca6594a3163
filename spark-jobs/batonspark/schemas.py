"""Columns of what jobs read and write. A column is never given another meaning, but another name.

Types are Spark's DDL. Times are UTC.
"""

from __future__ import annotations

MESSAGES = """
    topic STRING, broker STRING, queue_id INT, offset BIGINT,
    key STRING, tag STRING, properties MAP<STRING, STRING>, body BINARY, store_time TIMESTAMP
"""
"""Rows of `format("baton")`: one message each.

`key` has the keys of the message with a space between. `key` and `tag` are null where there is
none, `properties` is empty. A row whose `body` is null is no message: it stands for the messages
from its `offset` on that were no longer kept, and the property `baton.lost_count` says how many.
There is none unless `failOnDataLoss` is false.
"""

METRICS_VERSION = 1
METRICS = """
    source STRING, producer_id STRING, seq BIGINT, event_index INT, vocabulary INT,
    kind STRING, time TIMESTAMP,
    topic STRING, consumer_group STRING, broker STRING, queue_id INT,
    client_id STRING, previous_client_id STRING, token BIGINT, generation BIGINT,
    first_offset BIGINT, next_offset BIGINT, committed_offset BIGINT, delivered_offset BIGINT,
    count BIGINT, byte_count BIGINT, filtered_count BIGINT, redelivered_count BIGINT,
    reason STRING, duration_ms BIGINT,
    operation STRING, first_bucket INT, buckets ARRAY<BIGINT>, value_sum BIGINT,
    runs ARRAY<BIGINT>, attrs MAP<STRING, STRING>, payload BINARY,
    sys_broker STRING, sys_queue_id INT, sys_offset BIGINT, store_time TIMESTAMP
"""
"""Rows of `format("baton")` with `view` `metrics`: one event of a MetricBatch each.

`producer_id` is the source with its incarnation; (producer_id, seq, event_index) names an event,
also when its batch was stored twice; (sys_broker, sys_queue_id, sys_offset, event_index) names it
where it lies. `kind` is the name of the field of the event's oneof, or `field_N` of a kind that is
not known here, whose bytes are then in `payload`. Which kind fills which columns is in
batonmq/_core/metric_columns.py; what has no column of its own is in `attrs`.

Three kinds are no events; their `event_index` is -1. `dropped` has in `count` how many events its
source has dropped so far. `unreadable` is a message that is no MetricBatch, with its body in
`payload`; what is no event in a batch is of this kind, too. `data_loss` stands for the messages of
the metrics topic that were no longer kept: [first_offset, next_offset), `count` of them, in topic,
broker and queue_id; there is none unless `failOnDataLoss` is false. It, and a message that is no
MetricBatch, have `seq` = `sys_offset`, and the queue in `producer_id`.
"""
