"""Dead letters: what the groups have given up, to be looked at, exported and sent again.

They lie in topics of their own, `%DLQ%<group>`, until those are cleaned like any other. Which of
them were sent again is kept as the progress of a group of the same name, which has no members:
acknowledged is what was redriven.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._core.dead_letters import DEAD_LETTER_PREFIX, Criteria, DeadLetter, dead_letter
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range, contains, normalize
from batonmq._core.records import Message
from batonmq._core.retries import dead_letter_topic
from batonmq.admin.admin import Admin
from batonmq.admin.message_queries import MessageQueries, StoredMessage
from batonmq.admin.redriver import RedriveOptions, Redriver, RedriveResult
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
    """The dead letters of a group, all together.

    Attributes:
        count: Dead letters that are still kept.
        redriven_count: Those of them that were sent again.
        oldest_unix_ms: When the oldest died; None without any, as `newest_unix_ms`.
    """

    group: str
    count: int
    redriven_count: int
    oldest_unix_ms: int | None
    newest_unix_ms: int | None


@dataclass(frozen=True, slots=True)
class DeadLetterSummaries:
    """What `DeadLetters.groups` found; `problems`: brokers that did not answer."""

    groups: tuple[DeadLetterSummary, ...]
    problems: tuple[str, ...]


class DeadLetters:
    """Asks storage and offsets; failures are the classes of `batonmq.errors`.

    Args:
        admin: Of the cluster; stays the caller's.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin, self._queries = admin, MessageQueries(admin)

    async def groups(self) -> DeadLetterSummaries:
        """The groups that have dead letters, by name."""
        topics = [
            one
            for one in await self._admin.list_topics()
            if one.name.startswith(DEAD_LETTER_PREFIX)
        ]
        extents, problems = await self._admin.extents(q for one in topics for q in one.queues)
        found = []
        for topic in topics:
            kept = [(queue, extents.get(queue, (0, 0))) for queue in topic.queues]
            kept = [(queue, extent) for queue, extent in kept if extent[0] < extent[1]]
            if kept:
                found.append(await self._group(topic.name, kept))
        return DeadLetterSummaries(tuple(found), problems)

    async def extent(self, group: str) -> dict[QueueRef, Range]:
        """The queues of a group's dead letters: first and next offset of each.

        Raises:
            TopicNotFound: the group never had any.
            Unreachable: a broker does not answer.
        """
        topic = dead_letter_topic(group)
        for one in await self._admin.list_topics():
            if one.name == topic:
                extents, problems = await self._admin.extents(one.queues)
                if problems:
                    raise Unreachable(f"not all dead letters can be seen: {'; '.join(problems)}")
                return extents
        raise TopicNotFound(
            f"group {group} has no dead letters: there is no topic {topic}",
            remedy="The groups that have some: baton dlq list.",
            detail=TopicNotFoundDetail(topic=topic),
        )

    async def read(self, group: str, criteria: Criteria = ALL) -> AsyncGenerator[DeadLetter, None]:
        """The dead letters of a group that were there at the call, queue by queue, oldest first.

        Raises:
            TopicNotFound: the group never had any.
            Unreachable: a broker or service does not answer.
        """
        extents = await self.extent(group)
        redriven = await self.redriven(group)
        for queue, (first, end) in sorted(extents.items()):
            offset = first
            if criteria.since_unix_ms and first < end:
                offset = max(first, await self._queries.offset_at(queue, criteria.since_unix_ms))
            while offset < end:
                page = await self._queries.page(queue, offset)
                for message in page.messages:
                    known = contains(redriven.get(queue, ()), message.offset)
                    letter = _letter(message, redriven=known)
                    if message.offset < end and criteria.accepts(letter):
                        yield letter
                if page.next_offset <= offset:
                    break
                offset = page.next_offset

    async def redriven(self, group: str) -> dict[QueueRef, Sequence[Range]]:
        """By queue the offsets of the dead letters that were sent again.

        Of more than 1,000 separate ranges the first ones are known.
        """
        progress = await self._admin.progress(dead_letter_topic(group))
        return {queue_from_pb(one.queue.queue): _handled(one) for one in progress}

    def redrive(
        self, group: str, order: RedriveOptions, criteria: Criteria = ALL
    ) -> AsyncGenerator[RedriveResult, None]:
        """Send dead letters again, and tell of each what became of it.

        What was sent again before, by whatever replay, is passed over, unless `order.again`. To
        repeat a replay that ended early, call it with the same `order.operation.op_id`: of each
        dead letter there is one copy, however often that is done within 7 days.

        Raises:
            TopicNotFound: the group never had any.
            NotSubscribed: the group does not read its retry topic: see `order.to_topic`.
            Unreachable: a broker or service does not answer; what was told is done.
        """
        return Redriver(self._admin, group, order).run(self.read(group, criteria))

    async def _group(self, topic: str, kept: Sequence[tuple[QueueRef, Range]]) -> DeadLetterSummary:
        group = topic.removeprefix(DEAD_LETTER_PREFIX)
        redriven = await self.redriven(group)
        count = sum(end - first for _, (first, end) in kept)
        done = sum(
            max(0, min(end, until) - max(first, begin))
            for queue, (first, end) in kept
            for begin, until in redriven.get(queue, ())
        )
        oldest, newest = list[int](), list[int]()
        for queue, (first, end) in kept:
            for offset, times in ((first, oldest), (end - 1, newest)):
                try:
                    times.append((await self._queries.at_offset(queue, offset)).store_unix_ms)
                except BatonError:  # cleaned since, or damaged: the count stands
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


def _handled(progress: offsets_pb.Progress) -> Sequence[Range]:
    ranges = [(one.first_offset, one.next_offset) for one in progress.acked]
    return normalize([(0, progress.committed_offset), *ranges])
