"""The servicer of StorageService: appends, pulls, queue offsets and the state of the node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import grpc.aio

from baton.common.v1 import queue_pb2
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import storage_service_pb2_grpc as pb_grpc
from batonmq._common.aio import in_steps
from batonmq._common.rpc import error_to_pb
from batonmq._core.keyed_queues import TOPICS_REVISION
from batonmq._core.names import METRICS_TOPIC, check_topic
from batonmq.errors import BatonError, DataLoss
from batonmq_server.runtime.access.owner import owner_of
from batonmq_server.storage import validation
from batonmq_server.storage.core.checks import CheckedBatch, LocalTopic, check, check_queue
from batonmq_server.storage.core.compacted import Section
from batonmq_server.storage.core.producers import QueueKey, StoreReceipt
from batonmq_server.storage.core.queue_bytes import batch_bytes_by_step
from batonmq_server.storage.deliverer import Deliverer
from batonmq_server.storage.delivery_streams import DeliveryStreams
from batonmq_server.storage.held_messages import held_messages
from batonmq_server.storage.metric_stream import APPEND
from batonmq_server.storage.output_server import refusal
from batonmq_server.storage.servicer_parts import StorageServicerParts

log = logging.getLogger(__name__)

SECONDS_MAX = 10 * 365 * 24 * 3_600
"""An estimate of more than ten years until the disk is full is reported as 0: not in sight."""
Context = grpc.aio.ServicerContext[Any, Any]


class _FoundQueue(NamedTuple):
    """A queue of QueryOffsets, and whether it takes messages."""

    key: QueueKey
    takes: bool


class StorageServicer(pb_grpc.StorageServiceServicer):
    """Serves StorageService; see the proto."""

    def __init__(self, parts: StorageServicerParts) -> None:
        self._parts, self._store, self._appender = parts, parts.store, parts.appender
        self.deliverer = Deliverer(parts)
        self.streams = DeliveryStreams(self.deliverer, parts)

    async def Append(self, request: pb.AppendRequest, context: Context) -> pb.AppendResponse:
        """See the proto."""
        role, begin_s = self._parts.role, self._parts.stream.now_s()
        batches = validation.parse_batches(request, replicated=role.replicated)
        self._parts.flusher.check()
        owner = owner_of(self._parts.identity_of(context))
        epochs = validation.parse_topic_epochs(request)
        sent = in_steps(zip(batches, epochs, strict=True))  # a check may decompress 8 MiB
        checked = [_checked(batch, owner, epoch) async for batch, epoch in sent]
        if any(isinstance(one, CheckedBatch) and one.outputs is not None for one in checked):
            checked = self._permitted_outputs(checked, context)
        good = [one for one in checked if isinstance(one, CheckedBatch)]
        names = {one.header.topic for one in good}
        topics = await self._parts.topics.find_all(names, _newest_epochs(good))
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
        end_ms = self._parts.clock.monotonic_ms() + pull.hold_ms
        delivered = await self.deliverer.deliver(pull, end_ms)
        answer = delivered.response
        if delivered.reading is not None:
            answer.batches.extend(delivered.reading.batches)
        answer.pull_id = request.pull_id
        return answer

    def Deliver(  # type: ignore[override]  # a response may be encoded
        self, requests: AsyncIterator[pb.DeliverRequest], context: Context
    ) -> AsyncIterator[pb.DeliverResponse | bytes]:
        """See the proto."""
        return self.streams.serve(requests, context)

    async def QueryOffsets(
        self, request: pb.QueryOffsetsRequest, context: Context
    ) -> pb.QueryOffsetsResponse:
        """See the proto."""
        queues = validation.parse_queues(request)
        revision = min(self._parts.topics.revision(name) for name in {q.topic for q in queues})
        leader_age_ms = self._parts.role.leader_age_ms()  # before the offsets are read
        counted: dict[int, list[int]] = {}
        for wanted in request.counts:
            counted.setdefault(wanted.queue_index, []).append(wanted.offset)
        found = [await self._queue(queue) async for queue in in_steps(queues)]
        unsafe = None
        if any(isinstance(one, _FoundQueue) and not one.takes for one in found):
            unsafe = await self._wait_until_final()
        outcomes = []
        async for index, one in in_steps(enumerate(found)):
            if isinstance(one, BatonError):
                outcomes.append(pb.QueryOffsetsOutcome(error=error_to_pb(one)))
            elif unsafe is not None and not one.takes:
                outcomes.append(pb.QueryOffsetsOutcome(error=error_to_pb(unsafe)))
            else:
                asked = counted.get(index, ())
                outcomes.append(await self._offsets(one.key, request.with_bytes, asked))
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

    async def QueryHeld(
        self, request: pb.QueryHeldRequest, context: Context
    ) -> pb.QueryHeldResponse:
        """See the proto."""
        revision = 0
        if request.topic:
            await self._parts.topics.find(check_topic(request.topic))
            revision = self._parts.topics.revision(request.topic)
        answer = await held_messages(self._appender, request.position)
        context.set_trailing_metadata(((TOPICS_REVISION, str(revision)),))
        return answer

    async def _find(self, topic: str, queue_id: int) -> QueueKey:
        return check_queue(topic, await self._parts.topics.find(topic), queue_id)

    def _permitted_outputs(
        self, checked: Sequence[CheckedBatch | BatonError], context: Context
    ) -> list[CheckedBatch | BatonError]:
        """Return `checked`; outputs of groups as which the caller may not read are refused."""
        require = self._parts.require
        if require is None:
            return list(checked)
        permitted: dict[str, BatonError | None] = {}
        results: list[CheckedBatch | BatonError] = []
        for one in checked:
            if isinstance(one, CheckedBatch) and one.outputs is not None:
                group = one.outputs.head.source.group
                if group not in permitted:
                    permitted[group] = refusal(require, context, group)
                results.append(permitted[group] or one)
            else:
                results.append(one)
        return results

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

    async def _queue(self, queue: queue_pb2.QueueRef) -> _FoundQueue | BatonError:
        try:
            validation.check_queue_name(queue, self._parts.broker)
            topic = await self._parts.topics.find(queue.topic)
            key = check_queue(queue.topic, topic, queue.queue_id)
        except BatonError as error:
            return error
        return _FoundQueue(key, topic.takes(queue.queue_id))

    async def _wait_until_final(self) -> BatonError | None:
        """Wait until the answer about queues that take no messages is final: see TOPICS_REVISION.

        All of them wait together. Return why their messages may not be safe.
        """
        try:
            await self._parts.flusher.wait_until_safe(self._store.log.next_position)
        except BatonError as error:
            return error
        return None

    async def _offsets(
        self, key: QueueKey, with_bytes: bool, counted: Sequence[int]
    ) -> pb.QueryOffsetsOutcome:
        try:
            stored_bytes = await self._stored_bytes(key) if with_bytes else None
            visible = self._store.offsets(key)
            counts = await self._counts(key, counted, visible.next_offset)
        except BatonError as error:
            return pb.QueryOffsetsOutcome(error=error_to_pb(error))
        return pb.QueryOffsetsOutcome(
            offsets=pb.QueueOffsets(
                first_offset=visible.first_offset,
                next_offset=visible.next_offset,
                topic_id=key[0],
                stored_bytes=stored_bytes,
                counts=counts,
            )
        )

    async def _counts(
        self, key: QueueKey, offsets: Sequence[int], next_offset: int
    ) -> list[pb.MessageCount]:
        """Return the number of messages from each of the offsets on, if they can be counted.

        All are of one moment: messages from `next_offset` on do not count, and if a compaction is
        applied meanwhile, all are counted again.
        """
        found: dict[int, int] = {}
        # In order: neighbours are in one section of a compacted queue, and few sections are cached.
        ascending, complete = sorted(set(offsets)), False
        while not complete:
            complete, sections = True, self._sections(key)
            found.clear()
            async for offset in in_steps(ascending):
                if self._sections(key) is not sections:
                    complete = False
                    break
                try:
                    count = self._store.count_from(key, offset)
                except BatonError as error:
                    log.warning("not counted key=%s offset=%d error=%s", key, offset, error)
                    continue
                newer = self._store.offsets(key).next_offset - max(offset, next_offset)
                found[offset] = max(0, count - max(0, newer))
        return [pb.MessageCount(offset=one, count=found[one]) for one in offsets if one in found]

    def _sections(self, key: QueueKey) -> Sequence[Section] | None:
        """Return the sections of a compacted queue: another object after each compaction."""
        part = self._store.compacted.get(key)
        return part.sections if part is not None else None

    async def _stored_bytes(self, key: QueueKey) -> int | None:
        """Return the bytes of the batches of a queue; None if its index is damaged."""
        total, queue = 0, self._store.queues.get(key)
        try:
            for step in batch_bytes_by_step(queue) if queue else ():
                total += step
                await asyncio.sleep(0)
        except DataLoss as error:
            log.warning("bytes not counted key=%s error=%s", key, error)
            return None
        part = self._store.compacted.get(key)
        return total + (part.bytes_count if part is not None else 0)

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


def _in_sight(seconds: float) -> int:
    """Return `seconds`, or 0 if they are more than SECONDS_MAX."""
    return int(seconds) if seconds < SECONDS_MAX else 0


def _newest_epochs(batches: Sequence[CheckedBatch]) -> dict[str, int]:
    """Return the highest epoch of each topic that a batch names, without epochs of 0."""
    epochs: dict[str, int] = {}
    for one in batches:
        if one.topic_epoch:
            topic = one.header.topic
            epochs[topic] = max(one.topic_epoch, epochs.get(topic, 0))
    return epochs


def _checked(batch: bytes, owner: int, topic_epoch: int | None) -> CheckedBatch | BatonError:
    try:
        return check(batch, owner, topic_epoch)
    except BatonError as error:
        return error
