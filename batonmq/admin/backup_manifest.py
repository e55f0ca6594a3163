"""The manifest of a backup: what a snapshot has, and in which files. Pure.

A snapshot is complete in itself: its manifest names every file that it needs, those of earlier
snapshots included. Files are never changed. The manifest is written last, so a snapshot that was
interrupted does not exist. The names of the other files have the beginning of their SHA-256: two
snapshots with one number, of which only one gets a manifest, do not replace files of each other.

snapshots/000002.json                             the manifest, with its own SHA-256
messages/<topic>/<broker>/<queue>/<first>-<next>-<sha>-000002   stored batches, one after the other
scheduled/<broker>-<sha>-000002                   scheduled batches, each behind its time and length
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote

from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range
from batonmq.errors import DataLoss, InvalidArgument

FORMAT = 1
_MANIFEST = re.compile(r"snapshots/(\d{6,})\.json")


@dataclass(frozen=True, slots=True)
class BackupFile:
    """A file of the backup with its size and its SHA-256, in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BackupChunk:
    """Consecutive stored batches of one queue, with the offsets [first_offset, next_offset)."""

    first_offset: int
    next_offset: int
    file: BackupFile


@dataclass(frozen=True, slots=True)
class QueueBackup:
    """The messages of one queue.

    Attributes:
        next_offset: End of the queue when it was read; the messages from the end of the last chunk
            on were removed by retention before they could be read.
        chunks: Ascending; between two of them retention has removed messages.
        checksum: Checksum of the last batch, to tell whether the queue is still the same.
    """

    queue: QueueRef
    next_offset: int
    chunks: tuple[BackupChunk, ...] = ()
    checksum: int = 0

    @property
    def count(self) -> int:
        """Number of messages."""
        return sum(one.next_offset - one.first_offset for one in self.chunks)

    def restored_offset(self, offset: int) -> int:
        """Return where `offset` is in the restored queue, whose messages begin at offset 0.

        An offset that the backup does not have becomes that of the next message which it has.
        """
        return sum(max(0, min(offset, one.next_offset) - one.first_offset) for one in self.chunks)


@dataclass(frozen=True, slots=True)
class TopicBackup:
    """A topic and its settings.

    Attributes:
        topic_id: With `create_unix_ms` it tells whether the topic is still the same.
        compaction: Settings of a compacted topic, in the order of `Compaction`; None for others.
    """

    name: str
    topic_id: int
    create_unix_ms: int
    queue_counts: Mapping[str, int]
    permission: str
    message_type: str
    retention_ms: int
    retention_bytes: int
    inherited: bool
    compaction: Sequence[int | None] | None = None

    @property
    def queue_count(self) -> int:
        """Number of queues on all brokers."""
        return sum(self.queue_counts.values())


@dataclass(frozen=True, slots=True)
class QueueProgressBackup:
    """Progress of a group on a queue: what is below `committed_offset`, and `acked`, is handled."""

    queue: QueueRef
    committed_offset: int
    acked: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupBackup:
    """A group: its settings and its progress.

    Attributes:
        topics: Topics that it subscribes to.
        pause: Operator and reason if it is paused; else None.
    """

    name: str
    model: str
    policy: str
    ownership: str
    strategy: str
    topics: tuple[str, ...]
    pause: tuple[str, str] | None
    progress: tuple[QueueProgressBackup, ...]


@dataclass(frozen=True, slots=True)
class AccessBackup:
    """Grants, blocks and quotas.

    Attributes:
        grants: Identity, role and resource.
        blocks: Subject and reason.
        quotas: Limits by identity.
    """

    grants: tuple[tuple[str, str, str], ...] = ()
    blocks: tuple[tuple[str, str], ...] = ()
    quotas: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupManifest:
    """One snapshot.

    Attributes:
        number: 1 for the first snapshot of a backup.
        begin_unix_ms: Start of the snapshot: progress is as of this time, messages are not older.
        scheduled: File of the scheduled batches by broker.
        scheduled_count: Number of scheduled batches.
        notes: What is not in the snapshot, and why; and which queue was copied anew.
    """

    number: int
    cluster: str
    begin_unix_ms: int
    end_unix_ms: int
    topics: tuple[TopicBackup, ...] = ()
    queues: tuple[QueueBackup, ...] = ()
    groups: tuple[GroupBackup, ...] = ()
    access: AccessBackup = AccessBackup()
    scheduled: Mapping[str, BackupFile] = field(default_factory=dict)
    scheduled_count: int = 0
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[BackupFile, ...]:
        """All files of the snapshot but the manifest."""
        chunks = (chunk.file for queue in self.queues for chunk in queue.chunks)
        return (*chunks, *self.scheduled.values())

    @property
    def message_count(self) -> int:
        """Number of messages in queues."""
        return sum(queue.count for queue in self.queues)

    def written_by(self, number: int) -> tuple[BackupFile, ...]:
        """Return the files that snapshot `number` has written."""
        return tuple(one for one in self.files if one.name.endswith(f"-{number:06}"))


def backup_file(name: str, content: bytes) -> BackupFile:
    """Return the entry of a file with this content."""
    return BackupFile(name, len(content), hashlib.sha256(content).hexdigest())


def check_content(file: BackupFile, content: bytes) -> bytes:
    """Return the content of a file of the backup.

    Raises:
        DataLoss: It is not what was written.
    """
    if len(content) != file.size or hashlib.sha256(content).hexdigest() != file.sha256:
        raise DataLoss(
            f"file {file.name} of the backup is damaged: it has {len(content)} bytes, and not the "
            f"SHA-256 {file.sha256} of the {file.size} bytes that were written",
            remedy="Restore an earlier snapshot that does not need the file: baton backup list.",
            facts={"file": file.name},
        )
    return content


def manifest_name(number: int) -> str:
    """Return the name of the manifest of a snapshot."""
    return f"snapshots/{number:06}.json"


def snapshot_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the snapshots among files, ascending."""
    return sorted(int(found[1]) for name in names if (found := _MANIFEST.fullmatch(name)))


def chunk_name(
    queue: QueueRef, first_offset: int, next_offset: int, content: bytes, number: int
) -> str:
    """Return the name of the file of a chunk that snapshot `number` writes."""
    topic = quote(queue.topic, safe="")
    folder = f"messages/{topic}/{queue.broker}/{queue.queue_id}"
    return f"{folder}/{first_offset:020}-{next_offset:020}-{_short_digest(content)}-{number:06}"


def scheduled_name(broker: str, content: bytes, number: int) -> str:
    """Return the name of the file of a broker's scheduled batches."""
    return f"scheduled/{broker}-{_short_digest(content)}-{number:06}"


def _short_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def encode_manifest(manifest: BackupManifest) -> bytes:
    """Return the content of the file of a manifest."""
    text = json.dumps(asdict(manifest), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    whole = {"format": FORMAT, "sha256": digest, "manifest": json.loads(text)}
    return (json.dumps(whole, sort_keys=True, indent=1) + "\n").encode()


def decode_manifest(content: bytes, name: str) -> BackupManifest:
    """Inverse of `encode_manifest`.

    Raises:
        DataLoss: The file is damaged.
        InvalidArgument: It is of a later format.
    """
    try:
        whole = json.loads(content)
        text = json.dumps(whole["manifest"], sort_keys=True)
        intact = hashlib.sha256(text.encode()).hexdigest() == whole["sha256"]
        if whole["format"] != FORMAT:
            raise InvalidArgument(
                f"{name} has the format {whole['format']}; this version knows {FORMAT}",
                remedy="Use the version of baton that wrote it, or a later one.",
            )
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(name) from error
    if not intact:
        raise _damaged(name)
    return _manifest(whole["manifest"])


def _damaged(name: str) -> DataLoss:
    return DataLoss(
        f"{name} of the backup is damaged",
        remedy="Restore another snapshot: baton backup list.",
        facts={"file": name},
    )


def _manifest(raw: Mapping[str, Any]) -> BackupManifest:
    return BackupManifest(
        number=raw["number"],
        cluster=raw["cluster"],
        begin_unix_ms=raw["begin_unix_ms"],
        end_unix_ms=raw["end_unix_ms"],
        topics=tuple(TopicBackup(**one) for one in raw["topics"]),
        queues=tuple(map(_queue, raw["queues"])),
        groups=tuple(map(_group, raw["groups"])),
        access=AccessBackup(
            tuple((a, b, c) for a, b, c in raw["access"]["grants"]),
            tuple((a, b) for a, b in raw["access"]["blocks"]),
            raw["access"]["quotas"],
        ),
        scheduled={name: BackupFile(**one) for name, one in raw["scheduled"].items()},
        scheduled_count=raw["scheduled_count"],
        notes=tuple(raw["notes"]),
    )


def _queue(raw: Mapping[str, Any]) -> QueueBackup:
    chunks = (
        BackupChunk(one["first_offset"], one["next_offset"], BackupFile(**one["file"]))
        for one in raw["chunks"]
    )
    return QueueBackup(_ref(raw["queue"]), raw["next_offset"], tuple(chunks), raw["checksum"])


def _group(raw: Mapping[str, Any]) -> GroupBackup:
    progress = (
        QueueProgressBackup(
            _ref(one["queue"]),
            one["committed_offset"],
            tuple((begin, end) for begin, end in one["acked"]),
        )
        for one in raw["progress"]
    )
    pause = raw["pause"]
    return GroupBackup(
        raw["name"],
        raw["model"],
        raw["policy"],
        raw["ownership"],
        raw["strategy"],
        tuple(raw["topics"]),
        (pause[0], pause[1]) if pause else None,
        tuple(progress),
    )


def _ref(raw: Mapping[str, Any]) -> QueueRef:
    return QueueRef(raw["topic"], raw["broker"], raw["queue_id"])
