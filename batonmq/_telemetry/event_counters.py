"""Counters of clients for the metrics stream, gathered about once a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from baton.common.v1 import queue_pb2
from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._core.names import METRICS_TOPIC
from batonmq._core.retries import HandlingFailure
from batonmq._telemetry.event_hub import EventHub
from batonmq._telemetry.latency_sketches import LatencyKey, LatencySketches


class ConsumerEventCounter:
    """Counts messages and latencies of one consumer."""

    def __init__(self, hub: EventHub, group: str, client_id: str, clock: Clock) -> None:
        self._group, self._client_id, self._clock = group, client_id, clock
        self._latencies = LatencySketches()
        self._handled: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._retried: Counter[str] = Counter()
        self._dead: Counter[str] = Counter()
        hub.gatherers.append(self._events)

    def begun(self, topic: str, store_unix_ms: Sequence[int], ago_s: Sequence[float] = ()) -> None:
        """Add the end-to-end latencies of messages, from storing to the start of a handler.

        Args:
            ago_s: How long ago the handler of each message was started; empty for now.
        """
        now_ms = self._clock.unix_ms()
        what = LatencyKey(pb.Latency.OPERATION_END_TO_END, self._group, topic)
        latencies_us = [(now_ms - ms) * 1_000 for ms in store_unix_ms]
        if ago_s:
            latencies_us = [us - int(1e6 * s) for us, s in zip(latencies_us, ago_s, strict=True)]
        self._latencies.add_all(what, [max(0, us) for us in latencies_us])

    def handled(
        self, topic: str, count: int, failures: Iterable[HandlingFailure | None], seconds: float
    ) -> None:
        """Count a handler call that has ended."""
        failed = sum(one is not None for one in failures)
        what = LatencyKey(pb.Latency.OPERATION_HANDLE, self._group, topic)
        self._latencies.add(what, int(seconds * 1e6))
        self._handled[topic] += count - failed
        self._failed[topic] += failed

    def handled_each(self, topic: str, seconds: Sequence[float]) -> None:
        """Count calls for one message each that have succeeded."""
        what = LatencyKey(pb.Latency.OPERATION_HANDLE, self._group, topic)
        self._latencies.add_all(what, [int(one * 1e6) for one in seconds])
        self._handled[topic] += len(seconds)

    def retried(self, topic: str) -> None:
        """Count a message that is handled again."""
        self._retried[topic] += 1

    def dead(self, topic: str) -> None:
        """Count a message that was sent to the dead-letter topic."""
        self._dead[topic] += 1

    def _events(self) -> Iterator[pb.MetricEvent]:
        client_id = self._client_id
        handled, self._handled = self._handled, Counter()
        failed, self._failed = self._failed, Counter()
        for topic in handled.keys() | failed.keys():
            counts = pb.Handled(
                client_id=client_id, message_count=handled[topic], failed_count=failed[topic]
            )
            yield pb.MetricEvent(queue=_of(self._group, topic), handled=counts)
        retried, self._retried = self._retried, Counter()
        for topic, count in retried.items():
            retry = pb.Retried(client_id=client_id, message_count=count)
            yield pb.MetricEvent(queue=_of(self._group, topic), retried=retry)
        dead, self._dead = self._dead, Counter()
        for topic, count in dead.items():
            dead_lettered = pb.DeadLettered(client_id=client_id, message_count=count)
            yield pb.MetricEvent(queue=_of(self._group, topic), dead_lettered=dead_lettered)
        yield from self._latencies.events()


class ProducerEventCounter:
    """Counts messages and latencies of one producer."""

    def __init__(self, hub: EventHub, client_id: str) -> None:
        self._client_id = client_id
        self._latencies = LatencySketches()
        self._sent: dict[str, pb.Sent] = {}
        hub.gatherers.append(self._events)

    def settled(self, topic: str, size: tuple[int, int], took_ms: int, *, stored: bool) -> None:
        """Count a batch that has its outcome; `size` is its number of messages and its bytes."""
        if topic == METRICS_TOPIC:
            return
        count, bytes_count = size
        sent = self._sent.setdefault(topic, pb.Sent(client_id=self._client_id))
        if stored:
            sent.message_count += count
            sent.byte_count += bytes_count
        else:
            sent.failed_count += count
        self._latencies.add(LatencyKey(pb.Latency.OPERATION_SEND, "", topic), took_ms * 1_000)

    def _events(self) -> Iterator[pb.MetricEvent]:
        sent, self._sent = self._sent, {}
        for topic, counts in sent.items():
            yield pb.MetricEvent(queue=_of("", topic), sent=counts)
        yield from self._latencies.events()


def _of(group: str, topic: str) -> queue_pb2.GroupQueue:
    return queue_pb2.GroupQueue(group=group, queue=queue_pb2.QueueRef(topic=topic))
