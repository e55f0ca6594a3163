"""Translates the progress of a group for a standby group in the target of a mirror.

A standby group is paused and has ownership off: so nothing is delivered to it, commits need no
token, and they never move it back. The failover switches ownership on, and from then on offsets
rejects the commits of every mirror.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from batonmq._common.rpc import error_from_pb
from batonmq._consumer.moved_group import raise_if_moved
from batonmq._core.mirror_map import TranslatedProgress, handled_ranges, translate_progress
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range, normalize, subtract
from batonmq._core.records import Record, decode_records, read_header
from batonmq._core.retries import origin_of, retry_topic
from batonmq.admin._queue_log import QueueLog
from batonmq.admin._queue_mirror import QueueMirror
from batonmq.admin.admin import Admin
from batonmq.admin.group_reports import Group
from batonmq.admin.reports import queue_from_pb, queue_to_pb
from batonmq.errors import (
    BatonError,
    Fenced,
    FencedDetail,
    GroupInUse,
    GroupNotFound,
    InvalidArgument,
    ModeChanged,
    TopicNotFound,
)

STANDBY_REASON = "standby of a mirror; start it with: baton mirror failover"
COMMIT_QUEUES_MAX = 1_024
COMMIT_RANGES_MAX = 1_000
_KNOWN_WITHIN_S = 10.0
"""Time within which all services know a new group."""
_PAUSE_S = 0.1


def is_standby(group: Group) -> bool:
    """Return whether a group is a standby of a mirror."""
    marked = group.pause is not None and group.pause.reason == STANDBY_REASON
    return marked and group.ownership == "off"


async def make_standby(admin: Admin, name: str, by: str, *, dry_run: bool = False) -> None:
    """Make a group a standby; create it if it does not exist.

    Raises:
        GroupInUse: It has members. Nothing has changed.
        InvalidArgument: It is broadcasting.
    """
    try:
        group = await admin.describe_group(name)
        if is_standby(group):
            return
        check_group_can_be_mirrored(group)
        _check_no_members(group)
    except GroupNotFound:
        pass
    if dry_run:
        return
    # By one call: a member that joins meanwhile makes it fail, and the group stays as it is. A
    # caller that is killed leaves no group that is half a standby.
    await admin.pause_group(name, by, STANDBY_REASON, ownership="off", create=True)


async def end_standby(admin: Admin, name: str, by: str, *, dry_run: bool = False) -> None:
    """Make a standby group an ordinary one; a repeated call continues where the first one ended.

    Raises:
        InvalidArgument: It is no standby.
        GroupInUse: It has members.
    """
    group = await admin.describe_group(name)
    if group.pause is None or group.pause.reason != STANDBY_REASON:
        raise InvalidArgument(
            f"group {name} is not a standby",
            remedy="See: baton mirror status. A group in use needs no failover.",
            facts={"field": "group"},
        )
    if group.ownership == "off":
        _check_no_members(group)
    if dry_run:
        return
    # Ownership first: from then on no mirror can move the progress.
    await admin.update_group(name, ownership="on")
    await admin.resume_group(name, by, "failover")


def _check_no_members(group: Group) -> None:
    if group.members:
        names = ", ".join(one.client_id for one in group.members[:3])
        raise GroupInUse(
            f"group {group.name} has {len(group.members)} members: {names}",
            remedy="Stop them first: a standby has no members.",
            facts={"group": group.name},
        )


def check_group_can_be_mirrored(group: Group) -> None:
    """Raise InvalidArgument if the progress of a group can't be translated."""
    if group.model == "broadcasting":
        raise InvalidArgument(
            f"group {group.name} is broadcasting: each member keeps its own progress",
            remedy="Leave the group out.",
            facts={"field": "group"},
        )


class GroupMirror:
    """Translates the progress of one group.

    Attributes:
        name: Name of the group in both clusters.
        standby: Whether the group of the target is a standby; if not, its progress is left alone.
        problem: Why the last translation failed; empty if it did not.
        waiting_count: Messages that were sent back and wait for their retry, at the last
            translation. They count as not handled.
    """

    def __init__(self, source: Admin, target: Admin, name: str) -> None:
        self._source, self._target, self.name = source, target, name
        self.standby, self.problem, self.waiting_count = True, "", 0
        self._log = QueueLog(source)
        self._reset_epochs: dict[QueueRef, int] = {}

    async def committed(self) -> dict[QueueRef, int]:
        """Return the committed offsets in the target."""
        progress = await self._target.progress(self.name)
        return {queue_from_pb(one.queue.queue): one.committed_offset for one in progress}

    async def translate(self, queues: Sequence[QueueMirror]) -> None:
        """Bring the progress in the target up to that in the source, as far as it is mirrored."""
        try:
            self.standby = is_standby(await self._target.describe_group(self.name))
            if self.standby:
                await self._translate(queues)
            self.problem = ""
        except ModeChanged:  # a failover has just begun
            self.standby = False
        except BatonError as error:
            self.problem = f"{error.reason}: {error.message}"

    async def _translate(self, queues: Sequence[QueueMirror]) -> None:
        handled = await self._handled({one.source for one in queues})
        topics = {queue.topic for queue in handled}
        own: dict[QueueRef, list[Range]] = {}
        for one in await self._target.progress(self.name):
            queue = queue_from_pb(one.queue.queue)
            own[queue] = _handled_in(one)
            self._reset_epochs[queue] = one.reset_epoch
        changes: dict[QueueRef, TranslatedProgress] = {}
        for copied in queues:
            if copied.source.topic not in topics:
                continue  # the group has not begun with the topic
            before = own.get(copied.target)
            progress = translate_progress(
                handled.get(copied.source, []),
                (copied.forward, copied.own),
                normalize([*(before or ()), (0, copied.target_first)]),
            )
            if handled_ranges(*progress) != before:
                changes[copied.target] = progress
        await self._commit(changes)

    async def _handled(self, wanted: set[QueueRef]) -> dict[QueueRef, list[Range]]:
        """Return what the group has handled, without what waits for a retry.

        Progress is read first, then the schedule, then the retry topic: a message that is sent back
        is stored before it is acknowledged, and leaves the schedule for the retry topic.
        """
        progress = await self._source.progress(self.name)
        handled = {queue_from_pb(one.queue.queue): _handled_in(one) for one in progress}
        waiting: dict[QueueRef, list[Range]] = defaultdict(list)
        async for queue, offset in self._waiting(handled):
            waiting[queue].append((offset, offset + 1))
        self.waiting_count = sum(map(len, waiting.values()))
        return {
            queue: subtract(ranges, normalize(waiting[queue]))
            for queue, ranges in handled.items()
            if queue in wanted
        }

    async def _waiting(
        self, handled: Mapping[QueueRef, Sequence[Range]]
    ) -> AsyncIterator[tuple[QueueRef, int]]:
        """Yield queue and offset of each message that was sent back and is not handled yet."""
        retries = retry_topic(self.name)
        try:
            detail = await self._source.describe_topic(retries)
        except TopicNotFound:
            return
        # A broker that is absent for a moment has a schedule, too: asking it raises Unreachable.
        brokers = await self._source.directory.brokers() | set(detail.topic.queue_counts)
        for broker in sorted(brokers):
            async for batch in _scheduled(self._source, broker):
                header = read_header(batch)
                if header.topic == retries:
                    for record in decode_records(batch, header, range(header.count)):
                        if (origin := origin_of(record.properties)) is not None:
                            yield origin[0].queue, origin[0].offset
        for queue in detail.topic.queues:
            first, end = await self._log.extent(queue)
            whole = [(first, end)] if first < end else []
            for part in subtract(whole, handled.get(queue, [])):
                async for record in self._records(queue, *part):
                    if (origin := origin_of(record.properties)) is not None:
                        yield origin[0].queue, origin[0].offset

    async def _records(self, queue: QueueRef, begin: int, end: int) -> AsyncIterator[Record]:
        """Yield the messages of a range of a queue."""
        offset = begin
        while offset < end:
            reading = await self._log.read(queue, offset)
            for header, raw in reading.batches:
                for record in decode_records(raw, header, range(header.count)):
                    if begin <= record.offset < end:
                        yield record
            if reading.next_offset <= offset:
                return
            offset = reading.next_offset

    async def _commit(self, changes: Mapping[QueueRef, TranslatedProgress]) -> None:
        left = dict(changes)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _KNOWN_WITHIN_S
        while left:
            part = dict(list(left.items())[:COMMIT_QUEUES_MAX])
            again: dict[QueueRef, TranslatedProgress] = {}
            for queue, error in (await self._send(part)).items():
                known = isinstance(error, Fenced) and isinstance(error.detail, FencedDetail)
                if known and isinstance(error.detail, FencedDetail):
                    self._reset_epochs[queue] = error.detail.reset_epoch or 0
                if not isinstance(error, Fenced | GroupNotFound) or loop.time() > deadline:
                    raise error
                again[queue] = part[queue]
            left = {queue: one for queue, one in left.items() if queue not in part} | again
            if again:
                await asyncio.sleep(_PAUSE_S)

    async def _send(
        self, changes: Mapping[QueueRef, TranslatedProgress]
    ) -> dict[QueueRef, BatonError]:
        """Commit, and return the error of each rejected queue."""
        request = offsets_pb.CommitRequest(
            items=[
                offsets_pb.CommitItem(
                    queue=queue_pb2.GroupQueue(group=self.name, queue=queue_to_pb(queue)),
                    reset_epoch=self._reset_epochs.get(queue, 0),
                    committed_offset=progress.committed_offset,
                    acked=[
                        queue_pb2.OffsetRange(first_offset=first, next_offset=end)
                        for first, end in progress.acked[:COMMIT_RANGES_MAX]
                    ],
                )
                for queue, progress in changes.items()
            ]
        )

        async def ask(limit_s: float) -> offsets_pb.CommitResponse:
            stub = await self._target.directory.offsets(self.name)
            answer = await stub.Commit(request, timeout=limit_s)
            raise_if_moved(answer.outcomes)
            return answer

        outcomes = (await self._target.ask(ask)).outcomes
        return {
            queue: error_from_pb(outcome.error)
            for queue, outcome in zip(changes, outcomes, strict=True)
            if outcome.HasField("error")
        }


def _handled_in(progress: offsets_pb.Progress) -> list[Range]:
    acked = ((part.first_offset, part.next_offset) for part in progress.acked)
    return handled_ranges(progress.committed_offset, acked)


async def _scheduled(admin: Admin, broker: str) -> AsyncIterator[bytes]:
    """Yield the batches of a broker that wait for their time."""
    position = 0
    while True:
        request = schedule_pb.ListScheduledRequest(position=position)

        async def ask(
            limit_s: float, request: schedule_pb.ListScheduledRequest = request
        ) -> schedule_pb.ListScheduledResponse:
            stub = await admin.directory.schedule(broker)
            return await stub.ListScheduled(request, timeout=limit_s)

        answer = await admin.ask(ask)
        for one in answer.batches:
            yield one.batch
        position = answer.next_position
        if not position:
            return
