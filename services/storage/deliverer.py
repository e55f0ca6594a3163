"""Delivers the next messages of a queue: read, record at offsets, answer (protocol section 6)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._core.names import METRICS_TOPIC
from batonmq._core.records import read_header
from batonmq.errors import BatonError, DataLoss, NotLeader, OffsetAheadOfLog
from batonmq_server.storage.core.checks import check_queue, check_readable
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.queue_reader import ReadResult
from batonmq_server.storage.core.store import check_covered
from batonmq_server.storage.core.tier import NotCached
from batonmq_server.storage.delivery_recorder import (
    NO_ADVANCE,
    PendingDelivery,
    RecordedDelivery,
)
from batonmq_server.storage.metric_stream import PULL
from batonmq_server.storage.servicer_parts import StorageServicerParts
from batonmq_server.storage.validation import ParsedPull

FOLLOWER_HOLD_MS = 1_000
"""A long poll at a follower looks this often whether the set has a leader meanwhile."""


def without_progress(pull: ParsedPull) -> ParsedPull:
    """Return a pull that has waited: its acks are outdated (protocol 6.6)."""
    return pull._replace(progress=None)


async def after_waiting(pull: ParsedPull) -> ParsedPull:
    """As `without_progress`, without waiting for anything."""
    return without_progress(pull)


class Delivered(NamedTuple):
    """Messages that may be sent now.

    Attributes:
        response: The response, without its batches.
        reading: What was read for it; None if there was no message.
        recorded: Whether a record was made for them.
    """

    response: pb.PullResponse
    reading: ReadResult | None
    recorded: bool = False


class Deliverer:
    """Answers pulls, and makes the frames of deliveries by stream."""

    def __init__(self, parts: StorageServicerParts) -> None:
        self._parts, self._store = parts, parts.store

    async def deliver(
        self,
        pull: ParsedPull,
        end_ms: int,
        after_wait: Callable[[ParsedPull], Awaitable[ParsedPull]] = after_waiting,
        new_answer: Callable[[], pb.PullResponse] = pb.PullResponse,
        at_follower: Callable[[ParsedPull], ParsedPull] = without_progress,
        on_read: Callable[[int], None] = lambda _: None,
    ) -> Delivered:
        """Return the next messages, after they were recorded; wait for them until `end_ms`.

        The caller must send the response without waiting for anything else.

        Args:
            end_ms: Monotonic time at which a response without messages is returned.
            after_wait: Returns the pull to continue with when messages may have arrived.
            new_answer: Returns the empty message to fill, so that no response is copied.
            at_follower: Returns the pull to continue with at a follower, which takes no acks
                (protocol 6.6).
            on_read: Called with the bytes that are read, before they are recorded.

        Raises:
            BatonError: as Pull; nothing may be sent.
        """
        clock, role, stream = self._parts.clock, self._parts.role, self._parts.stream
        begin_s = stream.now_s()
        while True:
            if role.is_follower:
                pull = at_follower(pull)
            topic, queue_id = pull.owner.topic, pull.owner.queue_id
            queues = await self._parts.topics.find(topic)
            check_readable(topic, queues)
            key = check_queue(topic, queues, queue_id)
            self._check_group(pull)
            if role.is_follower:
                check_covered(
                    self._store, queues, key, pull.spec.offset, has_confirmed=role.has_confirmed
                )
            try:
                reading = self._read(key, pull)
            except (DataLoss, NotCached) as error:
                await self._make_readable(key, pull, error)
                continue
            if reading is not None:
                break
            if (outdated := role.outdated()) is not None:
                raise outdated
            hold_ms = end_ms - clock.monotonic_ms()
            if role.is_follower:
                if not role.next_read_node(0):
                    raise NotLeader("this follower has a leader; pull from it", retry_after_ms=50)
                hold_ms = min(hold_ms, FOLLOWER_HOLD_MS)  # then the role is looked at again
            if hold_ms <= 0:
                self._fill(answer := new_answer(), key, pull, None, None, taken=False)
                return Delivered(answer, None)
            await self._parts.pulls.wait(key, pull.owner, hold_ms)
            begin_s = stream.now_s()
            pull = await after_wait(pull)
        on_read(sum(map(len, reading.batches)))
        verdict = self._covering(key, pull, range_ := (pull.spec.offset, reading.next_offset))
        recorded = verdict is None and pull.owner.token != 0
        if recorded:
            verdict = await self._record(key, pull, range_)
        self._count(pull, key, reading, verdict, begin_s)
        taken = recorded and pull.progress is not None
        self._fill(answer := new_answer(), key, pull, reading, verdict, taken=taken)
        return Delivered(answer, reading, recorded)

    def names_another_node(self, next_node_id: str) -> bool:
        """Return whether a response tells the consumer to read from another node next."""
        return bool(next_node_id) != self._parts.role.is_follower

    def _check_group(self, pull: ParsedPull) -> None:
        """Raise unless the group may pull with, or without, a token now (protocol 6.1, 15)."""
        gates, group = self._parts.gates, pull.owner.group
        if pull.owner.token:
            gates.check_owned(group)
        else:
            gates.check_unowned(group)
        gates.check_running(group)

    def _covering(
        self, key: QueueKey, pull: ParsedPull, range_: tuple[int, int]
    ) -> RecordedDelivery | None:
        """Return the record of the advance that covers a range; None if a record is due.

        Acks always go to offsets with the next frame.
        """
        if pull.advance is None or pull.progress is not None:
            return None
        seen = self._parts.deliveries.seen_epoch(pull.owner.group)
        return pull.advance.covering(key, range_, seen, self._parts.clock.monotonic_ms())

    async def _record(
        self, key: QueueKey, pull: ParsedPull, range_: tuple[int, int]
    ) -> RecordedDelivery:
        """Record the delivery of a range, with the acks of the pull.

        Raises:
            BatonError: as Pull.
        """
        advance, wish = pull.advance, NO_ADVANCE
        if advance is not None:
            wish = advance.wish(range_, self._parts.clock.monotonic_ms())
        first_offset, next_offset = range_
        delivery = PendingDelivery(
            pull.owner,
            first_offset,
            next_offset,
            pull.offsets_epoch,
            pull.subscription_generation,
            pull.progress,
            pull.offsets_set,
            pull.received_offset,
            wish,
        )
        try:
            record = await self._parts.deliveries.record(delivery)
        except BatonError as error:
            self._parts.metrics.unrecorded_deliveries.labels(error.reason).inc()
            raise
        if advance is None:
            return record
        return advance.recorded(key, range_, record, wish.advance_id)

    async def _make_readable(
        self, key: QueueKey, pull: ParsedPull, error: DataLoss | NotCached
    ) -> None:
        """Fetch what a read misses from the object store, or rebuild the index that it used.

        Raises:
            DataLoss: the index can't be rebuilt, or an object is missing or damaged.
            Unreachable: the store did not answer in time.
        """
        try:
            if isinstance(error, NotCached):
                await self._parts.tier.fetch(error)
            else:
                await self._parts.repair(key, pull.spec.offset, error)
        except DataLoss as lost:
            self._parts.damage.report_error(lost)
            raise

    def _read(self, key: QueueKey, pull: ParsedPull) -> ReadResult | None:
        try:
            return self._store.pull(key, pull.spec)
        except OffsetAheadOfLog as error:
            if not self._parts.role.is_follower:
                raise
            raise NotLeader(
                f"this follower lags behind the leader: {error.message}", retry_after_ms=100
            ) from error

    def _fill(
        self,
        answer: pb.PullResponse,
        key: QueueKey,
        pull: ParsedPull,
        reading: ReadResult | None,
        verdict: RecordedDelivery | None,
        *,
        taken: bool,
    ) -> None:
        """Fill an empty response, except for its batches.

        Args:
            reading: The messages; None for none.
            verdict: The record that includes them; None for none.
            taken: Whether offsets has taken the acks of the caller.
        """
        visible = self._store.offsets(key)
        if verdict is not None:
            answer.offsets_set, answer.offsets_epoch = verdict.offsets_set, verdict.offsets_epoch
            answer.redelivered.extend(verdict.redelivered)
        elif pull.owner.token:
            seen = self._parts.deliveries.seen_epoch(pull.owner.group)
            answer.offsets_set, answer.offsets_epoch = seen
        else:
            answer.offsets_set = pull.offsets_set
        answer.next_offset = pull.spec.offset
        if reading is not None:
            answer.next_offset = reading.next_offset
            answer.filtered_count, answer.lost_count = reading.filtered_count, reading.lost_count
        answer.queue_first_offset = visible.first_offset
        answer.queue_next_offset = visible.next_offset
        answer.progress_taken = taken
        answer.next_node_id = self._parts.role.next_read_node(self._behind_bytes(pull, reading))

    def _behind_bytes(self, pull: ParsedPull, reading: ReadResult | None) -> int:
        """Return how many bytes of the log are newer than the delivered batches."""
        if reading is not None and reading.batches:
            last_position = read_header(reading.batches[-1]).position
        elif reading is not None and reading.continues_batch:
            last_position = pull.spec.kept_position
        else:
            return 0
        return self._store.readable_position - last_position

    def _count(
        self,
        pull: ParsedPull,
        key: QueueKey,
        reading: ReadResult,
        verdict: RecordedDelivery | None,
        begin_s: float,
    ) -> None:
        offset, stream = pull.spec.offset, self._parts.stream
        self._parts.losses.note(pull.owner, key, offset, offset + reading.lost_count)
        self._parts.metrics.delivered_messages.inc(reading.message_count)
        self._parts.metrics.filtered_messages.inc(reading.filtered_count)
        if self._parts.gates.get(pull.owner.group) is not None:
            size = sum(map(len, reading.batches))
            self._parts.metrics.traffic.delivered(
                pull.owner.topic, pull.owner.group, reading.message_count, size
            )
        if stream.hub.watched and pull.owner.topic != METRICS_TOPIC:
            redelivered = verdict.redelivered if verdict else ()
            stream.delivered(pull.owner, pull.client_id, offset, reading, redelivered)
            stream.observe_since(PULL, begin_s)
