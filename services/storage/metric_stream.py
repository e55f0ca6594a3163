"""The live metric stream of a storage node: appends, deliveries, latencies and disk usage.

Events are collected about once a second. The metrics topic itself is left out, and so are syncs
that only it has caused. Otherwise each event would cause another one, even on an idle cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from baton.common.v1 import queue_pb2
from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._core.names import METRICS_TOPIC
from batonmq._telemetry.event_hub import EventHub
from batonmq._telemetry.latency_sketches import LatencyKey, LatencySketches
from batonmq_server.storage.core.delivered_range import DeliveredRange, PullDelivery, ReportedRange
from batonmq_server.storage.core.queue_reader import ReadResult
from batonmq_server.storage.core.retention import DiskUsage
from batonmq_server.storage.long_polls import QueueOwner
from batonmq_server.storage.transaction_tally import TransactionTally

VOLUME_INTERVAL_S = 10.0
APPEND = LatencyKey(pb.Latency.OPERATION_APPEND)
FSYNC = LatencyKey(pb.Latency.OPERATION_FSYNC)
REPLICATION = LatencyKey(pb.Latency.OPERATION_REPLICATION)
PULL = LatencyKey(pb.Latency.OPERATION_PULL)


class StorageMetricStream:
    """The metric events of one process. Callers check `hub.watched` before they add events.

    Args:
        broker: Broker name: the replica set, or a node without replicas.

    Attributes:
        transactions: Counts what becomes of transactions.
        usage: Returns the disk usage; zero before the first measurement.
    """

    def __init__(self, hub: EventHub, broker: str) -> None:
        self.hub, self._broker = hub, broker
        self.usage: Callable[[], DiskUsage] = lambda: DiskUsage(0, 0)
        self._appended: dict[tuple[str, int], tuple[int, int, int]] = {}
        self._delivered: dict[tuple[QueueOwner, str], DeliveredRange] = {}
        self._closed: list[tuple[QueueOwner, str, DeliveredRange]] = []
        self.transactions = TransactionTally(hub)
        self._latencies = LatencySketches()
        self._volume_due_s = 0.0
        hub.gatherers.append(self._events)

    def now_s(self) -> float:
        """Return the loop's time in seconds: the start time for `observe_since`."""
        return asyncio.get_running_loop().time()

    def observe_since(self, what: LatencyKey, begin_s: float) -> None:
        """Record the latency of an operation that began at `begin_s` and has ended now."""
        self.observe_us(what, int((self.now_s() - begin_s) * 1e6))

    def observe_us(self, what: LatencyKey, us: int) -> None:
        """Record the latency of an operation, in microseconds."""
        if self.hub.watched:
            self._latencies.add(what, us)

    def appended(self, topic: str, queue_id: int, sums: tuple[int, int, int]) -> None:
        """Record that a queue has grown; `sums` are messages, bytes and the new next offset."""
        if topic == METRICS_TOPIC:
            return
        count, size, next_offset = sums
        before = self._appended.get((topic, queue_id), (0, 0, 0))
        self._appended[topic, queue_id] = (
            before[0] + count,
            before[1] + size,
            max(before[2], next_offset),
        )

    def delivered(
        self,
        owner: QueueOwner,
        client_id: str,
        offset: int,
        reading: ReadResult,
        redelivered: Sequence[queue_pb2.OffsetRange],
    ) -> None:
        """Record that a pull from `offset` on is answered with `reading`."""
        step = PullDelivery(
            first_offset=offset,
            next_offset=reading.next_offset,
            kept=reading.kept,
            lost_count=reading.lost_count,
            redelivered_count=sum(one.next_offset - one.first_offset for one in redelivered),
            byte_count=sum(map(len, reading.batches)),
        )
        known = self._delivered.get((owner, client_id))
        if known is None:
            self._delivered[owner, client_id] = DeliveredRange(step)
        elif not known.extend(step):
            self._closed.append((owner, client_id, known))
            self._delivered[owner, client_id] = DeliveredRange(step)

    def queue_rebuilt(self, topic: str, queue_id: int, first_offset: int, next_offset: int) -> None:
        """Publish that damaged entries of a consume queue were rebuilt."""
        queue = queue_pb2.QueueRef(topic=topic, broker=self._broker, queue_id=queue_id)
        range_ = queue_pb2.OffsetRange(first_offset=first_offset, next_offset=next_offset)
        self.hub.publish(
            pb.MetricEvent(
                queue=queue_pb2.GroupQueue(queue=queue), queue_rebuilt=pb.QueueRebuilt(range=range_)
            )
        )

    def key_index_rebuilt(self, first_position: int, next_position: int) -> None:
        """Publish that a damaged file of the key index was rebuilt."""
        rebuilt = pb.KeyIndexRebuilt(first_position=first_position, next_position=next_position)
        self.hub.publish(pb.MetricEvent(key_index_rebuilt=rebuilt))

    def _events(self) -> Iterator[pb.MetricEvent]:
        appended, self._appended = self._appended, {}
        if not appended:
            self._latencies.forget(FSYNC.operation)
            self._latencies.forget(REPLICATION.operation)
        for (topic, queue_id), (count, size, next_offset) in appended.items():
            queue = queue_pb2.QueueRef(topic=topic, broker=self._broker, queue_id=queue_id)
            yield pb.MetricEvent(
                queue=queue_pb2.GroupQueue(queue=queue),
                appended=pb.Appended(message_count=count, byte_count=size, next_offset=next_offset),
            )
        closed, self._closed = self._closed, []
        delivered, self._delivered = self._delivered, {}
        for owner, client_id, range_ in [*closed, *((*key, r) for key, r in delivered.items())]:
            for reported in range_.reports():
                yield _delivered(owner, client_id, reported)
        yield from self.transactions.events(self._broker)
        yield from self._latencies.events()
        usage, now_s = self.usage(), self.now_s()
        if usage.bytes_count and now_s >= self._volume_due_s:
            self._volume_due_s = now_s + VOLUME_INTERVAL_S
            yield pb.MetricEvent(
                volume_state=pb.VolumeState(
                    used_bytes=usage.used_bytes, free_bytes=usage.free_bytes
                )
            )


def _delivered(owner: QueueOwner, client_id: str, reported: ReportedRange) -> pb.MetricEvent:
    range_ = queue_pb2.OffsetRange(
        first_offset=reported.first_offset, next_offset=reported.next_offset
    )
    return pb.MetricEvent(
        queue=owner.queue(),
        delivered=pb.DeliveredRange(
            range=range_,
            token=owner.token,
            message_count=reported.message_count,
            filtered_count=reported.filtered_count,
            client_id=client_id,
            redelivered_count=reported.redelivered_count,
            byte_count=reported.byte_count,
            runs=reported.runs,
            lost_count=reported.lost_count,
        ),
    )
