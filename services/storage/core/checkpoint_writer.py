"""How a checkpoint is taken while the node works on: four steps, in this order.

`begin` notes the state, at once. `collect` copies what the consume queues have only in memory.
`write` writes it, makes everything durable, and then the checkpoint; it blocks, and may run in
another thread. `done` notes that it did. The log has to be safe up to the checkpoint's position
before `write`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from batonmq_server.storage.core.checkpoint import PATH, Checkpoint, QueueState, encode
from batonmq_server.storage.core.consumequeue import ConsumeQueue, UnsavedEntries, topic_of
from batonmq_server.storage.core.delay_queue import DelaySnapshot
from batonmq_server.storage.core.files import Disk
from batonmq_server.storage.core.keyindex import UnsavedRuns, encode_run, open_path
from batonmq_server.storage.core.producers import ProducerColumns, QueueKey
from batonmq_server.storage.core.store import Store

QUEUES_AT_ONCE = 64


@dataclass(slots=True)
class CheckpointCapture:
    """A checkpoint in the making.

    Attributes:
        columns: Their keys, first offsets, next offsets and first positions, as they were.
        obsolete_paths: Files that this checkpoint does not need any more, unlike the one before.
        entries: Of consume queues, to be made durable.
    """

    position: int
    store_unix_ms: int
    keys: UnsavedRuns
    queues: list[ConsumeQueue]
    columns: tuple[list[QueueKey], list[int], list[int], list[int]]
    producers: ProducerColumns
    waiting: DelaySnapshot
    obsolete_paths: tuple[str, ...]
    entries: list[tuple[ConsumeQueue, UnsavedEntries]] = field(default_factory=list)


class CheckpointWriter:
    """See the module. One checkpoint at a time.

    Args:
        position: Of the last checkpoint, or the first position of the log.

    Attributes:
        position: Of the last checkpoint. The log behind it is needed for the next start.
    """

    def __init__(self, disk: Disk, store: Store, position: int) -> None:
        self._disk, self._store, self.position = disk, store, position
        self._obsolete_paths: list[str] = []

    @property
    def has_obsolete(self) -> bool:
        """Whether something waits to be removed."""
        return bool(self._obsolete_paths)

    def remove_later(self, paths: Iterable[str]) -> None:
        """Remove files and folders of indexes once no checkpoint counts on them."""
        self._obsolete_paths += paths

    def begin(self) -> CheckpointCapture:
        """The state at the present end of the log."""
        store, position = self._store, self._store.log.next_position
        queues = list(store.queues.values())
        return CheckpointCapture(
            position,
            store.store_unix_ms,
            store.keys.unsaved(position),
            queues,
            (
                list(store.queues),
                [queue.first_offset for queue in queues],
                [queue.next_offset for queue in queues],
                [queue.first_position for queue in queues],
            ),
            store.producers.snapshot(),
            store.schedule.waiting.snapshot(),
            tuple(self._obsolete_paths),
        )

    def collect(self, capture: CheckpointCapture) -> Iterator[None]:
        """Copy what the consume queues have only in memory; pauses now and then for others."""
        for number, queue in enumerate(list(self._store.queues.values()), start=1):
            if queue.has_unsaved:
                capture.entries.append((queue, queue.unsaved()))
            if number % QUEUES_AT_ONCE == 0:
                yield

    def write(self, capture: CheckpointCapture) -> None:
        """Make everything durable, the checkpoint last.

        Raises:
            OSError: it is not; the checkpoint before it is still good. Unless the disk is just
                full, what of the indexes is on disk is not known, and never will be.
        """
        disk, keys = self._disk, capture.keys
        paths = []
        for run in keys.ended:
            disk.replace(run.path, encode_run(run))
        for _, entries in capture.entries:
            paths += entries.paths
            for path, at, raw in entries.writes:
                self._write(path, at, raw)
        if len(keys.rows):
            paths.append(open_path(keys.open_run.stretch.first_position))
            self._write(paths[-1], keys.rows_from * keys.rows.itemsize, keys.rows.tobytes())
        try:
            disk.sync(paths)
        except OSError as error:
            raise OSError(errno.EIO, f"indexes not synced: {error}") from error
        disk.replace(PATH, encode(_checkpoint(capture)))
        for path in filter(None, (*capture.obsolete_paths, keys.obsolete)):
            disk.remove(path)

    def done(self, capture: CheckpointCapture) -> Iterator[None]:
        """Note that `write` has ended well; pauses now and then for others."""
        self.position = capture.position
        self._store.keys.saved(capture.keys)
        for path in capture.obsolete_paths:
            self._store.cache.forget(path)
        del self._obsolete_paths[: len(capture.obsolete_paths)]
        for number, (queue, entries) in enumerate(capture.entries, start=1):
            queue.saved(entries)
            if number % QUEUES_AT_ONCE == 0:
                yield

    def run(self) -> None:
        """All steps at once; the log is safe up to its end."""
        capture = self.begin()
        for _ in self.collect(capture):
            pass
        self.write(capture)
        for _ in self.done(capture):
            pass

    def _write(self, path: str, at: int, raw: bytes) -> None:
        file = self._disk.open(path, create=True)
        try:
            file.write(at, [raw])
        finally:
            file.close()


def _checkpoint(capture: CheckpointCapture) -> Checkpoint:
    queues = [
        QueueState(topic_of(queue.folder), *key, *numbers)
        for queue, key, *numbers in zip(capture.queues, *capture.columns, strict=True)
    ]
    return Checkpoint(
        capture.position,
        capture.store_unix_ms,
        capture.keys.open_run,
        queues,
        capture.producers.states(),
        capture.waiting.encode(),
    )
