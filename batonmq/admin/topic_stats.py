"""Statistics of the queues of a topic: offsets, bytes, time of the last message, and rate."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from batonmq._core.queues import QueueRef
from batonmq.admin.admin import Admin
from batonmq.admin.message_queries import MessageQueries
from batonmq.errors import BatonError, MessageNotFound, OffsetOutOfRange

_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Statistics of one queue at one moment.

    Attributes:
        first_offset: First stored offset; None, as `next_offset`, if the broker does not answer.
        last_store_unix_ms: When its last message was stored, by the clock of storage; None if it
            holds none.
        per_s: Messages a second since the look before; None at the first look.
        stored_bytes: Bytes of its batches in the log of the leader, compressed as they are, without
            indexes; each follower has as many. None if the broker does not answer, or the index is
            damaged.
        count: Number of stored messages; None if the broker does not answer.
    """

    queue: QueueRef
    first_offset: int | None
    next_offset: int | None
    last_store_unix_ms: int | None
    per_s: float | None
    stored_bytes: int | None = None
    count: int | None = None


class TopicStats:
    """Reads the statistics of one topic repeatedly.

    Args:
        admin: Client of the cluster; the caller closes it.
    """

    def __init__(self, admin: Admin, topic: str) -> None:
        self._admin, self._topic = admin, topic
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._before: Mapping[QueueRef, int] = {}
        self._before_s = 0.0

    async def look(self) -> tuple[tuple[QueueStats, ...], tuple[str, ...]]:
        """Return the queues, ascending, and the errors of brokers that failed.

        Raises:
            TopicNotFound: The topic does not exist.
        """
        detail = await self._admin.describe_topic(self._topic)
        now_s = asyncio.get_running_loop().time()
        problems = list(detail.problems)
        stored_bytes, bytes_problems = await self._admin.stored_bytes(detail.topic.queues)
        problems += (one for one in bytes_problems if one not in problems)
        async with asyncio.TaskGroup() as tasks:
            calls = {
                held.queue: tasks.create_task(
                    self._last_store(held.queue, held.first_offset, held.next_offset, problems)
                )
                for held in detail.queues
            }
        ends = {held.queue: held.next_offset for held in detail.queues}
        queue_stats = tuple(
            QueueStats(
                held.queue,
                held.first_offset,
                held.next_offset,
                calls[held.queue].result(),
                self._rate(held.queue, held.next_offset, now_s),
                stored_bytes.get(held.queue),
                held.count,
            )
            for held in detail.queues
        )
        self._before = {queue: end for queue, end in ends.items() if end is not None}
        self._before_s = now_s
        return queue_stats, tuple(problems)

    def _rate(self, queue: QueueRef, next_offset: int | None, now_s: float) -> float | None:
        before = self._before.get(queue)
        if before is None or next_offset is None or now_s <= self._before_s:
            return None
        return max(next_offset - before, 0) / (now_s - self._before_s)

    async def _last_store(
        self, queue: QueueRef, first: int | None, end: int | None, problems: list[str]
    ) -> int | None:
        if first is None or end is None or first == end:
            return None
        async with self._room:
            try:
                message = await MessageQueries(self._admin).at_offset(queue, end - 1)
            except (MessageNotFound, OffsetOutOfRange):  # retention was quicker
                return None
            except BatonError as error:
                problems.append(f"{queue}: {error.reason}: {error.message}")
                return None
        return message.store_unix_ms
