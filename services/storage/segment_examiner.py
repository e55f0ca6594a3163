"""Finds log segments of which no message is kept any more, so that they can be purged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batonmq._core.records import Header
from batonmq.errors import DataLoss
from batonmq_server.storage.core.commitlog import PositionRange, segment_path
from batonmq_server.storage.core.compaction_order import ORDERS, is_relocated
from batonmq_server.storage.core.compaction_order import decode_order as decode_compaction
from batonmq_server.storage.core.consumequeue import topic_of
from batonmq_server.storage.core.files import Disk
from batonmq_server.storage.core.outputs import OPENED
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.purge import TRIMMED, contains_only, decode_order
from batonmq_server.storage.core.schedule import TOPIC_ID
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.core.tier_file import StoreUnreadable
from batonmq_server.storage.flusher import InThread
from batonmq_server.storage.topic_cache import TopicCache

log = logging.getLogger(__name__)

SEGMENTS_AT_ONCE = 64
"""Maximum number of segments that one call compares with the consume queues."""
QUEUES_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class ExaminedSegment:
    """A segment of which no message is kept.

    Attributes:
        keys: Queues of topics that exist, of which it has, or had trimmed, messages.
    """

    segment: PositionRange
    keys: frozenset[QueueKey]


class SegmentExaminer:
    """Finds segments to purge, one at a time.

    Consume queues tell which segments are candidates. The log of a candidate is read: only it tells
    whether a batch is needed for something else than its messages.

    Args:
        checkpointed: Returns the position of the last checkpoint: orders before it are carried out.
        in_thread: Runs the blocking reads of the log outside the event loop.
    """

    def __init__(
        self,
        disk: Disk,
        store: MessageStore,
        topics: TopicCache,
        checkpointed: Callable[[], int],
        in_thread: InThread,
    ) -> None:
        self._disk, self._store, self._topics = disk, store, topics
        self._checkpointed, self._in_thread = checkpointed, in_thread
        self._needed_by: dict[PositionRange, QueueKey] = {}
        self._refused: set[PositionRange] = set()
        self._begin = 0

    async def find(self) -> ExaminedSegment | None:
        """Return a segment of which no message is kept; None if none was found in this round."""
        store, position = self._store, self._checkpointed()
        sealed = [
            segment
            for segment in store.log.sealed()
            if segment[1] <= position and not store.log.is_purged(segment[0])
        ]
        self._refused.intersection_update(sealed)
        self._needed_by = {one: self._needed_by[one] for one in sealed if one in self._needed_by}
        ahead = [one for one in sealed if one[0] >= self._begin] or sealed
        for segment in ahead[:SEGMENTS_AT_ONCE]:
            self._begin = segment[1]
            if segment in self._refused or await self._is_needed(segment):
                continue
            if self._store.compacted.is_writing(segment[1]):
                continue
            keys = await self._examine(segment, position)
            if keys is not None:
                return ExaminedSegment(segment, keys)
            self._refused.add(segment)
            return None
        return None

    async def _is_needed(self, segment: PositionRange) -> bool:
        """Return whether a queue has messages in a segment that are kept."""
        last = self._needed_by.get(segment)
        if last is not None and self._keeps(last, segment):
            return True
        for number, key in enumerate(list(self._store.queues), start=1):
            if number % QUEUES_AT_ONCE == 0:
                await asyncio.sleep(0)
            if self._keeps(key, segment):
                self._needed_by[segment] = key
                return True
        return False

    def _keeps(self, key: QueueKey, segment: PositionRange) -> bool:
        queue = self._store.queues.get(key)
        if queue is None or key[0] == TOPIC_ID:  # what the system needs is decided by reading
            return False
        try:
            kept = self._store.needs(key, *segment)
        except DataLoss:  # a damaged index tells nothing
            return True
        return kept and not self._topics.is_gone(topic_of(queue.folder), key[0])

    async def _examine(self, segment: PositionRange, position: int) -> frozenset[QueueKey] | None:
        """Read a segment; return the queues that it was about, None if it is needed.

        Args:
            position: Position of a checkpoint.
        """
        first_offsets = {key: queue.first_offset for key, queue in self._store.queues.items()}
        needed = self._store.compacted.ranges()
        keys: set[QueueKey] = set()
        verdicts: list[bool] = []

        def is_unwanted(header: Header, batch: memoryview) -> bool:
            key = header.topic_id, header.queue_id
            if key[0] == TOPIC_ID:
                about, is_settled = _settled(header, batch, position, needed)
                keys.update(about & first_offsets.keys())
                return is_settled
            if self._topics.is_gone(header.topic, header.topic_id):
                return True
            keys.add(key)
            if is_relocated(header):
                return not _contains(needed.get(key, ()), header.position)
            # A delivery or commit also says that something earlier has ended.
            return header.producer_id >= 0 and header.next_offset <= first_offsets.get(key, 0)

        def examine(_: Any) -> None:
            path = segment_path(segment[0])
            verdicts.append(contains_only(self._disk, path, segment, is_unwanted))

        try:
            await self._in_thread(examine, None)
        except (FileNotFoundError, StoreUnreadable):  # removed meanwhile, or not readable now
            return None
        return frozenset(keys) if verdicts[0] else None


def _settled(
    header: Header,
    batch: memoryview,
    position: int,
    needed: Mapping[QueueKey, Sequence[PositionRange]],
) -> tuple[set[QueueKey], bool]:
    """Return the queues that an order is about, and whether a batch of the system is not needed.

    Args:
        position: Position of a checkpoint.
        needed: Parts of the log that compacted queues need.
    """
    key, next_position = (header.topic_id, header.queue_id), header.position + header.length
    if key == (TOPIC_ID, TRIMMED):
        order = decode_order(header, bytes(batch), next_position)
        return {one[:2] for one in order.trims}, next_position <= position
    if key == ORDERS:
        queue = decode_compaction(header, bytes(batch)).key
        is_current = _contains(needed.get(queue, ()), header.position)
        return {queue}, not is_current and next_position <= position
    return set(), key == (TOPIC_ID, OPENED) and next_position <= position


def _contains(ranges: Iterable[PositionRange], position: int) -> bool:
    """Return whether a position is in one of the ranges."""
    return any(begin <= position < end for begin, end in ranges)
