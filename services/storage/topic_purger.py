"""Removes the log segments that contain only messages of deleted topics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from batonmq._core.records import Header
from batonmq.errors import BatonError, DataLoss, NotServing
from batonmq_server.storage.appender import Appender
from batonmq_server.storage.checkpointer import Checkpointer
from batonmq_server.storage.core.commitlog import PositionRange, segment_path
from batonmq_server.storage.core.consumequeue import ConsumeQueue, topic_of
from batonmq_server.storage.core.files import Disk
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.purge import (
    SEGMENTS_MAX,
    PurgeOrder,
    batch_bytes,
    contains_only,
    encode_order,
)
from batonmq_server.storage.core.retention import SealedSegment
from batonmq_server.storage.core.schedule import TOPIC_ID
from batonmq_server.storage.core.tier_file import StoreUnreadable
from batonmq_server.storage.flusher import InThread
from batonmq_server.storage.schedule_server import SYSTEM_TOPICS, checked
from batonmq_server.storage.topic_cache import TopicCache

log = logging.getLogger(__name__)

ENTRIES_AT_ONCE = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeResult:
    """What a purge has removed, and what remains.

    Attributes:
        purged_bytes: Length of the purged segments.
        remaining_segments: Segments that contain other messages too.
        remaining_bytes: Bytes of the deleted topic in these segments.
        expiry_unix_ms: Time at which the last of these segments expires; 0 if none remains, or
            retention has no age limit.
    """

    purged_segments: int = 0
    purged_bytes: int = 0
    remaining_segments: int = 0
    remaining_bytes: int = 0
    expiry_unix_ms: int = 0


class TopicPurger:
    """Purges deleted topics, one at a time, on the leader.

    Args:
        newest_unix_ms: Returns a time by which all messages of a segment were stored.
        age_ms_max: Retention time of messages; 0 for unlimited.
        in_thread: Runs the blocking reads of the log outside the event loop.
    """

    def __init__(  # noqa: PLR0913  the parts of a node
        self,
        disk: Disk,
        appender: Appender,
        topics: TopicCache,
        checkpointer: Checkpointer,
        newest_unix_ms: Callable[[SealedSegment], int],
        *,
        age_ms_max: int,
        in_thread: InThread,
    ) -> None:
        self._disk, self._appender, self._topics = disk, appender, topics
        self._store, self._log = appender.store, appender.store.log
        self._checkpointer, self._newest_unix_ms = checkpointer, newest_unix_ms
        self._age_ms_max, self._in_thread = age_ms_max, in_thread
        self._one_at_a_time = asyncio.Lock()

    async def purge(self, topic: str) -> PurgeResult:
        """Remove what deleted topics of this name have left in the log, as far as possible.

        Raises:
            TopicExists: the topic is not deleted.
            NotServing, NotLeader: the node can't write; the order may be carried out all the same.
        """
        async with self._one_at_a_time:
            await self._topics.wait_until_gone(topic, {key[0] for key, _ in self._queues(topic)})
            queues = [(key, one) for key, one in self._queues(topic) if self._is_gone(topic, key)]
            if not any(queue.first_offset < queue.next_offset for _, queue in queues):
                return PurgeResult()
            await self._seal(queues)
            touched = await self._bytes_by_segment(queues)
            segments = [one for one in touched if await self._has_only_deleted_topics(one)]
            order = PurgeOrder(
                tuple(sorted({key[0] for key, _ in queues})), tuple(segments[:SEGMENTS_MAX])
            )
            await self._carry_out(order)
        remaining = [one for one in touched if one not in order.segments]
        result = PurgeResult(
            purged_segments=len(order.segments),
            purged_bytes=sum(end - begin for begin, end in order.segments),
            remaining_segments=len(remaining),
            remaining_bytes=sum(touched[one] for one in remaining),
            expiry_unix_ms=self._expiry(remaining),
        )
        log.info("topic purged topic=%s %s", topic, result)
        return result

    def _queues(self, topic: str) -> Iterator[tuple[QueueKey, ConsumeQueue]]:
        for key, queue in list(self._store.queues.items()):
            if topic_of(queue.folder) == topic:
                yield key, queue

    def _is_gone(self, topic: str, key: QueueKey) -> bool:
        return self._topics.is_gone(topic, key[0])

    async def _seal(self, queues: list[tuple[QueueKey, ConsumeQueue]]) -> None:
        """Close the current segment if it has messages of `queues`; wait until all is safe.

        On a full disk it stays open: a new segment may not fit, and the order fits into this one.
        """
        position = max(queue.last_position for _, queue in queues)
        is_open = self._log.segment_end(position) > self._log.next_position
        if is_open and self._appender.disk_rejection() is None:
            self._appender.roll()
        await self._appender.flusher.wait_until_safe(self._log.next_position)

    async def _bytes_by_segment(
        self, queues: list[tuple[QueueKey, ConsumeQueue]]
    ) -> dict[PositionRange, int]:
        """Return the segments with batches of `queues`, and the bytes of these batches in each."""
        begin = min(queue.first_position for _, queue in queues)
        end = max(queue.last_position for _, queue in queues) + 1
        segments = self._log.segments_between(begin, end)
        ends = np.array([end for _, end in segments], np.int64)
        sums = np.zeros(len(segments), np.int64)
        for _, queue in queues:
            offset, counted = queue.first_offset, -1
            while offset < queue.visible_offset:
                next_offset = min(offset + ENTRIES_AT_ONCE, queue.visible_offset)
                try:
                    entries = queue.read(offset, next_offset)
                    sums += batch_bytes(entries, ends, counted=counted)
                    counted = int(entries.positions[-1])
                except DataLoss as error:  # these bytes are not counted
                    log.warning("consume queue is damaged error=%s", error)
                await asyncio.sleep(0)
                offset = max(next_offset, queue.first_offset)  # retention may go on meanwhile
        return {
            segment: count for segment, count in zip(segments, sums.tolist(), strict=True) if count
        }

    async def _has_only_deleted_topics(self, segment: PositionRange) -> bool:
        verdicts: list[bool] = []
        known: dict[tuple[str, int], bool] = {}

        def is_unwanted(header: Header, _: memoryview) -> bool:
            topic = header.topic, header.topic_id
            if topic not in known:
                known[topic] = header.topic_id != TOPIC_ID and self._topics.is_gone(*topic)
            return known[topic]

        def examine(_: Any) -> None:
            path = segment_path(segment[0])
            verdicts.append(contains_only(self._disk, path, segment, is_unwanted))

        try:
            await self._in_thread(examine, None)
        except (FileNotFoundError, StoreUnreadable):  # removed meanwhile, or not readable now
            return False
        return verdicts[0]

    async def _carry_out(self, order: PurgeOrder) -> None:
        """Store an order, wait until it is safe, and take the checkpoint that carries it out."""
        batch = checked(encode_order(order))
        (outcome,) = self._appender.append([batch], SYSTEM_TOPICS, frees_space=True)
        if isinstance(outcome, BatonError):
            raise outcome
        await self._appender.flusher.wait_until_safe(outcome.next_position)
        if not await self._checkpointer.take():
            raise NotServing(
                f"{len(order.segments)} segments will be purged with the next checkpoint; none "
                "can be taken now",
                remedy="The log of the node says why: for example a full disk.",
            )

    def _expiry(self, remaining: list[PositionRange]) -> int:
        if not remaining or not self._age_ms_max:
            return 0
        return self._newest_unix_ms(SealedSegment(*remaining[-1])) + self._age_ms_max
