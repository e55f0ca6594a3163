"""Processor time to encode and to decode metric events.

The size of a batch decides: a service with few queues publishes about 20 events a second, and one
under load fills batches of 256 KiB, about 2,000 events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import process_time

import numpy as np

from baton.metrics.v1.metrics_service_pb2 import Latency, MetricBatch, MetricEvent
from batonmq._core.names import METRICS_TOPIC
from batonmq._core.queues import QueueRef
from batonspark import encoded_events
from batonspark.decode import METRICS
from batonspark.metric_rows import MetricMessages, metric_rows
from bench.figures import Figure, Goal, figure
from bench.setup import Setup

EVENTS = 10_000
BATCH_EVENTS = (20, 200, 2_000)
QUEUE = QueueRef(METRICS_TOPIC, "broker-0", 0)
STORE_UNIX_MS = 1_800_000_000_000


async def events(setup: Setup) -> list[Figure]:
    """Measure 10,000 events in batches of three sizes."""
    rounds = setup.sized(9, 1)
    figures: list[Figure] = []
    for size in BATCH_EVENTS:
        setup.say(f"batches of {size}")
        figures += _of_batches(sample_batches(EVENTS, size), size, rounds)
    return figures


def _of_batches(batches: Sequence[MetricBatch], size: int, rounds: int) -> list[Figure]:
    def encoded() -> list[bytes]:
        return [each.SerializeToString() for each in batches]

    bodies = encoded()
    return [
        figure(
            f"encode metric events, {size:,} a batch",
            _us_per_event(encoded, rounds),
            "us/event",
            Goal(value_max=1),
        ),
        figure(
            f"decode metric events as columns against one by one, {size:,} a batch",
            _us_per_event(lambda: _decode(bodies), rounds),
            "us/event",
            Goal(ratio_max=0.5),
            reference=_us_per_event(lambda: _decode_one_by_one(bodies), rounds),
        ),
    ]


def _decode(bodies: Sequence[bytes]) -> None:
    count = len(bodies)
    times = np.full(count, STORE_UNIX_MS)
    rows = metric_rows(MetricMessages(QUEUE, bodies, np.arange(count), times), METRICS)
    assert rows.num_rows == EVENTS, rows.num_rows


def _decode_one_by_one(bodies: Sequence[bytes]) -> None:
    few, encoded_events.FEW = encoded_events.FEW, EVENTS
    try:
        _decode(bodies)
    finally:
        encoded_events.FEW = few


def _us_per_event(work: Callable[[], object], rounds: int) -> float:
    """Return the processor time of the fastest of several rounds after a first one."""
    work()
    spent: list[float] = []
    for _ in range(rounds):
        begin = process_time()
        work()
        spent.append(process_time() - begin)
    return min(spent) / EVENTS * 1e6


def sample_batches(count: int, size: int) -> list[MetricBatch]:
    """Return `count` events of one source in batches of `size` events."""
    return [
        MetricBatch(
            source="storage/broker-0",
            seq=first // size,
            incarnation_id=1,
            vocabulary=1,
            events=map(_event, range(first, first + size)),
        )
        for first in range(0, count, size)
    ]


def _event(number: int) -> MetricEvent:
    """Return an event; the kinds have about the shares that they have under load."""
    event = MetricEvent(unix_ms=1_800_000_000_000 + number)
    event.queue.group = f"group-{number % 5}"
    event.queue.queue.topic = f"orders-{number % 3}"
    event.queue.queue.broker = "broker-0"
    event.queue.queue.queue_id = number % 8
    kind, client = number % 10, f"client-{number % 20}"
    if kind < 4:
        delivered = event.delivered
        delivered.range.first_offset, delivered.range.next_offset = number, number + 10
        delivered.token, delivered.client_id = number % 50, client
        delivered.message_count, delivered.byte_count = 10, 10_000
    elif kind < 7:
        event.committed.committed_offset, event.committed.delivered_offset = number, number + 10
        event.committed.token, event.committed.client_id = number % 50, client
    elif kind < 9:
        event.appended.message_count, event.appended.byte_count = 100, 100_000
        event.appended.next_offset = number
    else:
        event.latency.operation = Latency.OPERATION_APPEND
        event.latency.us.first_bucket, event.latency.us.sum = 60, 100_000
        event.latency.us.counts.extend(range(1, 20))
    return event
