"""Columns that jobs read and write, as Spark DDL. Times are UTC.

The meaning of a column never changes: a new meaning gets a new name.
"""

from __future__ import annotations

MESSAGES = """
    topic STRING, broker STRING, queue_id INT, offset BIGINT,
    key STRING, tag STRING, properties MAP<STRING, STRING>, body BINARY, store_time TIMESTAMP
"""
"""Rows of `format("baton")`: one message each.

`key` has the keys of the message, separated by spaces. `key` and `tag` are null, and `properties`
is empty, if the message has none. A row with a null `body` is not a message: it represents removed
messages from its `offset` on, and the property `baton.lost_count` is their number. Such rows exist
only if `failOnDataLoss` is false.
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

`producer_id` is the source with its incarnation. (producer_id, seq, event_index) identifies an
event, even if its batch was stored twice; (sys_broker, sys_queue_id, sys_offset, event_index) is
its position. `kind` is the name of the field of the event's oneof, or `field_N` for an unknown
kind, whose bytes are in `payload`. `batonspark.metric_columns` has the columns of each kind; a
value without a column is in `attrs`.

Three kinds are not events; their `event_index` is -1. `dropped`: `count` is the number of events
that the source has dropped so far. `unreadable`: a message that is not a MetricBatch, or a part of
a batch that is not an event, with its bytes in `payload`. `data_loss`: removed messages of the
metrics topic: [first_offset, next_offset), `count` of them, in topic, broker and queue_id; it
exists only if `failOnDataLoss` is false. It, and a message that is not a MetricBatch, have
`seq` = `sys_offset` and the queue in `producer_id`.
"""
