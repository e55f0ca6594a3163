"""What a restore does: which queue becomes which, and where progress goes. Pure.

Offsets of restored queues begin at 0, and progress is translated: what a group had handled in the
snapshot counts as handled, and nothing else does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range, normalize
from batonmq.admin.backup_manifest import BackupManifest, GroupBackup, QueueBackup
from batonmq.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class RestoredProgress:
    """Progress of a group on a restored queue: `acked` is at or above `committed_offset`."""

    queue: QueueRef
    committed_offset: int
    acked: tuple[Range, ...]


def map_queues(
    backups: Iterable[QueueRef], present: Mapping[str, Collection[QueueRef]]
) -> dict[QueueRef, QueueRef]:
    """Return the queue that each queue of the backup becomes.

    A queue stays on its broker with its id if the restored topic has such a queue; the others get
    the queues that are left, both in ascending order.

    Args:
        present: Queues of the restored topics, by topic.

    Raises:
        InvalidArgument: A topic has fewer queues than in the backup.
    """
    by_topic: dict[str, list[QueueRef]] = defaultdict(list)
    for queue in sorted(backups):
        by_topic[queue.topic].append(queue)
    mapping: dict[QueueRef, QueueRef] = {}
    for topic, queues in by_topic.items():
        have = present.get(topic, ())
        if len(have) < len(queues):
            raise InvalidArgument(
                f"topic {topic} has {len(have)} queues, the backup has {len(queues)}",
                remedy=f"Add queues: baton topic update {topic} --queues {len(queues)}; or delete "
                "the topic, and repeat the restore.",
                facts={"topic": topic, "actual": len(have), "wanted": len(queues)},
            )
        left = sorted(set(have) - set(queues))
        for queue in queues:
            mapping[queue] = queue if queue in have else left.pop(0)
    return mapping


def scheduled_queue(
    topic: str, broker: str, queue_id: int, mapping: Mapping[QueueRef, QueueRef]
) -> QueueRef | None:
    """Return the restored queue of a scheduled message; None if its topic is not in the snapshot.

    The queue for which it was scheduled may have been removed since. Then it goes to another one,
    on the same broker if the topic has queues there, as a cluster that runs delivers it.
    """
    queues = sorted(queue for queue in mapping if queue.topic == topic)
    queues = [queue for queue in queues if queue.broker == broker] or queues
    if not queues:
        return None
    wanted = QueueRef(topic, broker, queue_id)
    return mapping[wanted if wanted in mapping else queues[queue_id % len(queues)]]


def restored_progress(
    group: GroupBackup, manifest: BackupManifest, mapping: Mapping[QueueRef, QueueRef]
) -> list[RestoredProgress]:
    """Return the progress of a group on the restored queues.

    A queue without progress, of a topic on which the group has progress, begins at its first
    message: nothing of it was handled.
    """
    backups = {one.queue: one for one in manifest.queues}
    known = {one.queue: one for one in group.progress if one.queue in backups}
    topics = {queue.topic for queue in known}
    restored = []
    for queue, backup in backups.items():
        if queue in known:
            one = known[queue]
            restored.append(_translated(mapping[queue], backup, one.committed_offset, one.acked))
        elif queue.topic in topics:
            restored.append(RestoredProgress(mapping[queue], 0, ()))
    return restored


def _translated(
    queue: QueueRef, backup: QueueBackup, committed_offset: int, acked: Sequence[Range]
) -> RestoredProgress:
    committed = backup.restored_offset(committed_offset)
    moved = ((backup.restored_offset(a), backup.restored_offset(b)) for a, b in acked)
    ranges = normalize((max(a, committed), b) for a, b in moved if b > committed)
    return RestoredProgress(queue, committed, tuple(ranges))


def find_excess(manifest: BackupManifest) -> list[str]:
    """Return where progress is beyond the messages of the snapshot; empty in a sound snapshot."""
    ends = {one.queue: one.next_offset for one in manifest.queues}
    return [
        f"group {group.name} has handled {one.queue} up to {one.committed_offset}, and the "
        f"snapshot has it up to {ends[one.queue]}"
        for group in manifest.groups
        for one in group.progress
        if one.queue in ends and one.committed_offset > ends[one.queue]
    ]
