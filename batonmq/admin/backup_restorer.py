"""Restores a snapshot into an empty cluster, and verifies one without a cluster.

The order makes an interrupted restore harmless: topics and messages first, then progress, then
access. A repeated restore of the same snapshot continues where the first one ended: each restored
batch has a producer id that is made of the snapshot and the place of the batch.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from baton.common.v1 import queue_pb2
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.aio import without_group
from batonmq._common.rpc import error_from_pb
from batonmq._consumer.moved_group import raise_if_moved
from batonmq._core.names import is_system_topic
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range
from batonmq._core.records import Header, check_batch, read_header
from batonmq.admin._backup_batches import (
    restored_id,
    scheduled_key,
    without_stamp,
)
from batonmq.admin._backup_files import read_chunk, read_waiting
from batonmq.admin._backup_plan import (
    RestoredProgress,
    find_excess,
    map_queues,
    restored_progress,
    scheduled_queue,
)
from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.admin import Admin, Strategy
from batonmq.admin.backup_manifest import (
    BackupFile,
    BackupManifest,
    GroupBackup,
    QueueBackup,
    TopicBackup,
)
from batonmq.admin.backup_store import BackupStore
from batonmq.admin.operation import Operation
from batonmq.admin.quotas import QuotaLimits, Quotas
from batonmq.admin.reports import Compaction, MessageType, queue_to_pb
from batonmq.admin.resets import ResetPlan, Resets
from batonmq.errors import (
    BatonError,
    Fenced,
    GroupInUse,
    GroupNotFound,
    InvalidArgument,
    TopicExists,
    Unreachable,
)

APPEND_BYTES = 8 * 1024 * 1024
APPEND_BATCHES = 512
APPEND_TIMEOUT_S = 60.0
COMMIT_QUEUES = 1_000
_QUEUES_AT_ONCE = 4
_KNOWN_WITHIN_S = 10.0
"""Time within which all services know a new group or topic."""
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What a restore would do.

    Attributes:
        moved: Queues that become other queues, because the brokers differ.
        problems: Why the restore would be rejected; empty if it would not.
    """

    topic_count: int
    queue_count: int
    message_count: int
    byte_count: int
    scheduled_count: int
    group_count: int
    moved: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BackupVerification:
    """What was read back from a backup; `problems` is empty if all of it is sound."""

    file_count: int
    byte_count: int
    message_count: int
    problems: tuple[str, ...]


async def verify_backup(
    store: BackupStore,
    manifest: BackupManifest,
    on_file: Callable[[BackupFile], None] = lambda _: None,
) -> BackupVerification:
    """Read every file of a snapshot back, and compare checksums, offsets and progress."""
    problems, count, size = find_excess(manifest), 0, 0
    for queue in manifest.queues:
        for chunk in queue.chunks:
            try:
                batches = await read_chunk(store, queue, chunk)
                count += sum(read_header(batch).count for batch in batches)
            except BatonError as error:
                problems.append(error.message)
            size += chunk.file.size
            on_file(chunk.file)
    for file in manifest.scheduled.values():
        try:
            count += sum(read_header(b).count for _, _, b in await read_waiting(store, file))
        except BatonError as error:
            problems.append(error.message)
        size += file.size
        on_file(file)
    return BackupVerification(len(manifest.files), size, count, tuple(problems))


class BackupRestorer:
    """Restores one snapshot.

    Args:
        admin: Client of the cluster; the caller closes it.
        operation: Operator and reason, recorded in the history of each group.
        on_file: Called with each file that is restored.
    """

    def __init__(
        self,
        admin: Admin,
        store: BackupStore,
        manifest: BackupManifest,
        operation: Operation,
        on_file: Callable[[BackupFile], None] = lambda _: None,
    ) -> None:
        self._admin, self._store, self._manifest = admin, store, manifest
        self._operation, self._on_file = operation, on_file
        self._turns = asyncio.Semaphore(_QUEUES_AT_ONCE)

    async def plan(self, *, proceed: bool = False) -> RestorePlan:
        """Return what `run` would do. Changes nothing.

        Args:
            proceed: Whether messages of an earlier, interrupted restore may be there.
        """
        manifest = self._manifest
        topics = {one.name: one for one in await self._admin.list_topics()}
        wanted = {one.name for one in manifest.topics}
        problems = find_excess(manifest)
        present = {name: topics[name].queues for name in wanted & topics.keys()}
        moved: list[str] = []
        try:
            mapping = map_queues(
                (q.queue for q in manifest.queues if q.queue.topic in present), present
            )
            moved = [f"{old} becomes {new}" for old, new in sorted(mapping.items()) if old != new]
        except InvalidArgument as error:
            problems.append(error.message)
        if not proceed:
            problems += await self._find_other_state(topics.keys() - wanted, present)
        return RestorePlan(
            len(manifest.topics),
            len(manifest.queues),
            manifest.message_count,
            sum(file.size for file in manifest.files),
            manifest.scheduled_count,
            len(manifest.groups),
            tuple(moved),
            tuple(problems),
        )

    async def run(self, *, proceed: bool = False) -> dict[QueueRef, QueueRef]:
        """Restore the snapshot; return which queue of it has become which.

        Args:
            proceed: Continue an interrupted restore of the same snapshot.

        Raises:
            TopicExists: The cluster is not empty, or has messages that are not of this snapshot.
            GroupInUse: A group of the snapshot has members.
            DataLoss: A file of the backup is damaged.
            Unreachable, OffsetsUnreachable, NoQuorum, NotLeader, NotServing: A service or the store
                does not answer. The restore can be continued.
        """
        plan = await self.plan(proceed=proceed)
        if plan.problems:
            raise TopicExists(
                f"the snapshot can't be restored here: {'; '.join(plan.problems)}",
                remedy="Restore into an empty cluster; continue an interrupted restore of the "
                "same snapshot: --continue.",
            )
        manifest = self._manifest
        for topic in manifest.topics:
            await self._create(topic)
        topics = {one.name: one.queues for one in await self._admin.list_topics()}
        mapping = map_queues((one.queue for one in manifest.queues), topics)
        with without_group():
            async with asyncio.TaskGroup() as tasks:
                for queue in manifest.queues:
                    tasks.create_task(self._restore_queue(queue, mapping[queue.queue]))
        await self._restore_scheduled(mapping)
        for topic in manifest.topics:
            if topic.permission != "read_write" or topic.inherited:
                await self._admin.update_topic(
                    topic.name,
                    permission=cast(Literal["read", "write"], topic.permission),
                    inherited=topic.inherited,
                )
        for group in manifest.groups:
            await self._restore_group(group, mapping)
        await self._restore_access()
        return mapping

    async def _find_other_state(
        self, others: Sequence[str] | set[str], present: Mapping[str, Sequence[QueueRef]]
    ) -> list[str]:
        problems = [
            f"topic {n} is not of the backup" for n in sorted(others) if not is_system_topic(n)
        ]
        extents, unreachable = await self._admin.extents(
            queue for queues in present.values() for queue in queues
        )
        if unreachable:
            raise Unreachable("; ".join(unreachable))
        used = sorted({queue.topic for queue, (_, end) in extents.items() if end})
        problems += [f"topic {name} has messages already" for name in used]
        known = {one.name for one in self._manifest.groups}
        for group in await self._admin.list_groups():
            if group.name not in known:
                problems.append(f"group {group.name} is not of the backup")
            elif group.members:
                problems.append(f"group {group.name} has members")
            elif await self._admin.progress(group.name):
                problems.append(f"group {group.name} has progress already")
        return problems

    async def _create(self, topic: TopicBackup) -> None:
        await self._admin.create_topic(
            topic.name,
            topic.queue_count,
            message_type=cast(MessageType, topic.message_type),
            retention_ms=topic.retention_ms,
            retention_bytes=topic.retention_bytes,
            compaction=None if topic.compaction is None else Compaction(*topic.compaction),
        )

    # ---- messages

    async def _restore_queue(self, backup: QueueBackup, queue: QueueRef) -> None:
        async with self._turns:
            have = await self._restored_count(backup, queue)
            offset, waiting, size = 0, list[bytes](), 0
            for chunk in backup.chunks:
                count = chunk.next_offset - chunk.first_offset
                if offset + count <= have:
                    offset += count
                    continue
                for batch in await read_chunk(self._store, backup, chunk):
                    offset += read_header(batch).count
                    if offset <= have:
                        continue
                    waiting.append(self._restored(backup, queue, batch))
                    size += len(batch)
                    if size >= APPEND_BYTES or len(waiting) >= APPEND_BATCHES:
                        await self._append(queue, waiting)
                        waiting, size = [], 0
                self._on_file(chunk.file)
            if waiting:
                await self._append(queue, waiting)

    def _restored(self, backup: QueueBackup, queue: QueueRef, batch: bytes) -> bytes:
        header = read_header(batch)
        once = restored_id(
            self._manifest.cluster, self._manifest.number, backup.queue, header.first_offset,
            header.checksum,
        )  # fmt: skip
        return without_stamp(batch, queue.queue_id, once)

    async def _restored_count(self, backup: QueueBackup, queue: QueueRef) -> int:
        """Return how many messages of the queue an earlier restore has stored.

        Behind them there may be scheduled messages of the snapshot that are delivered already.

        Raises:
            TopicExists: The queue has messages that are not of this snapshot.
        """
        extents, problems = await self._admin.extents([queue])
        if problems:
            raise Unreachable("; ".join(problems))
        have = extents[queue][1] if queue in extents else 0
        of_queue = min(have, backup.count)
        if (of_queue and not await self._is_restored(backup, queue, of_queue)) or (
            have > of_queue and not await self._are_delivered(queue, of_queue, have)
        ):
            raise TopicExists(
                f"queue {queue} has {have} messages that are not of this snapshot",
                remedy="Restore into an empty cluster.",
                facts={"topic": queue.topic},
            )
        return of_queue

    async def _is_restored(self, backup: QueueBackup, queue: QueueRef, have: int) -> bool:
        """Return whether the message before offset `have` is the one that a restore stores."""
        stored = await self._read_headers(queue, have - 1, messages_max=1)
        count = 0
        for chunk in backup.chunks:
            if count + chunk.next_offset - chunk.first_offset < have:
                count += chunk.next_offset - chunk.first_offset
                continue
            for batch in await read_chunk(self._store, backup, chunk):
                count += read_header(batch).count
                if count == have:
                    expected = read_header(self._restored(backup, queue, batch)).producer_id
                    return [one.producer_id for one in stored] == [expected]
        return False

    async def _are_delivered(self, queue: QueueRef, offset: int, end: int) -> bool:
        """Return whether all messages from `offset` on are scheduled ones of the snapshot."""
        times = {
            deliver_unix_ms
            for file in self._manifest.scheduled.values()
            for deliver_unix_ms, _, _ in await read_waiting(self._store, file)
        }
        while offset < end:
            headers = await self._read_headers(queue, offset)
            keys = [scheduled_key(one) for one in headers]
            if not all(key is not None and key[0] in times for key in keys) or not keys:
                return False
            offset = headers[-1].next_offset
        return True

    async def _read_headers(
        self, queue: QueueRef, offset: int, messages_max: int = 0
    ) -> list[Header]:
        """Return the headers of stored batches from an offset on."""
        request = query_pb.ReadRequest(
            queue=queue_to_pb(queue), offset=offset, messages_max=messages_max
        )

        async def ask(limit_s: float) -> query_pb.ReadResponse:
            stub = await self._admin.directory.query(queue.broker)
            return await stub.Read(request, timeout=limit_s)

        return [check_batch(one, stamped=True) for one in (await self._admin.ask(ask)).batches]

    async def _append(self, queue: QueueRef, batches: Sequence[bytes]) -> None:
        request = pb.AppendRequest(batches=batches, durability=pb.DURABILITY_FSYNCED)

        async def ask(limit_s: float) -> pb.AppendResponse:
            stub = await self._admin.directory.storage(queue.broker)
            answer = await stub.Append(request, timeout=limit_s)
            for outcome in answer.outcomes:
                if outcome.HasField("error"):
                    raise error_from_pb(outcome.error)
            return answer

        await self._admin.ask(ask, timeout_s=APPEND_TIMEOUT_S)

    async def _restore_scheduled(self, mapping: Mapping[QueueRef, QueueRef]) -> None:
        manifest = self._manifest
        for broker, file in manifest.scheduled.items():
            by_broker: dict[str, list[schedule_pb.ScheduleItem]] = defaultdict(list)
            for deliver_unix_ms, number, batch in await read_waiting(self._store, file):
                header = read_header(batch)
                queue = scheduled_queue(header.topic, broker, header.queue_id, mapping)
                if queue is None:  # its topic was deleted
                    continue
                once = restored_id(manifest.cluster, manifest.number, broker, number)
                by_broker[queue.broker].append(
                    schedule_pb.ScheduleItem(
                        batch=without_stamp(batch, queue.queue_id, once),
                        deliver_unix_ms=deliver_unix_ms,
                    )
                )
            for name, items in by_broker.items():
                for part in scheduled_requests(items):
                    await self._schedule(name, part)
            self._on_file(file)

    async def _schedule(self, broker: str, items: Sequence[schedule_pb.ScheduleItem]) -> None:
        request = schedule_pb.ScheduleRequest(items=items)

        async def ask(limit_s: float) -> schedule_pb.ScheduleResponse:
            stub = await self._admin.directory.schedule(broker)
            answer = await stub.Schedule(request, timeout=limit_s)
            for outcome in answer.outcomes:
                if outcome.HasField("error"):
                    raise error_from_pb(outcome.error)
            return answer

        await self._admin.ask(ask, timeout_s=APPEND_TIMEOUT_S)

    # ---- progress

    async def _restore_group(
        self, group: GroupBackup, mapping: Mapping[QueueRef, QueueRef]
    ) -> None:
        """Restore settings and progress. The group has no owners until its progress is complete."""
        admin, progress = self._admin, restored_progress(group, self._manifest, mapping)
        if group.model == "broadcasting":
            progress = []
        made = await admin.update_group(
            group.name,
            policy=cast(Literal["reject"], group.policy),
            strategy=cast(Strategy, group.strategy),
            ownership="off" if any(one.acked for one in progress) else "",
        )
        if made.members:
            raise GroupInUse(f"group {group.name} has members", remedy="Stop them, and repeat.")
        if progress:
            plan = ResetPlan(
                group.name, tuple((one.queue, one.committed_offset) for one in progress), ()
            )
            await self._reset(plan)
            await self._acknowledge(group.name, [one for one in progress if one.acked])
        await admin.update_group(group.name, ownership=cast(Literal["on"], group.ownership))
        if group.pause is not None:
            await admin.pause_group(group.name, *group.pause)

    async def _acknowledge(self, group: str, progress: Sequence[RestoredProgress]) -> None:
        reset_epochs: dict[QueueRef, int] = defaultdict(int)
        left = {one.queue: one.acked for one in progress}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _KNOWN_WITHIN_S
        while left:
            part = dict(list(left.items())[:COMMIT_QUEUES])
            refused = await self._commit(group, part, reset_epochs)
            for queue, error in refused.items():
                if isinstance(error, Fenced):
                    reset_epochs[queue] = error.detail.reset_epoch or 0
                if loop.time() > deadline:
                    raise error
            left = {
                queue: acked for queue, acked in left.items() if queue not in part.keys() - refused
            }
            if refused:
                await asyncio.sleep(_PAUSE_S)

    async def _commit(
        self,
        group: str,
        acked: Mapping[QueueRef, Sequence[Range]],
        reset_epochs: Mapping[QueueRef, int],
    ) -> dict[QueueRef, BatonError]:
        """Acknowledge ranges of a group without owners; return the error of each rejected queue."""
        items = [
            offsets_pb.CommitItem(
                queue=queue_pb2.GroupQueue(group=group, queue=queue_to_pb(queue)),
                reset_epoch=reset_epochs[queue],
                acked=[
                    queue_pb2.OffsetRange(first_offset=first, next_offset=end)
                    for first, end in ranges
                ],
            )
            for queue, ranges in acked.items()
        ]
        request = offsets_pb.CommitRequest(items=items)

        async def ask(limit_s: float) -> offsets_pb.CommitResponse:
            stub = await self._admin.directory.offsets(group)
            answer = await stub.Commit(request, timeout=limit_s)
            raise_if_moved(answer.outcomes)
            return answer

        outcomes = (await self._admin.ask(ask)).outcomes
        return {
            queue: error_from_pb(outcome.error)
            for queue, outcome in zip(acked, outcomes, strict=True)
            if outcome.HasField("error")
        }

    async def _reset(self, plan: ResetPlan) -> None:
        """Set the committed offsets; wait until all services know the new group."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _KNOWN_WITHIN_S
        while True:
            try:
                done = await Resets(self._admin).reset(plan, self._operation)
            except GroupNotFound:
                if loop.time() > deadline:
                    raise
            else:
                if not done.problems:
                    return
                if loop.time() > deadline:
                    raise Unreachable("; ".join(done.problems))
            await asyncio.sleep(_PAUSE_S)

    # ---- access

    async def _restore_access(self) -> None:
        control, access = AccessControl(self._admin), self._manifest.access
        for identity, role, resource in access.grants:
            await control.grant(identity, RoleGrant(Role(role), resource))
        for subject, reason in access.blocks:
            await control.block(subject, reason)
        for identity, limits in access.quotas.items():
            await Quotas(self._admin).set(identity, QuotaLimits(**limits))


def scheduled_requests(
    items: Sequence[schedule_pb.ScheduleItem],
) -> Iterator[list[schedule_pb.ScheduleItem]]:
    """Yield the items in groups that are small enough for one request each."""
    part, size = list[schedule_pb.ScheduleItem](), 0
    for item in items:
        part.append(item)
        size += len(item.batch)
        if size >= APPEND_BYTES or len(part) >= APPEND_BATCHES:
            yield part
            part, size = [], 0
    if part:
        yield part
