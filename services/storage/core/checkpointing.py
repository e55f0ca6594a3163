"""How a checkpoint is taken while the node works on: four steps, in this order.

`begin` notes the state, at once. `flush` moves what the indexes have in memory to their files, a
part at a time. `write` makes all of it durable, and then the checkpoint; it may block, and
run in another thread. `done` notes that it did. The log has to be safe up to the checkpoint's
position before `write`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.storage.core.checkpoint import PATH, Checkpoint, QueueState, encode
from services.storage.core.consumequeue import ConsumeQueue, topic_of
from services.storage.core.files import Disk
from services.storage.core.keyindex import Unsaved, encode_run, open_path
from services.storage.core.store import Store

QUEUES_AT_ONCE = 64


@dataclass(slots=True)
class Capture:
    """A checkpoint in the making.

    Attributes:
        doomed: Files that this checkpoint does not need any more, unlike the one before.
        paths: Files of consume queues to be made durable.
        flushed: The queues they belong to, and how far they reach.
    """

    checkpoint: Checkpoint
    keys: Unsaved
    doomed: tuple[str, ...]
    paths: list[str] = field(default_factory=list)
    flushed: list[tuple[ConsumeQueue, int]] = field(default_factory=list)


class Checkpointing:
    """See the module. One checkpoint at a time.

    Args:
        position: Of the last checkpoint, or the first position of the log.

    Attributes:
        position: Of the last checkpoint. The log behind it is needed for the next start.
    """

    def __init__(self, disk: Disk, store: Store, position: int) -> None:
        self._disk, self._store, self.position = disk, store, position
        self._doomed: list[str] = []

    @property
    def doomed(self) -> bool:
        """Whether something waits to be removed."""
        return bool(self._doomed)

    def remove_later(self, paths: Iterable[str]) -> None:
        """Remove files and folders of indexes once no checkpoint counts on them."""
        self._doomed += paths

    def begin(self) -> Capture:
        """The state at the present end of the log."""
        store, position = self._store, self._store.log.next_position
        keys = store.keys.unsaved(position)
        queues = [
            QueueState(
                topic_of(queue.folder), *key, queue.first_offset, queue.next_offset,
                queue.first_position,
            )
            for key, queue in store.queues.items()
        ]  # fmt: skip
        return Capture(
            Checkpoint(
                position,
                store.store_unix_ms,
                keys.open_run,
                queues,
                store.producers.snapshot(),
                store.schedule.waiting.snapshot(),
            ),
            keys,
            tuple(self._doomed),
        )

    def flush(self, capture: Capture) -> Iterator[None]:
        """Flush the consume queues; pauses now and then for others.

        Raises:
            OSError: a file can't be written; the checkpoint is to be given up.
        """
        for number, queue in enumerate(list(self._store.queues.values()), start=1):
            if queue.has_unsaved:
                queue.flush()
                capture.paths += queue.unsaved()
                capture.flushed.append((queue, queue.next_offset))
            if number % QUEUES_AT_ONCE == 0:
                yield

    def write(self, capture: Capture) -> None:
        """Make everything durable, the checkpoint last.

        Raises:
            OSError: it is not; the checkpoint before it is still good.
        """
        disk, keys = self._disk, capture.keys
        for run in keys.ended:
            disk.replace(run.path, encode_run(run))
        path = open_path(keys.open_run.stretch.first_position)
        if len(keys.rows):
            file = disk.open(path, create=True)
            try:
                file.write(keys.rows_from * keys.rows.itemsize, [keys.rows.tobytes()])
            finally:
                file.close()
        disk.sync([*capture.paths, path])
        disk.replace(PATH, encode(capture.checkpoint))
        for path in filter(None, (*capture.doomed, keys.obsolete)):
            disk.remove(path)

    def done(self, capture: Capture) -> None:
        """Note that `write` has ended well."""
        for queue, next_offset in capture.flushed:
            queue.saved(next_offset)
        self._store.keys.saved(capture.keys)
        for path in capture.doomed:
            self._store.cache.forget(path)
        del self._doomed[: len(capture.doomed)]
        self.position = capture.checkpoint.position

    def run(self) -> None:
        """All steps at once; the log is safe up to its end."""
        capture = self.begin()
        for _ in self.flush(capture):
            pass
        self.write(capture)
        self.done(capture)
