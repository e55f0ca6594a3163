"""Takes snapshots of a cluster into a backup, each after the first one incremental.

The order of the reads makes a snapshot consistent: first the progress of all groups, then the
scheduled messages, then the ends of the queues, then the messages below these ends. So progress is
never beyond the messages of the snapshot; a message that was sent back or became a dead letter
before it was acknowledged is in the snapshot; and one that became due meanwhile is in it once.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass

from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import query_service_pb2 as query_pb
from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from batonmq._common.aio import without_group
from batonmq._common.clock import Clock
from batonmq._core.names import is_system_topic
from batonmq._core.queues import QueueRef
from batonmq._core.records import Header, check_batch, read_header
from batonmq.admin._backup_batches import encode_waiting, scheduled_key
from batonmq.admin.access import AccessControl
from batonmq.admin.admin import Admin
from batonmq.admin.backup_manifest import (
    AccessBackup,
    BackupChunk,
    BackupFile,
    BackupManifest,
    GroupBackup,
    QueueBackup,
    QueueProgressBackup,
    TopicBackup,
    backup_file,
    chunk_name,
    decode_manifest,
    encode_manifest,
    manifest_name,
    scheduled_name,
    snapshot_numbers,
)
from batonmq.admin.backup_store import BackupStore, in_thread
from batonmq.admin.group_reports import Group
from batonmq.admin.quotas import Quotas
from batonmq.admin.reports import Topic, queue_from_pb, queue_to_pb
from batonmq.admin.transactions import Transactions
from batonmq.errors import (
    GroupNotFound,
    InvalidArgument,
    NotLeader,
    OffsetOutOfRange,
    QueueNotFound,
    TopicNotFound,
    TopicNotFoundDetail,
    Unreachable,
)

CHUNK_BYTES = 16 * 1024 * 1024
"""A file ends with the batch that reaches this size."""
READ_BYTES = 4 * 1024 * 1024
READ_MESSAGES = 65_535
SNAPSHOT_MS_MAX = 3_600_000
"""Longest time in which a snapshot is expected to have read a compacted topic."""
_QUEUES_AT_ONCE = 4
_GROUPS_AT_ONCE = 8
ScheduledKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BackupPlan:
    """What the next snapshot would copy.

    Attributes:
        number: Number of the snapshot.
        message_count: Messages that the backup does not have yet.
        kept_count: Messages that it has, and that the cluster still has.
    """

    number: int
    topic_count: int
    queue_count: int
    group_count: int
    message_count: int
    kept_count: int


async def read_backup_manifest(store: BackupStore, number: int = 0) -> BackupManifest:
    """Return the manifest of a snapshot; 0 for the newest.

    Raises:
        InvalidArgument: There is no such snapshot.
        DataLoss: The manifest is damaged.
    """
    numbers = await list_snapshots(store)
    wanted = number or (numbers[-1] if numbers else 0)
    if wanted not in numbers:
        raise InvalidArgument(
            f"the backup has no snapshot {number}" if number else "the backup has no snapshot",
            remedy="See: baton backup list. Take one: baton backup create.",
            facts={"field": "snapshot"},
        )
    name = manifest_name(wanted)
    return decode_manifest(await in_thread(name, lambda: store.read(name)), name)


async def list_snapshots(store: BackupStore) -> list[int]:
    """Return the numbers of the snapshots, ascending."""
    return snapshot_numbers(await in_thread("snapshots", lambda: store.names("snapshots")))


class BackupWriter:
    """Takes one snapshot.

    Args:
        admin: Client of the cluster; the caller closes it.
        on_file: Called with each file that was written.
    """

    def __init__(
        self,
        admin: Admin,
        store: BackupStore,
        *,
        on_file: Callable[[BackupFile], None] = lambda _: None,
    ) -> None:
        self._admin, self._store = admin, store
        self._clock, self._on_file = Clock(), on_file
        self._number, self._notes = 1, list[str]()
        self._earlier: Mapping[QueueRef, QueueBackup] = {}
        self._topic_ids: Mapping[str, int] = {}
        self._compacted: frozenset[str] = frozenset()
        self._delivered: set[tuple[str, ScheduledKey]] = set()
        self._turns = asyncio.Semaphore(_QUEUES_AT_ONCE)

    async def plan(self) -> BackupPlan:
        """Return what `run` would copy. Writes nothing."""
        await self._begin()
        topics, groups = await self._topics(), await self._admin.list_groups()
        earlier = await self._same_queues(topics)
        queues = [queue for topic in topics for queue in topic.queues]
        extents = await self._extents(queues)
        new = kept = 0
        for queue, (first, end) in extents.items():
            have = _copied_to(earlier[queue]) if queue in earlier else first
            new += max(0, end - max(first, have))
            kept += max(0, min(end, have) - first)
        return BackupPlan(self._number, len(topics), len(queues), len(groups), new, kept)

    async def run(self) -> BackupManifest:
        """Take a snapshot, and return its manifest, which is written last.

        If another writer has written a snapshot to the same store meanwhile, another snapshot is
        taken, which continues that one.

        Raises:
            Unreachable, NoQuorum, NotLeader, NotServing: A service or the store does not answer.
                The backup has the snapshots that it had.
        """
        while True:
            manifest = await self._copy_all()
            if await self._publish(manifest):
                return manifest

    async def _copy_all(self) -> BackupManifest:
        """Copy what the backup does not have yet, and return the manifest of the snapshot."""
        await self._begin()
        begin_unix_ms = self._clock.unix_ms()
        groups = await self._groups()
        access = await self._access()
        topics = await self._topics()
        self._topic_ids = {one.name: one.topic_id for one in topics}
        self._compacted = frozenset(one.name for one in topics if one.compaction is not None)
        waiting = await self._scheduled(topics)
        await self._note_transactions()
        earlier = await self._same_queues(topics)
        extents = await self._extents([queue for topic in topics for queue in topic.queues])
        with without_group():
            async with asyncio.TaskGroup() as tasks:
                copies = [
                    tasks.create_task(self._copy(queue, extent, earlier.get(queue)))
                    for queue, extent in sorted(extents.items())
                ]
        files, count = await self._write_scheduled(waiting)
        return BackupManifest(
            number=self._number,
            cluster=(await self._admin.cluster()).name,
            begin_unix_ms=begin_unix_ms,
            end_unix_ms=self._clock.unix_ms(),
            topics=tuple(map(_topic_backup, topics)),
            queues=tuple(task.result() for task in copies),
            groups=groups,
            access=access,
            scheduled=files,
            scheduled_count=count,
            notes=tuple(self._notes),
        )

    async def _publish(self, manifest: BackupManifest) -> bool:
        """Write a manifest; return False if another snapshot has got its number."""
        name, content = manifest_name(manifest.number), encode_manifest(manifest)
        try:
            await in_thread(name, lambda: self._store.create(name, content))
        except FileExistsError:  # perhaps by this call, if the store has repeated it
            if await in_thread(name, lambda: self._store.read(name)) != content:
                return False
        self._on_file(backup_file(name, content))
        return True

    async def _begin(self) -> None:
        self._notes, self._delivered = [], set()
        numbers = await list_snapshots(self._store)
        self._number = numbers[-1] + 1 if numbers else 1
        self._before = await read_backup_manifest(self._store, numbers[-1]) if numbers else None

    async def _topics(self) -> list[Topic]:
        return [one for one in await self._admin.list_topics() if not is_system_topic(one.name)]

    async def _groups(self) -> tuple[GroupBackup, ...]:
        turns = asyncio.Semaphore(_GROUPS_AT_ONCE)

        async def read(group: Group) -> GroupBackup | None:
            async with turns:
                try:
                    progress = await self._admin.progress(group.name)
                except GroupNotFound:
                    return None
            if group.model == "broadcasting":
                self._notes.append(
                    f"group {group.name} is broadcasting: its members keep its progress themselves"
                )
            for one in progress:
                if one.acked_range_count > len(one.acked):
                    self._notes.append(
                        f"group {group.name} has {one.acked_range_count} acknowledged ranges on "
                        f"{queue_from_pb(one.queue.queue)}; {len(one.acked)} are in the snapshot"
                    )
            return _group_backup(group, progress)

        groups = await self._admin.list_groups()
        with without_group():
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(read(group)) for group in groups]
        return tuple(found for call in calls if (found := call.result()) is not None)

    async def _access(self) -> AccessBackup:
        control = AccessControl(self._admin)
        identities = await control.list()
        secrets = sum(len(one.tokens) + len(one.access_keys) for one in identities)
        if secrets:
            self._notes.append(
                f"{secrets} tokens and access keys are not in the snapshot: their secrets can't be "
                "read, so new ones have to be issued"
            )
        return AccessBackup(
            grants=tuple(
                (one.identity, grant.role.value, grant.resource)
                for one in identities
                for grant in one.grants
            ),
            blocks=tuple((one.subject, one.reason) for one in await control.blocks()),
            quotas={
                one.identity: {
                    name: value for name, value in asdict(one.limits).items() if value is not None
                }
                for one in await Quotas(self._admin).list()
            },
        )

    async def _scheduled(self, topics: Iterable[Topic]) -> dict[str, dict[ScheduledKey, bytes]]:
        """Return the scheduled batches by broker and key.

        All brokers with queues are asked, also one that is not registered while it starts again.
        """
        brokers = {queue.broker for topic in topics for queue in topic.queues}
        waiting: dict[str, dict[ScheduledKey, bytes]] = defaultdict(dict)
        for broker in sorted(brokers | set(await self._admin.directory.brokers())):
            position = 0
            while True:
                request = schedule_pb.ListScheduledRequest(position=position)

                async def ask(
                    limit_s: float,
                    broker: str = broker,
                    request: schedule_pb.ListScheduledRequest = request,
                ) -> schedule_pb.ListScheduledResponse:
                    stub = await self._admin.directory.schedule(broker)
                    return await stub.ListScheduled(request, timeout=limit_s)

                answer = await self._admin.ask(ask)
                for one in answer.batches:
                    if self._has_topic_of(one):
                        waiting[broker][one.deliver_unix_ms, one.number] = one.batch
                position = answer.next_position
                if not position:
                    break
        return waiting

    def _has_topic_of(self, one: schedule_pb.WaitingBatch) -> bool:
        """Return whether the topic of a batch exists; another topic may have its name now."""
        return one.topic_id in (0, self._topic_ids.get(read_header(one.batch).topic))

    async def _note_transactions(self) -> None:
        _, count, problems = await Transactions(self._admin).find(count_max=1)
        if problems:
            raise Unreachable("; ".join(problems))
        if count:
            self._notes.append(
                f"{count} open transactions are not in the snapshot: their messages do not exist "
                "before they are committed"
            )

    async def _same_queues(self, topics: Collection[Topic]) -> dict[QueueRef, QueueBackup]:
        """Return the queues of the snapshot before that are still the same queues."""
        if self._before is None:
            return {}
        ids = {one.name: (one.topic_id, one.create_unix_ms) for one in self._before.topics}
        same = {
            one.name
            for one in topics
            if ids.get(one.name) == (one.topic_id, one.create_unix_ms)
            and not self._may_lack_tombstones(one)
        }
        return {one.queue: one for one in self._before.queues if one.queue.topic in same}

    def _may_lack_tombstones(self, topic: Topic) -> bool:
        """Return whether tombstones may be gone that were stored since the snapshot before.

        Then the backup has messages that they have deleted, and a restore would bring these back.
        """
        if topic.compaction is None or self._before is None:
            return False
        (before,) = (one for one in self._before.topics if one.name == topic.name)
        retention_ms = min(
            topic.compaction.tombstone_retention_ms or 0, (before.compaction or (0,))[0] or 0
        )
        age_ms = self._clock.unix_ms() - self._before.begin_unix_ms
        return age_ms + SNAPSHOT_MS_MAX > retention_ms

    async def _extents(self, queues: Collection[QueueRef]) -> dict[QueueRef, tuple[int, int]]:
        extents, problems = await self._admin.extents(queues)
        if problems:
            raise Unreachable("; ".join(problems))
        return extents

    async def _copy(
        self, queue: QueueRef, extent: tuple[int, int], earlier: QueueBackup | None
    ) -> QueueBackup:
        """Copy what the backup does not have of a queue yet, up to the end that was read."""
        async with self._turns:
            first, end = extent
            copy = _QueueCopy(first)
            try:
                if earlier is not None and await self._continues(queue, extent, earlier):
                    copy = _QueueCopy(max(first, _copied_to(earlier)), earlier.checksum)
                    copy.chunks = [one for one in earlier.chunks if one.next_offset > first]
                elif earlier is not None and queue.topic not in self._compacted:
                    # A compaction writes what it keeps again, so its batches are other ones.
                    self._notes.append(
                        f"queue {queue} is not what it was at the snapshot before: it is copied "
                        "anew"
                    )
                while copy.offset < end:
                    await self._copy_some(queue, copy, end)
            except (TopicNotFound, QueueNotFound, OffsetOutOfRange) as error:
                self._notes.append(await self._why_ended(queue, error))
            await self._flush(queue, copy)
            return QueueBackup(queue, end, tuple(copy.chunks), copy.checksum)

    async def _why_ended(
        self, queue: QueueRef, error: TopicNotFound | QueueNotFound | OffsetOutOfRange
    ) -> str:
        """Return why the copy of a queue has ended early.

        Raises:
            Unreachable: The broker does not know the queue, but it exists.
        """
        if isinstance(error, TopicNotFound):
            return f"topic {queue.topic} was deleted during the snapshot"
        if isinstance(error, OffsetOutOfRange):
            return f"queue {queue} got shorter during the snapshot: {error.message}"
        with suppress(TopicNotFound):
            if queue in (await self._admin.describe_topic(queue.topic)).topic.queues:
                raise Unreachable(
                    f"broker {queue.broker} does not know {queue} yet", retry_after_ms=1_000
                ) from error
        return f"queue {queue} was removed during the snapshot"

    async def _copy_some(self, queue: QueueRef, copy: _QueueCopy, end: int) -> None:
        """Copy what one call returns."""
        answer = await self._read(queue, copy.offset, end)
        for raw in answer.batches:
            header = check_batch(raw, stamped=True)
            if header.topic_id != self._topic_ids[queue.topic]:
                raise TopicNotFound(
                    f"topic {queue.topic} was deleted and created again",
                    detail=TopicNotFoundDetail(topic=queue.topic),
                )
            if not copy.continues(header) or header.first_offset >= end:
                await self._flush(queue, copy)  # retention or a compaction has removed some
            if header.first_offset >= end:
                copy.offset = end
                return
            if key := scheduled_key(header):
                self._delivered.add((queue.broker, key))
            copy.add(header, raw)
            if copy.size >= CHUNK_BYTES:
                await self._flush(queue, copy)
        if not answer.batches:
            await self._flush(queue, copy)
            copy.offset = answer.next_offset

    async def _continues(
        self, queue: QueueRef, extent: tuple[int, int], earlier: QueueBackup
    ) -> bool:
        """Return whether the queue still has the last batch of the backup, if it keeps it."""
        first, end = extent
        if end < earlier.next_offset:
            return False
        last = earlier.chunks[-1].next_offset - 1 if earlier.chunks else -1
        if last < first:
            return True
        answer = await self._read(queue, last, end, messages_max=1)
        headers = [check_batch(raw, stamped=True) for raw in answer.batches]
        removed = not headers or headers[0].first_offset > last
        return removed or headers[0].checksum == earlier.checksum

    async def _read(
        self, queue: QueueRef, offset: int, end: int, messages_max: int = READ_MESSAGES
    ) -> query_pb.ReadResponse:
        """Return batches from an offset on; from the first kept one if retention was quicker.

        Args:
            end: End of the queue at its leader. While no leader answers, a follower may, and it
                may have less: then the call is repeated.
        """

        async def ask(limit_s: float) -> query_pb.ReadResponse:
            stub = await self._admin.directory.query(queue.broker)
            answer = await stub.Read(request, timeout=limit_s)
            if not answer.batches and answer.next_offset <= request.offset < end:
                raise NotLeader(
                    f"the follower does not have offset {request.offset} of queue {queue} yet"
                )
            return answer

        while True:
            request = query_pb.ReadRequest(
                queue=queue_to_pb(queue),
                offset=offset,
                bytes_max=READ_BYTES,
                messages_max=messages_max,
            )
            try:
                return await self._admin.ask(ask)
            except OffsetOutOfRange:
                extents = await self._extents([queue])
                first, _ = extents.get(queue, (end, end))  # or the queue was removed since
                if first <= offset:
                    raise
                offset = first

    async def _flush(self, queue: QueueRef, copy: _QueueCopy) -> None:
        """Write the batches that were read into a file."""
        if not copy.batches:
            return
        content = b"".join(copy.batches)
        name = chunk_name(queue, copy.first_offset, copy.offset, content, self._number)
        file = await self._write(name, content)
        copy.chunks.append(BackupChunk(copy.first_offset, copy.offset, file))
        copy.batches, copy.size = [], 0

    async def _write_scheduled(
        self, waiting: Mapping[str, Mapping[ScheduledKey, bytes]]
    ) -> tuple[dict[str, BackupFile], int]:
        """Write the scheduled batches that were not delivered during the snapshot."""
        files, count = dict[str, BackupFile](), 0
        for broker, batches in waiting.items():
            left = [
                (*key, batch)
                for key, batch in sorted(batches.items())
                if (broker, key) not in self._delivered
            ]
            if left:
                content = encode_waiting(left)
                name = scheduled_name(broker, content, self._number)
                files[broker] = await self._write(name, content)
                count += len(left)
        return files, count

    async def _write(self, name: str, content: bytes) -> BackupFile:
        await in_thread(name, lambda: self._store.write(name, content))
        file = backup_file(name, content)
        self._on_file(file)
        return file


class _QueueCopy:
    """The copy of a queue: chunks that are written, and batches that are not written yet.

    Attributes:
        offset: Where the next read begins.
        checksum: Checksum of the last batch.
    """

    def __init__(self, offset: int, checksum: int = 0) -> None:
        self.offset = self.first_offset = offset
        self.checksum = checksum
        self.chunks: list[BackupChunk] = []
        self.batches: list[bytes] = []
        self.size = 0

    def continues(self, header: Header) -> bool:
        """Return whether a batch follows the others without a gap."""
        return not self.batches or header.first_offset == self.offset

    def add(self, header: Header, batch: bytes) -> None:
        """Add a batch that was read."""
        if not self.batches:
            self.first_offset = header.first_offset
        self.batches.append(batch)
        self.size += len(batch)
        self.offset, self.checksum = header.next_offset, header.checksum


def _copied_to(queue: QueueBackup) -> int:
    """Return the offset after the last message that the backup has of a queue.

    It may be below `next_offset`: what came behind it was removed then, perhaps with the queue. A
    queue that is added again has its messages again.
    """
    return queue.chunks[-1].next_offset if queue.chunks else 0


def _topic_backup(topic: Topic) -> TopicBackup:
    return TopicBackup(
        name=topic.name,
        topic_id=topic.topic_id,
        create_unix_ms=topic.create_unix_ms,
        queue_counts=dict(topic.queue_counts),
        permission=topic.permission,
        message_type=topic.message_type,
        retention_ms=topic.retention_ms,
        retention_bytes=topic.retention_bytes,
        inherited=topic.inherited,
        compaction=None if topic.compaction is None else astuple(topic.compaction),
    )


def _group_backup(group: Group, progress: Collection[offsets_pb.Progress]) -> GroupBackup:
    return GroupBackup(
        name=group.name,
        model=group.model,
        policy=group.policy,
        ownership=group.ownership,
        strategy=group.strategy,
        topics=tuple(one.topic for one in group.subscriptions),
        pause=(group.pause.by, group.pause.reason) if group.pause else None,
        progress=tuple(
            QueueProgressBackup(
                queue_from_pb(one.queue.queue),
                one.committed_offset,
                tuple((part.first_offset, part.next_offset) for part in one.acked),
            )
            for one in progress
        ),
    )
