"""The servicer of StorageService: appends, pulls, queue offsets and the state of the node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

from baton.common.v1 import queue_pb2
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_to_pb
from batonmq._core.keyed_queues import TOPICS_REVISION
from batonmq._core.names import METRICS_TOPIC, check_topic
from batonmq._core.records import read_header
from batonmq.errors import BatonError, DataLoss, NotLeader, OffsetAheadOfLog
from batonmq_server.runtime.access.owner import owner_of
from batonmq_server.runtime.group_gates import GroupGates
from batonmq_server.storage import validation
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.core.producers import QueueKey, StoreReceipt
from batonmq_server.storage.core.retention import Retention
from batonmq_server.storage.core.store import (
    CheckedBatch,
    LocalTopic,
    MessageStore,
    ReadResult,
    check,
    check_queue,
    check_readable,
)
from batonmq_server.storage.damage_tracker import DamageTracker
from batonmq_server.storage.delivery_recorder import PendingDelivery, RecordedDelivery
from batonmq_server.storage.delivery_router import DeliveryRouter
from batonmq_server.storage.flusher import Flusher
from batonmq_server.storage.long_polls import LongPolls
from batonmq_server.storage.metric_stream import APPEND, PULL, StorageMetricStream
from batonmq_server.storage.metrics import StorageMetrics
from batonmq_server.storage.node_role import NodeRole
from batonmq_server.storage.retention_losses import RetentionLosses
from batonmq_server.storage.topic_cache import TopicCache
from batonmq_server.storage.topic_purger import PurgeResult

SECONDS_MAX = 10 * 365 * 24 * 3_600
"""An estimate of more than ten years until the disk is full is reported as 0: not in sight."""

FOLLOWER_HOLD_MS = 1_000
"""A long poll at a follower looks this often whether the set has a leader meanwhile."""

Repair = Callable[[QueueKey, int, DataLoss], Awaitable[None]]
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageServicerParts:
    """The components that the servicer calls.

    Attributes:
        broker: Broker name: the replica set, or a node without replicas.
        syncs_at_once: Whether a request without a durability waits for the sync. A node of a
            replica set always waits.
        repair: Rebuilds the index that a failed read at an offset uses; raises an error if that is
            not possible.
        purge: Removes what deleted topics of a name have left in the log.
        scrubbed: Returns the position that the current round of the scrub has reached.
        identity_of: Returns the identity of a caller; empty without access control.
    """

    broker: str
    syncs_at_once: bool
    store: MessageStore
    appender: Appender
    topics: TopicCache
    gates: GroupGates
    flusher: Flusher
    pulls: LongPolls
    deliveries: DeliveryRouter
    retention: Retention
    role: NodeRole
    losses: RetentionLosses
    damage: DamageTracker
    repair: Repair
    purge: Callable[[str], Awaitable[PurgeResult]]
    scrubbed: Callable[[], int]
    metrics: StorageMetrics
    stream: StorageMetricStream
    clock: Clock
    identity_of: Callable[[Context], str]


class StorageServicer(pb_grpc.StorageServiceServicer):
    """Serves StorageService; see the proto."""

    def __init__(self, parts: StorageServicerParts) -> None:
        self._parts, self._store, self._appender = parts, parts.store, parts.appender

    async def Append(self, request: pb.AppendRequest, context: Context) -> pb.AppendResponse:
        """See the proto."""
        role, begin_s = self._parts.role, self._parts.stream.now_s()
        batches = validation.parse_batches(request, replicated=role.replicated)
        self._parts.flusher.check()
        owner = owner_of(self._parts.identity_of(context))
        checked = [_checked(batch, owner) for batch in batches]
        good = [one for one in checked if isinstance(one, CheckedBatch)]
        topics = await self._parts.topics.find_all({one.header.topic for one in good})
        members_min = 2 if request.durability == pb.DURABILITY_REPLICATED else 1
        results = iter(self._append(good, topics, members_min))
        outcomes = [next(results) if isinstance(one, CheckedBatch) else one for one in checked]
        stored = [one for one in outcomes if isinstance(one, StoreReceipt)]
        waits = self._parts.syncs_at_once or role.replicated
        wanted = request.durability or (pb.DURABILITY_FSYNCED if waits else pb.DURABILITY_MEMORY)
        if stored and wanted != pb.DURABILITY_MEMORY:
            await self._parts.flusher.wait_until_safe(max(one.next_position for one in stored))
        if topics.keys() - {METRICS_TOPIC}:
            self._parts.stream.observe_since(APPEND, begin_s)
        return pb.AppendResponse(outcomes=[self._outcome(one) for one in outcomes])

    async def Pull(self, request: pb.PullRequest, context: Context) -> pb.PullResponse:
        """See the proto."""
        pull = validation.parse_pull(request, self._parts.broker)
        clock, role, stream = self._parts.clock, self._parts.role, self._parts.stream
        begin_s = stream.now_s()
        end_ms = clock.monotonic_ms() + pull.hold_ms
        while True:
            if role.is_follower:
                pull = replace(pull, progress=None)  # followers take none: protocol 6.6
            key = await self._find_readable(pull.owner.topic, pull.owner.queue_id)
            self._check_group(pull)
            try:
                reading = self._read(key, pull)
            except DataLoss as error:
                try:
                    await self._parts.repair(key, pull.spec.offset, error)
                except DataLoss as lost:
                    self._parts.damage.report_error(lost)
                    raise
                continue
            if reading is not None:
                break
            if (outdated := role.outdated()) is not None:
                raise outdated
            hold_ms = end_ms - clock.monotonic_ms()
            if role.is_follower:
                if not role.next_read_node(0):
                    raise NotLeader("this follower has a leader; pull from it", retry_after_ms=50)
                hold_ms = min(hold_ms, FOLLOWER_HOLD_MS)  # then asks for its role again
            if hold_ms <= 0:
                return self._answer(request.pull_id, key, pull, None, None)
            await self._parts.pulls.wait(key, pull.owner, hold_ms)
            begin_s = stream.now_s()
            pull = replace(pull, progress=None)  # outdated after the wait: protocol 6.6
        verdict = await self._record(pull, reading) if pull.owner.token else None
        self._count_delivered(pull, key, reading, verdict)
        if stream.hub.watched and pull.owner.topic != METRICS_TOPIC:
            stream.observe_since(PULL, begin_s)
        return self._answer(request.pull_id, key, pull, reading, verdict)

    async def QueryOffsets(
        self, request: pb.QueryOffsetsRequest, context: Context
    ) -> pb.QueryOffsetsResponse:
        """See the proto."""
        queues = validation.parse_queues(request)
        revision = min(self._parts.topics.revision(name) for name in {q.topic for q in queues})
        leader_age_ms = self._parts.role.leader_age_ms()  # before the offsets are read
        outcomes = [await self._offsets(queue) for queue in queues]
        context.set_trailing_metadata(((TOPICS_REVISION, str(revision)),))
        return pb.QueryOffsetsResponse(outcomes=outcomes, leader_age_ms=leader_age_ms)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        """See the proto."""
        store, retention = self._store, self._parts.retention
        return pb.DescribeResponse(
            broker=self._parts.broker,
            first_position=store.log.first_position,
            next_position=store.log.next_position,
            synced_position=store.log.synced_position,
            queue_count=store.queue_count,
            long_poll_count=len(self._parts.pulls),
            appended_count=store.appended_count,
            scheduled_count=len(store.schedule.waiting),
            disk_state=pb.DiskState.Value(f"DISK_STATE_{retention.state.name}"),
            disk_used_percent=retention.usage.used_percent,
            scrubbed_position=self._parts.scrubbed(),
            damaged_batch_count=len(self._parts.damage),
            disk_seconds_until_full=_in_sight(retention.seconds_until_full),
        )

    async def PurgeTopic(
        self, request: pb.PurgeTopicRequest, context: Context
    ) -> pb.PurgeTopicResponse:
        """See the proto."""
        check_topic(request.topic)
        result = await self._parts.purge(request.topic)
        return pb.PurgeTopicResponse(
            purged_segments=result.purged_segments,
            purged_bytes=result.purged_bytes,
            remaining_segments=result.remaining_segments,
            remaining_bytes=result.remaining_bytes,
            expiry_unix_ms=result.expiry_unix_ms,
        )

    async def _find(self, topic: str, queue_id: int) -> QueueKey:
        return check_queue(topic, await self._parts.topics.find(topic), queue_id)

    async def _find_readable(self, topic: str, queue_id: int) -> QueueKey:
        queues = await self._parts.topics.find(topic)
        check_readable(topic, queues)
        return check_queue(topic, queues, queue_id)

    def _append(
        self,
        batches: Sequence[CheckedBatch],
        topics: dict[str, LocalTopic | BatonError],
        members_min: int,
    ) -> list[StoreReceipt | BatonError]:
        # While one topic was looked up, another one may have changed.
        present = self._parts.topics.with_changes(topics)
        outcomes = self._appender.append(batches, present, members_min)
        self._appender.count_appended(batches, outcomes)
        return outcomes

    def _check_group(self, pull: validation.ParsedPull) -> None:
        """Raise unless the group may pull with, or without, a token now (protocol 6.1, 15)."""
        gates, group = self._parts.gates, pull.owner.group
        if pull.owner.token:
            gates.check_owned(group)
        else:
            gates.check_unowned(group)
        gates.check_running(group)

    async def _record(self, pull: validation.ParsedPull, reading: ReadResult) -> RecordedDelivery:
        delivery = PendingDelivery(
            pull.owner,
            pull.spec.offset,
            reading.next_offset,
            pull.offsets_epoch,
            pull.subscription_generation,
            pull.progress,
            pull.offsets_set,
            pull.received_offset,
        )
        try:
            return await self._parts.deliveries.record(delivery)
        except BatonError as error:
            self._parts.metrics.unrecorded_deliveries.labels(error.reason).inc()
            raise

    def _read(self, key: QueueKey, pull: validation.ParsedPull) -> ReadResult | None:
        try:
            return self._store.pull(key, pull.spec)
        except OffsetAheadOfLog as error:
            if not self._parts.role.is_follower:
                raise
            raise NotLeader(
                f"this follower lags behind the leader: {error.message}", retry_after_ms=100
            ) from error

    async def _offsets(self, queue: queue_pb2.QueueRef) -> pb.QueryOffsetsOutcome:
        try:
            validation.check_queue_name(queue, self._parts.broker)
            topic = await self._parts.topics.find(queue.topic)
            key = check_queue(queue.topic, topic, queue.queue_id)
            if not topic.takes(queue.queue_id):  # the answer must be final: see TOPICS_REVISION
                await self._parts.flusher.wait_until_safe(self._store.log.next_position)
            visible = self._store.offsets(key)
        except BatonError as error:
            return pb.QueryOffsetsOutcome(error=error_to_pb(error))
        return pb.QueryOffsetsOutcome(
            offsets=pb.QueueOffsets(
                first_offset=visible.first_offset, next_offset=visible.next_offset, topic_id=key[0]
            )
        )

    def _outcome(self, outcome: StoreReceipt | BatonError) -> pb.AppendOutcome:
        if isinstance(outcome, BatonError):
            self._parts.metrics.refused_batches.labels(outcome.reason).inc()
            return pb.AppendOutcome(error=error_to_pb(outcome))
        return pb.AppendOutcome(
            receipt=pb.AppendReceipt(
                first_offset=outcome.first_offset,
                position=outcome.position,
                store_unix_ms=outcome.store_unix_ms,
                durability=self._parts.role.durability_of(outcome.next_position),
                duplicate=outcome.duplicate,
            )
        )

    def _answer(
        self,
        pull_id: int,
        key: QueueKey,
        pull: validation.ParsedPull,
        reading: ReadResult | None,
        verdict: RecordedDelivery | None,
    ) -> pb.PullResponse:
        visible = self._store.offsets(key)
        if verdict is not None:
            offsets_set, epoch = verdict.offsets_set, verdict.offsets_epoch
        elif pull.owner.token:
            offsets_set, epoch = self._parts.deliveries.seen_epoch(pull.owner.group)
        else:
            offsets_set, epoch = pull.offsets_set, 0
        return pb.PullResponse(
            pull_id=pull_id,
            batches=reading.batches if reading else (),
            next_offset=reading.next_offset if reading else pull.spec.offset,
            queue_first_offset=visible.first_offset,
            queue_next_offset=visible.next_offset,
            redelivered=verdict.redelivered if verdict else (),
            offsets_epoch=epoch,
            offsets_set=offsets_set,
            filtered_count=reading.filtered_count if reading else 0,
            lost_count=reading.lost_count if reading else 0,
            progress_taken=verdict is not None and pull.progress is not None,
            next_node_id=self._parts.role.next_read_node(self._behind_bytes(reading)),
        )

    def _behind_bytes(self, reading: ReadResult | None) -> int:
        """Return how many bytes of the log are newer than the delivered batches."""
        if reading is None or not reading.batches:
            return 0
        return self._store.readable_position - read_header(reading.batches[-1]).position

    def _count_delivered(
        self,
        pull: validation.ParsedPull,
        key: QueueKey,
        reading: ReadResult,
        verdict: RecordedDelivery | None,
    ) -> None:
        offset = pull.spec.offset
        self._parts.losses.note(pull.owner, key, offset, offset + reading.lost_count)
        self._parts.metrics.delivered_messages.inc(reading.message_count)
        self._parts.metrics.filtered_messages.inc(reading.filtered_count)
        if self._parts.gates.get(pull.owner.group) is not None:
            size = sum(map(len, reading.batches))
            self._parts.metrics.traffic.delivered(
                pull.owner.topic, pull.owner.group, reading.message_count, size
            )
        if self._parts.stream.hub.watched and pull.owner.topic != METRICS_TOPIC:
            redelivered = verdict.redelivered if verdict else ()
            self._parts.stream.delivered(pull.owner, pull.client_id, offset, reading, redelivered)


def _in_sight(seconds: float) -> int:
    """Return `seconds`, or 0 if they are more than SECONDS_MAX."""
    return int(seconds) if seconds < SECONDS_MAX else 0


def _checked(batch: bytes, owner: int) -> CheckedBatch | BatonError:
    try:
        return check(batch, owner)
    except BatonError as error:
        return error
