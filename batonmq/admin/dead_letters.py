"""Dead letters: messages with exhausted retries; list, read and redrive them.

The dead letters of a group are in the topic `%DLQ%<group>`, with the retention of any topic. The
redriven dead letters are recorded as progress of a group with the same name as the topic, which has
no members: an acknowledged offset is a redriven dead letter. Offsets answers with the first 1,000
ranges of a queue; a dead letter beyond them is redriven if storage has a copy of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace

from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._common.aio import without_group
from batonmq._core.dead_letters import (
    DEAD_LETTER_PREFIX,
    Criteria,
    DeadLetter,
    dead_letter,
)
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range, contains, normalize
from batonmq._core.records import Message
from batonmq._core.retries import dead_letter_topic
from batonmq.admin.admin import Admin
from batonmq.admin.message_queries import MessageQueries, StoredMessage
from batonmq.admin.redriver import (
    SEARCHES_AT_ONCE,
    RedriveOptions,
    Redriver,
    RedriveResult,
    find_copies,
)
from batonmq.admin.reports import queue_from_pb
from batonmq.errors import BatonError, TopicNotFound, TopicNotFoundDetail, Unreachable

__all__ = [
    "Criteria",
    "DeadLetter",
    "DeadLetterSummary",
    "DeadLetters",
    "RedriveOptions",
    "RedriveResult",
]

ALL = Criteria()


@dataclass(frozen=True, slots=True)
class DeadLetterSummary:
    """Counts and times of a group's dead letters.

    Attributes:
        count: Dead letters that are still stored.
        redriven_count: Stored dead letters that were redriven.
        oldest_unix_ms: Store time of the oldest dead letter; None if unknown, as
            `newest_unix_ms`.
    """

    group: str
    count: int
    redriven_count: int
    oldest_unix_ms: int | None
    newest_unix_ms: int | None


@dataclass(frozen=True, slots=True)
class _Redriven:
    """Which dead letters of a queue were redriven.

    Attributes:
        ranges: Their offsets, below `known_to`.
        known_to: Offset up to which `ranges` is complete; None if it is complete.
        more_count: Redriven dead letters from `known_to` on.
    """

    ranges: Sequence[Range] = ()
    known_to: int | None = None
    more_count: int = 0

    def count(self, first: int, end: int) -> int:
        """Return how many of the dead letters in [first, end) were redriven."""
        known = (max(0, min(end, until) - max(first, begin)) for begin, until in self.ranges)
        rest = 0 if self.known_to is None else max(0, end - max(first, self.known_to))
        return sum(known) + min(self.more_count, rest)


@dataclass(frozen=True, slots=True)
class DeadLetterSummaries:
    """The groups with dead letters; `problems` lists brokers that did not answer."""

    groups: tuple[DeadLetterSummary, ...]
    problems: tuple[str, ...]


class DeadLetters:
    """Lists, reads and redrives dead letters. Failures raise classes of `batonmq.errors`.

    Args:
        admin: Client of the cluster; the caller closes it.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin, self._queries = admin, MessageQueries(admin)

    async def groups(self) -> DeadLetterSummaries:
        """Return the groups that have dead letters, by name."""
        topics = [
            one
            for one in await self._admin.list_topics()
            if one.name.startswith(DEAD_LETTER_PREFIX)
        ]
        extents, problems = await self._admin.extents(q for one in topics for q in one.queues)
        summaries = []
        for topic in topics:
            kept = [(queue, extents.get(queue, (0, 0))) for queue in topic.queues]
            kept = [(queue, extent) for queue, extent in kept if extent[0] < extent[1]]
            if kept:
                summaries.append(await self._group(topic.name, kept))
        return DeadLetterSummaries(tuple(summaries), problems)

    async def extent(self, group: str) -> dict[QueueRef, Range]:
        """Return the first and next offset of each queue of a group's dead letters.

        Raises:
            TopicNotFound: The group never had a dead letter.
            Unreachable: A broker does not answer.
        """
        topic = dead_letter_topic(group)
        for one in await self._admin.list_topics():
            if one.name == topic:
                extents, problems = await self._admin.extents(one.queues)
                if problems:
                    raise Unreachable(f"can't read all dead letters: {'; '.join(problems)}")
                return extents
        raise TopicNotFound(
            f"group {group} has no dead letters: there is no topic {topic}",
            remedy="List the groups with dead letters: baton dlq list.",
            detail=TopicNotFoundDetail(topic=topic),
        )

    async def read(self, group: str, criteria: Criteria = ALL) -> AsyncGenerator[DeadLetter, None]:
        """Yield the dead letters that existed at the call, queue by queue, oldest first.

        Raises:
            TopicNotFound: The group never had a dead letter.
            Unreachable: A broker or service does not answer.
        """
        extents = await self.extent(group)
        redriven = await self._redriven(group)
        for queue, (first, end) in sorted(extents.items()):
            offset = first
            if criteria.since_unix_ms and first < end:
                offset = max(first, await self._queries.offset_at(queue, criteria.since_unix_ms))
            while offset < end:
                page = await self._queries.page(queue, offset)
                known = redriven.get(queue, _Redriven())
                letters = [
                    _letter(message, redriven=contains(known.ranges, message.offset))
                    for message in page.messages
                    if message.offset < end
                ]
                for letter in await self._settled(filter(criteria.accepts, letters), known):
                    yield letter
                if page.next_offset <= offset:
                    break
                offset = page.next_offset

    async def redriven(self, group: str) -> dict[QueueRef, Sequence[Range]]:
        """Return the offsets of redriven dead letters, by queue.

        If a queue has more than 1,000 separate ranges, only the first ones are returned.
        """
        return {queue: one.ranges for queue, one in (await self._redriven(group)).items()}

    def redrive(
        self, group: str, order: RedriveOptions, criteria: Criteria = ALL
    ) -> AsyncGenerator[RedriveResult, None]:
        """Redrive dead letters, and yield the result of each.

        Dead letters that any redrive has sent before are passed over, unless `order.again`. To
        continue a redrive that ended early, call this with the same `order.operation.op_id` and
        `order.resumed`: within 7 days each dead letter is copied once, however often the redrive is
        repeated.

        Raises:
            TopicNotFound: The group never had a dead letter.
            NotSubscribed: The group does not read its retry topic; see `order.to_topic`.
            Unreachable: A broker or service does not answer; the results yielded so far are done.
        """
        return Redriver(self._admin, group, order).run(self.read(group, criteria))

    async def _redriven(self, group: str) -> dict[QueueRef, _Redriven]:
        progress = await self._admin.progress(dead_letter_topic(group))
        return {queue_from_pb(one.queue.queue): _redriven_from_pb(one) for one in progress}

    async def _settled(
        self, letters: Iterable[DeadLetter], known: _Redriven
    ) -> Sequence[DeadLetter]:
        """Return dead letters; those beyond the known ranges are looked up."""
        if known.known_to is None:
            return tuple(letters)
        turns, known_to = asyncio.Semaphore(SEARCHES_AT_ONCE), known.known_to

        async def settle(letter: DeadLetter) -> DeadLetter:
            if letter.offset < known_to:
                return letter
            async with turns:
                return replace(letter, redriven=await self._has_copy(letter))

        with without_group():
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(settle(letter)) for letter in letters]
        return [call.result() for call in calls]

    async def _has_copy(self, letter: DeadLetter) -> bool:
        """Return whether storage has a copy of a dead letter that a redrive has sent."""
        return bool(await find_copies(self._queries, letter))

    async def _group(self, topic: str, kept: Sequence[tuple[QueueRef, Range]]) -> DeadLetterSummary:
        group = topic.removeprefix(DEAD_LETTER_PREFIX)
        redriven = await self._redriven(group)
        count = sum(end - first for _, (first, end) in kept)
        done = sum(redriven.get(queue, _Redriven()).count(*extent) for queue, extent in kept)
        oldest, newest = list[int](), list[int]()
        for queue, (first, end) in kept:
            for offset, times in ((first, oldest), (end - 1, newest)):
                try:
                    times.append((await self._queries.at_offset(queue, offset)).store_unix_ms)
                except BatonError:  # removed meanwhile, or damaged; the count is still right
                    continue
        return DeadLetterSummary(
            group, count, done, min(oldest, default=None), max(newest, default=None)
        )


def _letter(message: StoredMessage, *, redriven: bool) -> DeadLetter:
    return dead_letter(
        (message.message_id, message.queue, message.offset),
        (message.born_unix_ms, message.store_unix_ms),
        Message(message.body, message.tag, message.keys, message.properties),
        redriven=redriven,
    )


def _redriven_from_pb(progress: offsets_pb.Progress) -> _Redriven:
    acked = [(one.first_offset, one.next_offset) for one in progress.acked]
    ranges = normalize([(0, progress.committed_offset), *acked])
    if progress.acked_range_count <= len(acked):
        return _Redriven(ranges)
    more_count = progress.acked_count - sum(end - first for first, end in acked)
    return _Redriven(ranges, max(end for _, end in ranges), more_count)
