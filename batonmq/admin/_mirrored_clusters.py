"""What a mirror reads from both clusters: topics, and which queue is mirrored to which."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from batonmq._common.aio import without_group
from batonmq._core.mirror_marks import source_id
from batonmq._core.queues import QueueRef
from batonmq.admin._mirror_plan import bind_queues, no_queue_left
from batonmq.admin._queue_log import MarkedRun, QueueLog
from batonmq.admin.reports import Topic, queue_from_pb
from batonmq.errors import TopicExists

QUEUES_AT_ONCE = 8
"""Queues that have messages in memory at a time; each has about 8 MiB."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class MirroredClusters(NamedTuple):
    """Both clusters as a mirror has found them: names, and topics by name."""

    source: str
    target: str
    source_topics: Mapping[str, Topic]
    target_topics: Mapping[str, Topic]


class FoundPairs(NamedTuple):
    """Which queue is mirrored to which.

    Attributes:
        queues: For each queue that of the target, and the source offset up to which it has it.
        problems: Errors of topics with queues for which the target has none.
        rejected: The first problem with a writable queue; None if there is none.
    """

    queues: dict[QueueRef, tuple[QueueRef, int | None]]
    problems: tuple[str, ...]
    rejected: TopicExists | None


async def find_pairs(log: QueueLog, names: Sequence[str], clusters: MirroredClusters) -> FoundPairs:
    """Return which queue is mirrored to which, as the target says it.

    Args:
        log: Reads the target.
        names: The topics; those that the target does not have are left out.
    """
    pairs: dict[QueueRef, tuple[QueueRef, int | None]] = {}
    problems: list[str] = []
    rejected: TopicExists | None = None
    for name in names:
        topic, there = clusters.source_topics[name], clusters.target_topics.get(name)
        if there is None:
            continue
        ids = queue_ids(clusters.source, topic)
        extents = await log.extents(there.queues)

        async def last_marked(
            queue: QueueRef,
            ids: Mapping[int, QueueRef] = ids,
            extents: Mapping[QueueRef, tuple[int, int]] = extents,
        ) -> MarkedRun | None:
            return await log.last_marked(queue, ids.keys(), *extents.get(queue, (0, 0)))

        found = {
            queue: last.mark
            for queue, last in (await for_each(there.queues, last_marked)).items()
            if last is not None
        }
        bound = {queue: ids[mark.source_id] for queue, mark in found.items()}
        made = bind_queues(topic, there, bound)
        for here, other in made.pairs.items():
            pairs[here] = other, found[other].next_offset if other in found else None
        if made.left:
            error = no_queue_left(topic, there, made.left)
            problems.append(f"{error.reason}: {error.message}. {error.remedy}")
            if set(made.left) & set(topic.writable_queues):
                rejected = rejected or error
    return FoundPairs(pairs, tuple(problems), rejected)


async def for_each(
    items: Iterable[Item], do: Callable[[Item], Coroutine[Any, Any, Result]]
) -> dict[Item, Result]:
    """Return the result for each item; a few run at a time.

    Raises:
        BatonError: The only failure, or the first one.
    """
    turns = asyncio.Semaphore(QUEUES_AT_ONCE)

    async def run(item: Item) -> Result:
        async with turns:
            return await do(item)

    with without_group():
        async with asyncio.TaskGroup() as tasks:
            calls = {item: tasks.create_task(run(item)) for item in items}
    return {item: task.result() for item, task in calls.items()}


def unhandled_count(
    extents: Mapping[QueueRef, tuple[int, int]], progress: Sequence[offsets_pb.Progress]
) -> int:
    """Return how many messages of the queues are not handled."""
    known = {queue_from_pb(one.queue.queue): one for one in progress}
    count = 0
    for queue, (first, end) in extents.items():
        one = known.get(queue)
        acked = 0 if one is None else one.acked_count
        committed = 0 if one is None else one.committed_offset
        count += max(0, end - max(first, committed) - acked)
    return count


def queue_ids(cluster: str, topic: Topic) -> dict[int, QueueRef]:
    """Return the queues of a topic by the id of their marks."""
    return {
        source_id(cluster, topic.topic_id, topic.create_unix_ms, queue): queue
        for queue in topic.queues
    }
