"""Mirrors topics to another cluster, with the progress of groups.

Each queue is copied to one queue of the target, in order, batch by batch. The mark of a batch
(`batonmq._core.mirror_marks`) says from which offset of which queue it is, so the log of the target
is the only state of a mirror: it may be killed at any time, and started again anywhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from batonmq._common.aio import without_group
from batonmq._core.queues import QueueRef
from batonmq.admin._group_mirror import (
    GroupMirror,
    check_group_can_be_mirrored,
    end_standby,
    is_standby,
    make_standby,
)
from batonmq.admin._mirror_plan import find_topic_problem
from batonmq.admin._mirrored_clusters import (
    QUEUES_AT_ONCE,
    FoundPairs,
    MirroredClusters,
    find_pairs,
    for_each,
    queue_ids,
    unhandled_count,
)
from batonmq.admin._queue_log import QueueLog
from batonmq.admin._queue_mirror import BACKOFF, QueueMirror, Start
from batonmq.admin.admin import Admin
from batonmq.admin.mirror_reports import (
    MirroredGroup,
    MirroredQueue,
    MirrorPlan,
    MirrorReport,
    MirrorStatus,
)
from batonmq.admin.reports import MessageType, Topic
from batonmq.errors import (
    BatonError,
    GroupNotFound,
    InvalidArgument,
    Retry,
    TopicExists,
    TopicNotFound,
    TopicNotFoundDetail,
    Unreachable,
)

log = logging.getLogger(__name__)

END_INTERVAL_S = 0.2
"""How often the ends of the source are read, one call per broker."""
TOPIC_INTERVAL_S = GROUP_INTERVAL_S = 5.0
_KNOWN_WITHIN_S, _PAUSE_S = 10.0, 0.1
"""Time within which the brokers know a new topic, and how often they are asked."""
GROUP_SHARE_MAX = 0.1
"""Greatest share of the time that translations may take: what waits for a retry has to be read."""


class Mirror:
    """Mirrors topics from one cluster to another.

    Args:
        source: Client of the source; the caller closes it.
        target: Client of the target; the caller closes it.
        topics: Names of the topics.
        groups: Names of the groups whose progress is translated.
        by: Name of the operator, shown in reports of the standby groups.
        include_mirrored: Copy also what other mirrors have brought to the source, except from the
            target: for a new cluster in place of a lost one.
    """

    def __init__(
        self,
        source: Admin,
        target: Admin,
        topics: Sequence[str],
        groups: Sequence[str] = (),
        *,
        by: str = "mirror",
        include_mirrored: bool = False,
    ) -> None:
        if not topics:
            raise InvalidArgument("no topic is named", facts={"field": "topic"})
        self._source, self._target, self._by = source, target, by
        self._topics, self._groups = tuple(dict.fromkeys(topics)), tuple(dict.fromkeys(groups))
        self._logs = QueueLog(source), QueueLog(target)
        self._include_mirrored = include_mirrored
        self._start: Start = ""
        self._queues: tuple[QueueMirror, ...] = ()
        self._group_mirrors: tuple[GroupMirror, ...] = ()
        self._problems = self._left = tuple[str, ...]()
        self._counts = 0, 0, 0
        self._before = MirroredClusters("", "", {}, {})

    async def plan(self) -> MirrorPlan:
        """Return what `run` would do. Changes nothing.

        Raises:
            TopicNotFound, GroupNotFound: A topic or a group of the source does not exist.
            Unreachable: A cluster does not answer.
        """
        clusters = await self._clusters()
        problems: list[BatonError] = []
        for name in self._topics:
            there = clusters.target_topics.get(name)
            problem = find_topic_problem(
                clusters.source, clusters.source_topics[name], clusters.target, there
            )
            if problem is not None:
                problems.append(problem)
        new_standbys, in_use = [], []
        for name in self._groups:
            try:
                check_group_can_be_mirrored(await self._source.describe_group(name))
                if not is_standby(await self._target.describe_group(name)):
                    in_use.append(name)
            except GroupNotFound:
                await self._source.describe_group(name)  # raises if the source does not have it
                new_standbys.append(name)
            except InvalidArgument as error:
                problems.append(error)
        count = 0
        if not problems:
            pairs = await find_pairs(self._logs[1], self._topics, clusters)
            problems += [] if pairs.rejected is None else [pairs.rejected]
            count = await self._missing_count(clusters, pairs)
        topics = [clusters.source_topics[name] for name in self._topics]
        return MirrorPlan(
            self._topics,
            tuple(name for name in self._topics if name not in clusters.target_topics),
            sum(len(topic.writable_queues) for topic in topics),
            count,
            tuple(new_standbys),
            tuple(in_use),
            tuple(problems),
        )

    async def run(
        self,
        *,
        once: bool = False,
        on_report: Callable[[MirrorReport], None] = lambda _: None,
        report_interval_s: float = 10.0,
        progress_interval_s: float = GROUP_INTERVAL_S,
        start: Start = "",
    ) -> MirrorReport:
        """Mirror until cancelled; return what was done.

        Args:
            once: Return when the messages that exist now are copied, and the progress is
                translated.
            on_report: Called with what was done, every `report_interval_s`.
            report_interval_s: Seconds between two reports.
            progress_interval_s: Seconds between two translations of the progress of groups; more if
                they take more than a tenth of the time.
            start: Where to begin with a queue of which the target may have had messages that its
                retention has removed: `first` for all that the source still has, or `end`; empty
                to leave the queue alone, with a problem in the report.

        Raises:
            BatonError: The first problem of the plan; or a topic has changed since.
        """
        self._start = start
        await self._begin()
        if once and self._problems:
            raise Unreachable("; ".join(self._problems))
        ends = {one.source: one.source_end for one in self._queues} if once else None
        with without_group():
            async with asyncio.TaskGroup() as tasks:
                report = tasks.create_task(self._report(on_report, report_interval_s))
                while not await self._copy(ends, progress_interval_s):
                    log.info("a topic has other queues now: beginning again")
                    await self._begin_again(once=once)
                report.cancel()
        for group_mirror in self._group_mirrors:
            await group_mirror.translate(self._queues)
        return self._reported(0.0)

    async def _begin(self) -> None:
        """Create what is missing, and find out where each queue continues."""
        plan = await self.plan()
        if plan.problems:
            raise plan.problems[0]
        await self._prepare(plan)
        await self._read_ends()

    async def _begin_again(self, *, once: bool) -> None:
        """Begin while the mirror runs; unless it shall end, try until the clusters answer."""
        failures = 0
        while True:
            try:
                return await self._begin()
            except BatonError as error:
                if once or error.retry is Retry.NEVER:
                    raise
                self._problems = (f"{error.reason}: {error.message}",)
                random = self._target.directory.random
                delay_ms = BACKOFF.delay_ms(failures, random, error.retry_after_ms)
            await asyncio.sleep(delay_ms / 1000)
            failures += 1

    async def _copy(self, ends: Mapping[QueueRef, int] | None, progress_interval_s: float) -> bool:
        """Copy up to `ends`, or for ever; return False if a topic has other queues now."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch_topics())
            copies = tasks.create_task(self._copy_queues(ends))
            helpers = [watch, copies, tasks.create_task(self._watch_ends())]
            if self._group_mirrors:
                helpers.append(tasks.create_task(self._translate_groups(progress_interval_s)))
            await asyncio.wait([watch, copies], return_when=asyncio.FIRST_COMPLETED)
            done = copies.done()
            for helper in helpers:
                helper.cancel()
        return done

    async def _copy_queues(self, ends: Mapping[QueueRef, int] | None) -> None:
        async with asyncio.TaskGroup() as copies:
            for one in self._queues:
                copies.create_task(one.run(None if ends is None else ends.get(one.source, 0)))

    async def status(self) -> MirrorStatus:
        """Return how far the target is, queue by queue. Changes nothing.

        Raises:
            TopicNotFound: A topic of the source does not exist.
        """
        clusters = await self._clusters()
        queues: list[MirroredQueue] = []
        pairs, problems_found, _ = await find_pairs(self._logs[1], self._topics, clusters)
        problems = [*problems_found]
        ends, missing = await self._source.extents(pairs)
        problems += missing
        for here, (there, last) in sorted(pairs.items()):
            if here not in ends:
                continue
            first, end = ends[here]
            begin = last if last is not None else first
            removed = max(0, first - begin)
            queues.append(MirroredQueue(here, there, last, end, max(0, end - begin), removed))
        targets, missing = await self._target.extents([one.target for one in queues])
        problems += missing
        sources = {one.source: ends[one.source] for one in queues}
        groups = [await self._group_status(name, sources, targets) for name in self._groups]
        return MirrorStatus(tuple(queues), tuple(groups), tuple(problems))

    # ---- both clusters

    async def _clusters(self) -> MirroredClusters:
        source, target = await self._source.cluster(), await self._target.cluster()
        here = {one.name: one for one in await self._source.list_topics()}
        there = {one.name: one for one in await self._target.list_topics()}
        for name in self._topics:
            if name not in here:
                raise TopicNotFound(
                    f"topic {name} does not exist in the source",
                    detail=TopicNotFoundDetail(topic=name),
                )
        return MirroredClusters(source.name, target.name, here, there)

    async def _missing_count(self, clusters: MirroredClusters, pairs: FoundPairs) -> int:
        queues = [q for name in self._topics for q in clusters.source_topics[name].queues]
        extents, unreachable = await self._source.extents(queues)
        if unreachable:
            raise Unreachable("; ".join(unreachable))
        last = {queue: mirrored for queue, (_, mirrored) in pairs.queues.items()}
        return sum(
            max(0, end - max(first, last.get(queue) or 0))
            for queue, (first, end) in extents.items()
        )

    async def _group_status(
        self,
        name: str,
        sources: Mapping[QueueRef, tuple[int, int]],
        targets: Mapping[QueueRef, tuple[int, int]],
    ) -> MirroredGroup:
        try:
            state = "standby" if is_standby(await self._target.describe_group(name)) else "in use"
        except GroupNotFound:
            state = "missing"
        return MirroredGroup(
            name,
            state,
            unhandled_count(sources, await self._source.progress(name)),
            unhandled_count(targets, await self._target.progress(name)),
        )

    # ---- the start

    async def _prepare(self, plan: MirrorPlan) -> None:
        """Create what is missing in the target, and find out where to continue."""
        before = await self._clusters()
        for name in plan.new_topics:
            topic = before.source_topics[name]
            await self._target.create_topic(
                name,
                len(topic.writable_queues),
                message_type=cast(MessageType, topic.message_type),
                retention_ms=topic.retention_ms,
                retention_bytes=topic.retention_bytes,
            )
        for name in plan.new_standbys:
            await make_standby(self._target, name, self._by)
        self._group_mirrors = tuple(
            GroupMirror(self._source, self._target, name) for name in self._groups
        )
        clusters = self._before = await self._clusters()
        await self._until_known(
            queue for name in self._topics for queue in clusters.target_topics[name].queues
        )
        turns = asyncio.Semaphore(QUEUES_AT_ONCE)
        here_ids = {
            queue: number
            for name in self._topics
            for number, queue in queue_ids(clusters.source, clusters.source_topics[name]).items()
        }
        there_ids = {
            queue: number
            for name in self._topics
            for number, queue in queue_ids(clusters.target, clusters.target_topics[name]).items()
        }
        pairs, self._left, rejected = await find_pairs(self._logs[1], self._topics, clusters)
        if rejected is not None:
            raise rejected
        self._counts = self._counted()
        self._queues = tuple(
            QueueMirror(
                self._logs,
                (here, there),
                (here_ids[here], there_ids[there]),
                turns,
                include_mirrored=self._include_mirrored,
                start=self._start,
            )
            for here, (there, _) in sorted(pairs.items())
        )
        committed = [await one.committed() for one in self._group_mirrors]

        async def open_(one: QueueMirror) -> None:
            await one.open(min((group.get(one.target, 0) for group in committed), default=None))

        await for_each(self._queues, open_)

    async def _until_known(self, queues: Iterable[QueueRef]) -> None:
        """Wait until the brokers of the target know the queues of a new topic."""
        left = set(queues)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _KNOWN_WITHIN_S
        while left:
            extents, problems = await self._target.extents(left)
            left -= extents.keys()
            if left and loop.time() > deadline:
                raise Unreachable("; ".join(problems) or f"no broker of the target has {min(left)}")
            if left:
                await asyncio.sleep(_PAUSE_S)

    # ---- while it runs

    async def _read_ends(self) -> None:
        """Read the ends of all queues of the source, one call per broker."""
        extents, problems = await self._source.extents(one.source for one in self._queues)
        self._problems = problems
        for one in self._queues:
            if one.source in extents:
                one.note_end(extents[one.source][1])

    async def _watch_ends(self) -> None:
        while True:
            await asyncio.sleep(END_INTERVAL_S)
            try:
                await self._read_ends()
            except BatonError as error:
                self._problems = (f"{error.reason}: {error.message}",)

    async def _watch_topics(self) -> None:
        """Return when a topic has other queues than before; that some are retiring is no change.

        Raises:
            TopicExists: A topic was created anew.
        """
        while True:
            await asyncio.sleep(TOPIC_INTERVAL_S)
            try:
                now = await self._clusters()
            except TopicNotFound:
                raise
            except BatonError as error:
                log.debug("topics not read error=%s", error)
                continue
            for name in self._topics:
                for before, after in (
                    (self._before.source_topics[name], now.source_topics.get(name)),
                    (self._before.target_topics[name], now.target_topics.get(name)),
                ):
                    if after is None or _identity(before) != _identity(after):
                        raise TopicExists(
                            f"topic {name} has changed while it was mirrored: it was deleted, or "
                            "created anew",
                            remedy="Start the mirror again.",
                            facts={"topic": name},
                        )
                    if before.queues != after.queues:
                        return

    async def _translate_groups(self, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begin_s = loop.time()
            for one in self._group_mirrors:
                await one.translate(self._queues)
            took_s = loop.time() - begin_s
            await asyncio.sleep(max(interval_s, took_s / GROUP_SHARE_MAX))

    async def _report(self, on_report: Callable[[MirrorReport], None], interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        copied, begin_s = 0, loop.time()
        while True:
            await asyncio.sleep(interval_s)
            now_s = loop.time()
            report = self._reported(0.0)
            rate = (report.copied_count - copied) / max(now_s - begin_s, 0.001)
            copied, begin_s = report.copied_count, now_s
            on_report(self._reported(rate))

    def _counted(self) -> tuple[int, int, int]:
        """Return the numbers of copied, removed and skipped messages since the start."""
        copied, removed, skipped = self._counts
        return (
            copied + sum(one.copied_count for one in self._queues),
            removed + sum(one.removed_count for one in self._queues),
            skipped + sum(one.skipped_count for one in self._queues),
        )

    def _reported(self, rate: float) -> MirrorReport:
        problems = [f"queue {one.source}: {one.problem}" for one in self._queues if one.problem]
        problems += [
            f"group {one.name}: {one.problem}" for one in self._group_mirrors if one.problem
        ]
        copied, removed, skipped = self._counted()
        lag = sum(one.lag for one in self._queues)
        found = (*self._problems, *self._left, *problems)
        in_use = tuple(one.name for one in self._group_mirrors if not one.standby)
        return MirrorReport(copied, rate, lag, removed, skipped, found, in_use)


async def begin_standby(admin: Admin, group: str, *, by: str, dry_run: bool = False) -> None:
    """Make a group of the target a standby, so that a mirror translates progress for it.

    Args:
        by: Name of the operator, shown in reports of the group.
        dry_run: Only check that it is possible.

    Raises:
        GroupInUse: It has members. Nothing has changed.
        InvalidArgument: It is broadcasting.
    """
    await make_standby(admin, group, by, dry_run=dry_run)


async def fail_over(admin: Admin, group: str, *, by: str, dry_run: bool = False) -> None:
    """Make a standby group an ordinary one; its members continue at the translated progress.

    Args:
        by: Name of the operator, recorded with the end of the pause.
        dry_run: Only check that it is possible.

    Raises:
        GroupNotFound: The group does not exist.
        InvalidArgument: It is no standby.
        GroupInUse: It has members already: stop them first.
    """
    await end_standby(admin, group, by, dry_run=dry_run)


def _identity(topic: Topic) -> tuple[int, int]:
    return topic.topic_id, topic.create_unix_ms
