"""Latency sketches by operation, group and topic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baton.common.v1 import queue_pb2
from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._core.log_buckets import LogBuckets

WAITING_MAX = 4_096
"""Single latencies that are collected before they are added to the sketch together."""


class LatencyKey(NamedTuple):
    """Key of a sketch: operation, group and topic."""

    operation: pb.Latency.Operation.ValueType
    group: str = ""
    topic: str = ""


class LatencySketches:
    """Collects latencies in microseconds; `events` returns and resets them."""

    def __init__(self) -> None:
        self._waiting: dict[LatencyKey, list[int]] = {}
        self._sketches: dict[LatencyKey, LogBuckets] = {}

    def add(self, what: LatencyKey, us: int) -> None:
        """Add one latency."""
        waiting = self._waiting.get(what)
        if waiting is None:
            waiting = self._waiting[what] = []
        waiting.append(us)
        if len(waiting) >= WAITING_MAX:
            self._fold(what)

    def add_all(self, what: LatencyKey, us: Sequence[int]) -> None:
        """Add several latencies."""
        self._waiting.setdefault(what, []).extend(us)
        if len(self._waiting[what]) >= WAITING_MAX:
            self._fold(what)

    def forget(self, operation: pb.Latency.Operation.ValueType) -> None:
        """Drop the latencies of one operation."""
        for what in [one for one in (*self._waiting, *self._sketches) if one[0] == operation]:
            self._waiting.pop(what, None)
            self._sketches.pop(what, None)

    def events(self) -> Iterator[pb.MetricEvent]:
        """Yield one event for each key with latencies since the last call."""
        for what in list(self._waiting):
            self._fold(what)
        sketches, self._sketches, self._waiting = self._sketches, {}, {}
        for what, sketch in sketches.items():
            if len(sketch):
                first_bucket, counts, total = sketch.parts()
                event = pb.MetricEvent(
                    latency=pb.Latency(
                        operation=what.operation,
                        us=pb.LogBuckets(first_bucket=first_bucket, counts=counts, sum=total),
                    )
                )
                if what.group or what.topic:
                    queue = queue_pb2.QueueRef(topic=what.topic)
                    event.queue.CopyFrom(queue_pb2.GroupQueue(group=what.group, queue=queue))
                yield event

    def _fold(self, what: LatencyKey) -> None:
        waiting = self._waiting[what]
        self._sketches.setdefault(what, LogBuckets()).add(waiting)
        waiting.clear()
