"""The servicer: reads requests, calls the store, waits for disk and offsets, answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
from baton.common.v1 import queue_pb2
from baton.metrics.v1 import metrics_service_pb2 as metrics_pb
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc

from batonmq.common.clock import Clock
from batonmq.common.errors import BatonError, DataLoss
from batonmq.common.rpc import error_to_pb
from services.runtime.events import EventHub
from services.storage import requests
from services.storage.core.producers import QueueKey, Receipt
from services.storage.core.store import (
    Checked,
    Reading,
    Store,
    TopicQueues,
    check,
    check_queue,
)
from services.storage.deliveries import Deliveries, Delivery, Verdict
from services.storage.flush import Flusher
from services.storage.metrics import StorageMetrics
from services.storage.pulls import ParkedPulls
from services.storage.topics import Topics

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the servicer works with.

    Attributes:
        broker: Name of this node.
        syncs_at_once: Whether a request that asks for no durability gets DURABILITY_FSYNCED;
            otherwise it gets DURABILITY_MEMORY.
    """

    broker: str
    syncs_at_once: bool
    store: Store
    topics: Topics
    flusher: Flusher
    pulls: ParkedPulls
    deliveries: Deliveries
    metrics: StorageMetrics
    hub: EventHub
    clock: Clock


class StorageServicer(pb_grpc.StorageServiceServicer):
    """See the proto."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._store = parts, parts.store

    async def Append(self, request: pb.AppendRequest, context: Context) -> pb.AppendResponse:
        """See the proto."""
        batches = requests.append_batches(request)
        self._parts.flusher.check()
        checked = [_checked(batch) for batch in batches]
        good = [one for one in checked if isinstance(one, Checked)]
        topics = await self._find_all({one.header.topic for one in good})
        results = iter(self._append(good, topics))
        outcomes = [next(results) if isinstance(one, Checked) else one for one in checked]
        stored = [one for one in outcomes if isinstance(one, Receipt)]
        wanted = request.durability or (
            pb.DURABILITY_FSYNCED if self._parts.syncs_at_once else pb.DURABILITY_MEMORY
        )
        if stored and wanted == pb.DURABILITY_FSYNCED:
            await self._parts.flusher.reached(max(one.next_position for one in stored))
        return pb.AppendResponse(outcomes=[self._outcome(one) for one in outcomes])

    async def Pull(self, request: pb.PullRequest, context: Context) -> pb.PullResponse:
        """See the proto."""
        pull = requests.pull(request, self._parts.broker)
        clock = self._parts.clock
        end_ms = clock.monotonic_ms() + pull.hold_ms
        while True:
            key = await self._find(pull.holder.topic, pull.holder.queue_id)
            reading = self._read(key, pull)
            if reading is not None:
                break
            hold_ms = end_ms - clock.monotonic_ms()
            if hold_ms <= 0:
                return self._answer(request.pull_id, key, pull, None, None)
            await self._parts.pulls.wait(key, pull.holder, hold_ms)
        delivery = Delivery(
            pull.holder, pull.wanted.offset, reading.next_offset, pull.offsets_epoch
        )
        try:
            verdict = await self._parts.deliveries.record(delivery)
        except BatonError as error:
            self._parts.metrics.unrecorded_deliveries.labels(error.reason).inc()
            raise
        self._tell_delivered(pull, reading)
        return self._answer(request.pull_id, key, pull, reading, verdict)

    async def QueryOffsets(
        self, request: pb.QueryOffsetsRequest, context: Context
    ) -> pb.QueryOffsetsResponse:
        """See the proto."""
        queues = requests.queried_queues(request)
        return pb.QueryOffsetsResponse(outcomes=[await self._offsets(queue) for queue in queues])

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        """See the proto."""
        store = self._store
        return pb.DescribeResponse(
            broker=self._parts.broker,
            first_position=store.log.first_position,
            next_position=store.log.next_position,
            synced_position=store.log.synced_position,
            queue_count=store.queue_count,
            parked_pull_count=len(self._parts.pulls),
            appended_count=store.appended_count,
        )

    async def _find_all(self, names: set[str]) -> dict[str, TopicQueues | BatonError]:
        found: dict[str, TopicQueues | BatonError] = {}
        for name in names:
            try:
                found[name] = await self._parts.topics.find(name)
            except BatonError as error:
                found[name] = error
        return found

    async def _find(self, topic: str, queue_id: int) -> QueueKey:
        return check_queue(topic, await self._parts.topics.find(topic), queue_id)

    def _append(
        self, batches: Sequence[Checked], topics: dict[str, TopicQueues | BatonError]
    ) -> list[Receipt | BatonError]:
        if not batches:
            return []
        self._parts.flusher.check()
        try:
            outcomes = self._store.append(batches, topics, self._parts.clock.unix_ms())
        except Exception as error:
            self._parts.flusher.fail(error)  # log and indexes may disagree: recovery has to look
            raise
        self._parts.flusher.wrote()
        self._tell_appended(batches, outcomes)
        return outcomes

    def _read(self, key: QueueKey, pull: requests.Pull) -> Reading | None:
        try:
            return self._store.read(key, pull.wanted)
        except DataLoss as error:
            self._parts.metrics.damaged_batches.inc()
            log.error("damaged batch not served topic=%s error=%s", pull.holder.topic, error)
            raise

    async def _offsets(self, queue: queue_pb2.Queue) -> pb.QueryOffsetsOutcome:
        try:
            requests.check_queue_name(queue, self._parts.broker)
            held = self._store.offsets(await self._find(queue.topic, queue.queue_id))
        except BatonError as error:
            return pb.QueryOffsetsOutcome(error=error_to_pb(error))
        return pb.QueryOffsetsOutcome(
            offsets=pb.QueueOffsets(first_offset=held.first_offset, next_offset=held.next_offset)
        )

    def _outcome(self, outcome: Receipt | BatonError) -> pb.AppendOutcome:
        if isinstance(outcome, BatonError):
            self._parts.metrics.refused_batches.labels(outcome.reason).inc()
            return pb.AppendOutcome(error=error_to_pb(outcome))
        synced = outcome.next_position <= self._store.log.synced_position
        return pb.AppendOutcome(
            receipt=pb.AppendReceipt(
                first_offset=outcome.first_offset,
                position=outcome.position,
                store_unix_ms=outcome.store_unix_ms,
                durability=pb.DURABILITY_FSYNCED if synced else pb.DURABILITY_MEMORY,
                duplicate=outcome.duplicate,
            )
        )

    def _answer(
        self,
        pull_id: int,
        key: QueueKey,
        pull: requests.Pull,
        reading: Reading | None,
        verdict: Verdict | None,
    ) -> pb.PullResponse:
        held = self._store.offsets(key)
        return pb.PullResponse(
            pull_id=pull_id,
            batches=reading.batches if reading else (),
            next_offset=reading.next_offset if reading else pull.wanted.offset,
            queue_first_offset=held.first_offset,
            queue_next_offset=held.next_offset,
            redelivered=verdict.redelivered if verdict else (),
            offsets_epoch=verdict.offsets_epoch if verdict else 0,
            filtered_count=reading.filtered_count if reading else 0,
        )

    def _tell_appended(
        self, batches: Sequence[Checked], outcomes: Sequence[Receipt | BatonError]
    ) -> None:
        messages: dict[tuple[str, int], tuple[int, int]] = {}
        for checked, outcome in zip(batches, outcomes, strict=True):
            if not isinstance(outcome, Receipt):
                continue
            if outcome.duplicate:
                self._parts.metrics.duplicate_batches.inc()
                continue
            header = checked.header
            count, size = messages.get((header.topic, header.queue_id), (0, 0))
            messages[header.topic, header.queue_id] = count + header.count, size + header.length
        for (topic, queue_id), (count, size) in messages.items():
            self._parts.metrics.appended_messages.inc(count)
            self._parts.metrics.appended_bytes.inc(size)
            if self._parts.hub.watched:
                queue = queue_pb2.Queue(topic=topic, broker=self._parts.broker, queue_id=queue_id)
                self._parts.hub.publish(
                    metrics_pb.MetricEvent(
                        queue=queue_pb2.GroupQueue(queue=queue),
                        appended=metrics_pb.Appended(message_count=count, byte_count=size),
                    )
                )

    def _tell_delivered(self, pull: requests.Pull, reading: Reading) -> None:
        self._parts.metrics.delivered_messages.inc(reading.message_count)
        self._parts.metrics.filtered_messages.inc(reading.filtered_count)
        if self._parts.hub.watched:
            self._parts.hub.publish(
                metrics_pb.MetricEvent(
                    queue=pull.holder.queue(),
                    delivered=metrics_pb.DeliveredRange(
                        range=queue_pb2.OffsetRange(
                            first_offset=pull.wanted.offset, next_offset=reading.next_offset
                        ),
                        token=pull.holder.token,
                        message_count=reading.message_count,
                        filtered_count=reading.filtered_count,
                    ),
                )
            )


def _checked(batch: bytes) -> Checked | BatonError:
    try:
        return check(batch)
    except BatonError as error:
        return error
