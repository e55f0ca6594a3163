"""Backups and restores that leave out a rule (docs/how-to/operator-tasks.md#back-up-a-cluster)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from batonmq._core.queues import QueueRef
from batonmq.admin import backup_restorer, backup_writer
from batonmq.admin.backup_manifest import BackupFile, GroupBackup, QueueBackup, backup_file
from batonmq.admin.backup_restorer import BackupRestorer
from batonmq.admin.backup_writer import BackupWriter


def progress_is_read_last(patch: pytest.MonkeyPatch) -> None:
    """The ends of the queues are read before the progress of the groups."""
    groups, extents = BackupWriter._groups, BackupWriter._extents
    read: dict[BackupWriter, Mapping[QueueRef, tuple[int, int]]] = {}

    async def groups_after_extents(self: BackupWriter) -> tuple[GroupBackup, ...]:
        queues = [queue for topic in await self._topics() for queue in topic.queues]
        read[self] = await extents(self, queues)
        return await groups(self)

    async def extents_before(self: BackupWriter, queues: Any) -> Any:
        found = await extents(self, queues)
        return {queue: read[self].get(queue, found[queue]) for queue in found}

    patch.setattr(BackupWriter, "_groups", groups_after_extents)
    patch.setattr(BackupWriter, "_extents", extents_before)


def scheduled_messages_are_read_last(patch: pytest.MonkeyPatch) -> None:
    """Scheduled messages are listed after the queues were copied."""
    scheduled, write = BackupWriter._scheduled, BackupWriter._write_scheduled

    topics: dict[BackupWriter, Any] = {}

    async def nothing(self: BackupWriter, of: Any) -> dict[str, Any]:
        topics[self] = of
        return {}

    async def listed_now(self: BackupWriter, waiting: Any) -> Any:
        del waiting
        return await write(self, await scheduled(self, topics[self]))

    patch.setattr(BackupWriter, "_scheduled", nothing)
    patch.setattr(BackupWriter, "_write_scheduled", listed_now)


def delivered_messages_stay_scheduled(patch: pytest.MonkeyPatch) -> None:
    """A scheduled message that is delivered during the snapshot is in it twice."""
    patch.setattr(backup_writer, "scheduled_key", lambda header: None)


def manifest_is_written_first(patch: pytest.MonkeyPatch) -> None:
    """The files of a snapshot are written after its manifest."""
    write = BackupWriter._write
    late: dict[BackupWriter, list[tuple[str, bytes]]] = {}

    async def broken(self: BackupWriter, name: str, content: bytes) -> BackupFile:
        files = late.setdefault(self, [])
        if not name.startswith("snapshots/"):
            files.append((name, content))
            return backup_file(name, content)
        manifest = await write(self, name, content)
        for each in files:
            await write(self, *each)
        return manifest

    patch.setattr(BackupWriter, "_write", broken)


def restored_batches_have_random_ids(patch: pytest.MonkeyPatch) -> None:
    """A repeated restore stores a batch under another id."""
    numbers = itertools.count(1 << 40)
    patch.setattr(backup_restorer, "restored_id", lambda *_: next(numbers))


def deliveries_are_of_another_snapshot(patch: pytest.MonkeyPatch) -> None:
    """A restore that goes on takes delivered scheduled messages for those of another snapshot."""

    async def broken(*_: Any) -> bool:
        return False

    patch.setattr(BackupRestorer, "_are_delivered", broken)


def removed_queues_lose_scheduled_messages(patch: pytest.MonkeyPatch) -> None:
    """Scheduled messages for a queue that was removed are not restored."""

    def broken(
        topic: str, broker: str, queue_id: int, mapping: Mapping[QueueRef, QueueRef]
    ) -> QueueRef | None:
        return mapping.get(QueueRef(topic, broker, queue_id))

    patch.setattr(backup_restorer, "scheduled_queue", broken)


def deleted_topics_keep_scheduled_messages(patch: pytest.MonkeyPatch) -> None:
    """Scheduled messages of a deleted topic are in a snapshot, and are restored to a newer one."""
    patch.setattr(BackupWriter, "_has_topic_of", lambda *_: True)


def single_acknowledgements_are_lost(patch: pytest.MonkeyPatch) -> None:
    """Only the committed offset of a group is restored."""

    async def broken(*_: Any) -> None: ...

    patch.setattr(BackupRestorer, "_acknowledge", broken)


def offsets_are_not_translated(patch: pytest.MonkeyPatch) -> None:
    """Progress is restored as it was, although offsets begin at 0."""
    patch.setattr(QueueBackup, "restored_offset", lambda self, offset: min(offset, self.count))


def changed_batches_are_not_found(patch: pytest.MonkeyPatch) -> None:
    """A restore does not compare a file with its checksum, and verification does not either."""
    patch.setattr("batonmq.admin._backup_files.check_content", lambda file, content: content)
