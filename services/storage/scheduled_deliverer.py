"""Delivers scheduled batches when they are due, and rewrites old ones that block retention.

A batch is due when the wall clock has reached its delivery time. The clock may jump, so it is read
before every delivery, and often enough to notice a jump ahead.

An accepted batch is delivered even if the topic has become read-only since. If its queue accepts no
more messages because the topic shrinks, the batch goes to a queue that does. If the topic was
deleted, or the batch is damaged in every copy, it can't be delivered: this is logged, counted, and
recorded in the log. If nothing can be written, or it is unknown whether the topic exists, the batch
waits. So does a batch that is damaged here only: the next leader delivers it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from batonmq._common import timeouts
from batonmq._core.records import Header, read_header
from batonmq.errors import (
    BatonError,
    DataLoss,
    NoQuorum,
    NotLeader,
    NotServing,
    QueueNotFound,
    TopicNotFound,
    TopicNotFoundDetail,
)
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.blocked_retention import REWRITE_INTERVAL_MS, blocked_segment_end
from batonmq_server.storage.core.checks import CheckedBatch, LocalTopic
from batonmq_server.storage.core.delay_queue import DelayedBatch
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.schedule import (
    ScheduledBatch,
    delivery,
    encode_scheduled,
    encode_withdrawn,
    read_scheduled,
)
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS, checked
from batonmq_server.storage.topic_cache import TopicCache

log = logging.getLogger(__name__)

ROUND_MAX = 256
"""Maximum number of batches that one write delivers."""
ROUND_BYTES_MAX = 16 * 1024 * 1024
CLOCK_INTERVAL_MS = 100
"""Interval at which the wall clock is read."""
RETRY_MS = 1_000
UNDELIVERED_MAX = 4_096
"""If this many due batches could not be delivered, no more are taken until they are retried."""

_ReadBatches = dict[DelayedBatch, ScheduledBatch | DataLoss]
_Topics = Mapping[str, LocalTopic | BatonError]
_UNDELIVERABLE = (TopicNotFound, QueueNotFound, DataLoss)


class ScheduledDeliverer:
    """Delivers the scheduled batches of a store.

    Args:
        age_ms_max: Retention time of messages; 0 for unlimited. A batch that still waits at half
            of this age is rewritten at the end of the log, so that its old segment can be removed.
    """

    def __init__(self, appender: Appender, topics: TopicCache, *, age_ms_max: int) -> None:
        self._appender, self._topics, self._age_ms_max = appender, topics, age_ms_max
        self._store, self._clock = appender.store, appender.clock
        self._waiting = appender.store.schedule.waiting
        self._changed = asyncio.Event()
        self._retry_ms = self._rewrite_ms = 0
        appender.metrics.scheduled_batches.set_function(lambda: len(self._waiting))

    def wake(self) -> None:
        """Tell the loop that a batch was scheduled."""
        self._changed.set()

    async def run(self) -> None:
        """Deliver until cancelled; run it as one task."""
        while True:
            try:
                if await self.deliver() or await self.rewrite_old():
                    continue
            except (NotServing, NotLeader, NoQuorum) as error:  # or the leader is unknown
                log.warning("delivery of scheduled batches delayed error=%s", error)
            await self._pause()

    async def deliver(self) -> bool:
        """Run one round of deliveries; return whether a batch was due."""
        now_ms = self._clock.monotonic_ms()
        if self._waiting.taken and now_ms >= self._retry_ms:
            self._waiting.release(self._waiting.taken)
        blocked = len(self._waiting.taken) >= UNDELIVERED_MAX
        if blocked or self._appender.retention.rejection() is not None:
            return False
        due = self._waiting.due(self._clock.unix_ms(), ROUND_MAX)
        if not due:
            return False
        batches = self._read(due)
        self._waiting.release(one.key for one in due if one not in batches)
        names = {read_header(one.batch).topic for one in _readable(batches)}
        topics = await self._topics.find_all(names)
        # There is no await from here to the write, so a batch that is cancelled is left out.
        batches = {entry: one for entry, one in batches.items() if entry.key in self._waiting}
        position = self._deliver(batches, self._topics.with_changes(topics))
        if any(entry.key in self._waiting for entry in batches):
            self._retry_ms = now_ms + RETRY_MS
        if position:
            await self._appender.flusher.wait_until_safe(position)
        else:
            await asyncio.sleep(0)  # the round may have waited for nothing
        now_unix_ms = self._clock.unix_ms()
        for entry in batches:
            if entry.key not in self._waiting:
                late_ms = max(0, now_unix_ms - entry.deliver_unix_ms)
                self._appender.metrics.scheduled_lateness_seconds.observe(late_ms / 1000)
        return True

    async def rewrite_old(self) -> bool:
        """Rewrite batches that block the oldest segment; return whether there may be more."""
        now_ms = self._clock.monotonic_ms()
        oldest = self._waiting.oldest_position() if now_ms >= self._rewrite_ms else None
        end = blocked_segment_end(self._appender, oldest, age_ms_max=self._age_ms_max)
        if end is None:
            self._rewrite_ms = max(self._rewrite_ms, now_ms + REWRITE_INTERVAL_MS)
            return False
        old_batches = self._read(self._waiting.before(end, ROUND_MAX))
        batches = [
            checked(encode_scheduled(replace(one, schedule_id=entry.schedule_id)))
            for entry, one in old_batches.items()
            if isinstance(one, ScheduledBatch)
        ]
        lost = {
            entry: one
            for entry, one in old_batches.items()
            if isinstance(one, DataLoss) and not self._waits_for_others(one)
        }
        outcomes = self._appender.append(batches, SYSTEM_TOPICS)
        stored = [one.next_position for one in outcomes if isinstance(one, StoreReceipt)]
        position = max(stored, default=0)
        if lost:
            position = max(position, self._withdraw(lost))
        await self._appender.flusher.wait_until_safe(position)
        return bool(position)

    async def _pause(self) -> None:
        """Wait until a batch may be due."""
        self._changed.clear()
        wait_ms: int | None = CLOCK_INTERVAL_MS if len(self._waiting) else None
        next_unix_ms = self._waiting.next_unix_ms()
        if next_unix_ms is not None and (in_ms := next_unix_ms - self._clock.unix_ms()) > 0:
            wait_ms = min(in_ms, CLOCK_INTERVAL_MS)
        try:
            async with timeouts.timeout(None if wait_ms is None else wait_ms / 1000):
                await self._changed.wait()
        except TimeoutError:
            return

    def _read(self, entries: Sequence[DelayedBatch]) -> _ReadBatches:
        """Read the batches of `entries`, in their order; only the first ones if they are long."""
        by_position = sorted(entries, key=lambda one: one.position)
        batches: _ReadBatches = {}
        size = 0
        scheduled = read_scheduled(self._store.log, [one.position for one in by_position])
        for entry, one in zip(by_position, scheduled, strict=True):
            batches[entry] = one
            size += len(one.batch) if isinstance(one, ScheduledBatch) else 0
            if size > ROUND_BYTES_MAX and len(entries) > 1:
                return self._read(entries[: len(entries) // 2])
        return {entry: batches[entry] for entry in entries}

    def _deliver(self, due_batches: _ReadBatches, topics: _Topics) -> int:
        """Deliver or withdraw batches; return the position up to which the log must be safe."""
        batches: list[CheckedBatch] = []
        withdrawn: dict[DelayedBatch, BatonError] = {}
        for entry, one in due_batches.items():
            try:
                batches.append(_delivery_batch(entry, one, topics))
            except _UNDELIVERABLE as error:
                if not self._waits_for_others(error):
                    withdrawn[entry] = error
            except BatonError as error:
                log.warning("scheduled batch delayed id=%d error=%s", entry.schedule_id, error)
        open_topics = {
            name: topic if isinstance(topic, BatonError) else topic.for_deliveries()
            for name, topic in topics.items()
        }
        outcomes = self._appender.append(batches, open_topics)
        self._appender.count_appended(batches, outcomes)
        for rejection in {
            type(one): one for one in outcomes if isinstance(one, BatonError)
        }.values():
            log.warning("delivery of scheduled batches delayed error=%s", rejection)
        position = max(
            (one.next_position for one in outcomes if isinstance(one, StoreReceipt)), default=0
        )
        return max(position, self._withdraw(withdrawn)) if withdrawn else position

    def _waits_for_others(self, error: BatonError) -> bool:
        return isinstance(error, DataLoss) and self._appender.role.leaves_to_others(error)

    def _withdraw(self, errors: Mapping[DelayedBatch, BatonError]) -> int:
        """Record in the log that batches can't be delivered; return the end of that record."""
        batch = checked(encode_withdrawn([entry.key for entry in errors]))
        (outcome,) = self._appender.append([batch], SYSTEM_TOPICS)
        if isinstance(outcome, BatonError):
            return 0
        for entry, error in errors.items():
            self._appender.metrics.undeliverable_batches.labels(error.reason).inc()
            log.error(
                "scheduled batch not delivered id=%d deliver_unix_ms=%d error=%s",
                entry.schedule_id,
                entry.deliver_unix_ms,
                error,
            )
        return outcome.next_position


def _readable(batches: _ReadBatches) -> list[ScheduledBatch]:
    return [one for one in batches.values() if isinstance(one, ScheduledBatch)]


def _delivery_batch(
    entry: DelayedBatch, one: ScheduledBatch | DataLoss, topics: _Topics
) -> CheckedBatch:
    """Return the batch that delivers `entry` to its queue.

    Raises:
        BatonError: it can't be delivered, either now or ever.
    """
    if isinstance(one, DataLoss):
        raise one
    header = read_header(one.batch)
    queue_id = open_queue(header, one.topic_id, topics[header.topic])
    batch = delivery(entry.key, one.batch, queue_id)
    return CheckedBatch(read_header(batch), batch)


def open_queue(header: Header, topic_id: int, topic: LocalTopic | BatonError) -> int:
    """Return the id of the queue that an accepted batch is delivered to.

    Raises:
        TopicNotFound: its topic was deleted; another topic may have the name now.
        QueueNotFound: the topic has no queues on this broker any more.
        NoQuorum: it is unknown whether the topic exists.
    """
    if isinstance(topic, BatonError):
        raise topic
    if topic.topic_id != topic_id:
        raise TopicNotFound(
            f"topic {header.topic} was deleted and created again since the batch was accepted",
            detail=TopicNotFoundDetail(topic=header.topic),
        )
    count = topic.delivery_queue_count
    if not count:
        raise QueueNotFound(
            f"topic {header.topic} has no queues on this broker any more",
            facts={"topic": header.topic},
        )
    return header.queue_id if header.queue_id < count else header.queue_id % count
