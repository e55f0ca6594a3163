"""Finds messages of a topic: by offset, time, key, id, tag or condition; newest by default."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from batonmq._core.queues import QueueRef
from batonmq._core.subscription import parse_filter
from batonmq.admin.admin import Admin
from batonmq.admin.message_queries import MessageQueries, StoredMessage
from batonmq.admin.reports import QueueExtent
from batonmq.errors import OffsetOutOfRange, QueueNotFound

SHOWN_MAX = 50
SCANNED_MAX = 5_000
"""Messages that a search with a filter reads at most; its page says how many it has read."""
KEY_MATCHES_MAX = 100
_QUEUES_AT_ONCE = 8
_QUEUES_MAX = 256
"""Queues that a search over a whole topic reads; a topic with more needs a queue."""


@dataclass(frozen=True, slots=True)
class Found:
    """The messages of a search.

    Attributes:
        messages: In the order in which they are shown.
        scanned: Messages that were read.
        more: Whether there may be further ones; `notes` says where.
        next_offset: Offset at which the search in one queue continues; None if it is complete.
    """

    messages: tuple[StoredMessage, ...]
    scanned: int
    more: bool
    notes: tuple[str, ...] = ()
    next_offset: int | None = None


async def by_key(admin: Admin, topic: str, key: str) -> Found:
    """Return the newest messages with a key."""
    matches = await MessageQueries(admin).with_key(topic, key, count_max=KEY_MATCHES_MAX)
    return Found(matches.messages, len(matches.messages), matches.more)


async def in_queue(admin: Admin, queue: QueueRef, offset: int, expression: str) -> Found:
    """Return messages of one queue from an offset on that pass a filter, oldest first.

    An offset that is no longer stored counts as the first one.
    """
    accepts = parse_filter(expression).accepts
    queries, found, scanned = MessageQueries(admin), list[StoredMessage](), 0
    (first, end), problems = await _extent(admin, queue)
    offset = max(offset, first)
    while offset < end and len(found) < SHOWN_MAX and scanned < SCANNED_MAX:
        page = await queries.page(queue, offset, min(1_000, SCANNED_MAX - scanned))
        for message in page.messages:
            if len(found) == SHOWN_MAX:
                break
            offset = message.offset + 1
            scanned += 1
            if accepts(message.tag, message.keys, message.properties):
                found.append(message)
        if page.next_offset <= offset or not page.messages:
            offset = max(offset, page.next_offset)
            if not page.messages and page.next_offset <= offset:
                break
    more = offset < end
    return Found(tuple(found), scanned, more, problems, offset if more else None)


async def newest(
    admin: Admin, extents: Sequence[QueueExtent], expression: str, from_unix_ms: int = 0
) -> Found:
    """Return messages of all queues: the newest ones, or the first ones from a time on.

    Args:
        from_unix_ms: Store time of the first message; 0 for the newest messages.
    """
    accepts = parse_filter(expression).accepts
    queries, room = MessageQueries(admin), asyncio.Semaphore(_QUEUES_AT_ONCE)
    known = [one for one in extents if one.first_offset is not None][:_QUEUES_MAX]
    each = (
        max(SHOWN_MAX, SCANNED_MAX // max(1, len(known)))
        if expression not in ("", "*")
        else SHOWN_MAX
    )

    async def read(extent: QueueExtent) -> Sequence[StoredMessage]:
        first, end = extent.first_offset or 0, extent.next_offset or 0
        async with room:
            if from_unix_ms:
                offset = max(first, await queries.offset_at(extent.queue, from_unix_ms))
            else:
                offset = max(first, end - each)
            if offset >= end:
                return ()
            try:
                return (await queries.page(extent.queue, offset, each)).messages
            except OffsetOutOfRange:  # retention was quicker
                return ()

    async with asyncio.TaskGroup() as tasks:
        reading = [tasks.create_task(read(extent)) for extent in known]
    read_messages = [message for task in reading for message in task.result()]
    passing = [m for m in read_messages if accepts(m.tag, m.keys, m.properties)]
    passing.sort(key=lambda m: (m.store_unix_ms, m.queue, m.offset), reverse=not from_unix_ms)
    notes = []
    if len(extents) > _QUEUES_MAX:
        notes.append(f"only the first {_QUEUES_MAX} of {len(extents)} queues were read")
    return Found(
        tuple(passing[:SHOWN_MAX]), len(read_messages), len(passing) > SHOWN_MAX, tuple(notes)
    )


async def _extent(admin: Admin, queue: QueueRef) -> tuple[tuple[int, int], tuple[str, ...]]:
    extents, problems = await admin.extents([queue])
    if queue not in extents and not problems:
        raise QueueNotFound(f"topic {queue.topic} has no queue {queue.broker}/{queue.queue_id}")
    return extents.get(queue, (0, 0)), problems
