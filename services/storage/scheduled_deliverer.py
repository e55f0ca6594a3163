"""Delivers batches when they are due, and keeps those that wait from holding up retention.

A batch is due when the wall clock has reached its time. The clock may jump: it is looked at before
every delivery, and often enough to see it jump ahead.

What was accepted is delivered whatever the topic's permission has become. Of a queue that takes no
more messages, because the topic shrinks, it goes to one that does. If the topic is gone it goes
nowhere: that is logged, counted, and noted in the log. If nothing can be written, or it is not
known whether the topic exists, it waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from batonmq._core.records import HEADER_BYTES, Header, check_stamp, read_header
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
from batonmq_server.storage.core.delay_queue import DelayedBatch
from batonmq_server.storage.core.producers import StoreReceipt
from batonmq_server.storage.core.retention import DiskState
from batonmq_server.storage.core.schedule import (
    ScheduledBatch,
    delivery,
    encode_scheduled,
    encode_withdrawn,
    read_scheduled,
)
from batonmq_server.storage.core.store import CheckedBatch, TopicQueues
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS, checked
from batonmq_server.storage.topic_cache import TopicCache

log = logging.getLogger(__name__)

ROUND_MAX = 256
"""Batches that are delivered with one write."""
ROUND_BYTES_MAX = 16 * 1024 * 1024
STEP_MS = 100
"""The wall clock is looked at so often."""
RETRY_MS = 1_000
UNSETTLED_MAX = 4_096
"""With so many batches that could not be delivered, others wait too."""
MOVE_INTERVAL_MS = 10_000
MOVE_AGE_MS_MIN = 600_000
"""What was written more lately stays where it is, however full the disk."""

_Found = dict[DelayedBatch, ScheduledBatch | DataLoss]
_Topics = Mapping[str, TopicQueues | BatonError]
_GIVE_UP = (TopicNotFound, QueueNotFound, DataLoss)


class ScheduledDeliverer:
    """See the module.

    Args:
        age_ms_max: Messages may be removed at this age; 0 for never. A batch that still waits at
            half of it is written anew, so that what lies around the old place can be removed.
    """

    def __init__(self, appender: Appender, topics: TopicCache, *, age_ms_max: int) -> None:
        self._appender, self._topics, self._age_ms_max = appender, topics, age_ms_max
        self._store, self._clock = appender.store, appender.clock
        self._waiting = appender.store.schedule.waiting
        self._changed = asyncio.Event()
        self._retry_ms = self._move_ms = 0
        appender.metrics.scheduled_batches.set_function(lambda: len(self._waiting))

    def wake(self) -> None:
        """Note that there is something new to wait for."""
        self._changed.set()

    async def run(self) -> None:
        """Deliver for ever; to be run as one task."""
        while True:
            try:
                if await self.deliver() or await self.move():
                    continue
            except (NotServing, NotLeader, NoQuorum) as error:  # or nobody knows who is leader
                log.warning("scheduled batches wait error=%s", error)
            await self._pause()

    async def deliver(self) -> bool:
        """One round; whether something was due."""
        now_ms = self._clock.monotonic_ms()
        if self._waiting.taken and now_ms >= self._retry_ms:
            self._waiting.release(self._waiting.taken)
        blocked = len(self._waiting.taken) >= UNSETTLED_MAX
        if blocked or self._appender.retention.refusal() is not None:
            return False
        due = self._waiting.due(self._clock.unix_ms(), ROUND_MAX)
        if not due:
            return False
        found = self._read(due)
        self._waiting.release(one.key for one in due if one not in found)
        names = {read_header(one.batch).topic for one in _good(found)}
        topics = await self._topics.find_all(names)
        # From here to the write nothing else happens: what was cancelled before is left out.
        found = {entry: one for entry, one in found.items() if entry.key in self._waiting}
        position = self._settle(found, self._topics.as_of_now(topics))
        if any(entry.key in self._waiting for entry in found):
            self._retry_ms = now_ms + RETRY_MS
        await self._appender.flusher.wait_until_safe(position)
        now_unix_ms = self._clock.unix_ms()
        for entry in found:
            if entry.key not in self._waiting:
                late_ms = max(0, now_unix_ms - entry.deliver_unix_ms)
                self._appender.metrics.scheduled_lateness_seconds.observe(late_ms / 1000)
        return True

    async def move(self) -> bool:
        """Write anew what keeps the oldest segment from being removed; whether there was more."""
        now_ms, log_ = self._clock.monotonic_ms(), self._store.log
        oldest = self._waiting.oldest_position() if now_ms >= self._move_ms else None
        end = next((end for begin, end in log_.sealed() if begin <= (oldest or 0) < end), None)
        if oldest is None or end is None or not self._holds_up(oldest):
            self._move_ms = max(self._move_ms, now_ms + MOVE_INTERVAL_MS)
            return False
        found = self._read(self._waiting.before(end, ROUND_MAX))
        batches = [
            checked(encode_scheduled(replace(one, schedule_id=entry.schedule_id)))
            for entry, one in found.items()
            if isinstance(one, ScheduledBatch)
        ]
        lost = {entry: one for entry, one in found.items() if isinstance(one, DataLoss)}
        outcomes = self._appender.append(batches, SYSTEM_TOPICS)
        stored = [one.next_position for one in outcomes if isinstance(one, StoreReceipt)]
        position = max(stored, default=0)
        if lost:
            position = max(position, self._give_up(lost))
        await self._appender.flusher.wait_until_safe(position)
        return bool(position)

    async def _pause(self) -> None:
        """Until something may be due."""
        self._changed.clear()
        wait_ms: int | None = STEP_MS if len(self._waiting) else None
        next_unix_ms = self._waiting.next_unix_ms()
        if next_unix_ms is not None and (in_ms := next_unix_ms - self._clock.unix_ms()) > 0:
            wait_ms = min(in_ms, STEP_MS)
        try:
            async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                await self._changed.wait()
        except TimeoutError:
            return

    def _read(self, entries: Sequence[DelayedBatch]) -> _Found:
        """What waits, in the order of `entries`; only the first of them if they are very long."""
        by_position = sorted(entries, key=lambda one: one.position)
        found: _Found = {}
        size = 0
        scheduled = read_scheduled(self._store.log, [one.position for one in by_position])
        for entry, one in zip(by_position, scheduled, strict=True):
            found[entry] = one
            size += len(one.batch) if isinstance(one, ScheduledBatch) else 0
            if size > ROUND_BYTES_MAX and len(entries) > 1:
                return self._read(entries[: len(entries) // 2])
        return {entry: found[entry] for entry in entries}

    def _settle(self, found: _Found, topics: _Topics) -> int:
        """Deliver, or give up, what can be; the position at which all of that is safe."""
        batches: list[CheckedBatch] = []
        given_up: dict[DelayedBatch, BatonError] = {}
        for entry, one in found.items():
            try:
                batches.append(_delivery(entry, one, topics))
            except _GIVE_UP as error:
                given_up[entry] = error
            except BatonError as error:
                log.warning("scheduled batch waits id=%d error=%s", entry.schedule_id, error)
        open_topics = {
            name: topic if isinstance(topic, BatonError) else replace(topic, writable=True)
            for name, topic in topics.items()
        }
        outcomes = self._appender.append(batches, open_topics)
        self._appender.count_appended(batches, outcomes)
        for refusal in {type(one): one for one in outcomes if isinstance(one, BatonError)}.values():
            log.warning("scheduled batches wait error=%s", refusal)
        position = max(
            (one.next_position for one in outcomes if isinstance(one, StoreReceipt)), default=0
        )
        return max(position, self._give_up(given_up)) if given_up else position

    def _give_up(self, errors: Mapping[DelayedBatch, BatonError]) -> int:
        """Note in the log that these are not to be delivered; the position at which it is safe."""
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

    def _holds_up(self, position: int) -> bool:
        """Whether the batch there has waited so long that it stands in the way of retention."""
        try:
            head = self._store.log.read(position, HEADER_BYTES)
            header = read_header(head)
            check_stamp(head)
        except BatonError:  # reading all of it will tell
            return True
        age_ms = self._clock.unix_ms() - header.store_unix_ms
        if self._appender.retention.state >= DiskState.CLEAN_FORCIBLY:
            return age_ms >= MOVE_AGE_MS_MIN
        return 0 < self._age_ms_max <= 2 * age_ms


def _good(found: _Found) -> list[ScheduledBatch]:
    return [one for one in found.values() if isinstance(one, ScheduledBatch)]


def _delivery(entry: DelayedBatch, one: ScheduledBatch | DataLoss, topics: _Topics) -> CheckedBatch:
    """The batch that delivers an entry.

    Raises:
        BatonError: it can't be delivered, now or ever.
    """
    if isinstance(one, DataLoss):
        raise one
    header = read_header(one.batch)
    queue_id = _queue(header, one.topic_id, topics[header.topic])
    batch = delivery(entry.key, one.batch, queue_id)
    return CheckedBatch(read_header(batch), batch)


def _queue(header: Header, topic_id: int, topic: TopicQueues | BatonError) -> int:
    """The queue that a batch goes to.

    Raises:
        TopicNotFound: its topic is gone, though another one may have its name.
        QueueNotFound: the topic has no queues here any more.
        NoQuorum: nobody knows.
    """
    if isinstance(topic, BatonError):
        raise topic
    if topic.topic_id != topic_id:
        raise TopicNotFound(
            f"topic {header.topic} was made anew since",
            detail=TopicNotFoundDetail(topic=header.topic),
        )
    count = topic.queue_count if topic.write_queue_count is None else topic.write_queue_count
    if not count:
        raise QueueNotFound(
            f"topic {header.topic} has no queues here any more", facts={"topic": header.topic}
        )
    return header.queue_id if header.queue_id < count else header.queue_id % count
