"""Takes a checkpoint while the node works, in four steps:

1. `begin` captures the state at the end of the log, at once.
2. `collect` copies the entries that consume queues have only in memory.
3. `write` writes the indexes, syncs them, and then writes the checkpoint. It blocks and may run in
   another thread. The log must be safe up to the checkpoint's position before.
4. `done` records that the checkpoint is written.

A checkpoint carries out the purge orders before it, unless `carry_out` has: the queues drop their
messages in step 1, and the segments read as purged from then on. Their files are replaced at the
begin of step 3.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from batonmq_server.runtime.descriptor_shortage import is_shortage
from batonmq_server.storage.core.checkpoint import PATH, Checkpoint, QueueState, encode
from batonmq_server.storage.core.commitlog import PositionRange, purged_head, segment_path
from batonmq_server.storage.core.compacted import Section
from batonmq_server.storage.core.consumequeue import ConsumeQueue, UnsavedEntries, topic_of
from batonmq_server.storage.core.delay_queue import DelaySnapshot
from batonmq_server.storage.core.files import Disk
from batonmq_server.storage.core.keyindex import UnsavedRuns, encode_run, open_path
from batonmq_server.storage.core.open_transactions import TransactionSnapshot
from batonmq_server.storage.core.outputs import OutputSnapshot
from batonmq_server.storage.core.producers import ProducerColumns, QueueKey
from batonmq_server.storage.core.purge import due_segments
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.core.transactions import EndedTransaction, encode_ended

QUEUES_AT_ONCE = 64


@dataclass(slots=True)
class CheckpointCapture:
    """The state that one checkpoint writes.

    Attributes:
        columns: Keys, first offsets, next offsets and first positions of `queues` at that moment.
        obsolete_paths: Files that the previous checkpoint needs and this one does not.
        purged: Segments to purge.
        sections: Sections of compacted queues.
        entries: Entries of consume queues that must be made durable.
    """

    position: int
    store_unix_ms: int
    keys: UnsavedRuns
    queues: list[ConsumeQueue]
    columns: tuple[list[QueueKey], list[int], list[int], list[int]]
    producers: ProducerColumns
    waiting: DelaySnapshot
    open_transactions: TransactionSnapshot
    ended_transactions: list[tuple[int, EndedTransaction]]
    outputs: OutputSnapshot
    obsolete_paths: tuple[str, ...]
    purged: list[PositionRange]
    sections: list[tuple[QueueKey, Section]]
    entries: list[tuple[ConsumeQueue, UnsavedEntries]] = field(default_factory=list)


class CheckpointWriter:
    """Takes checkpoints of a store, one at a time.

    Args:
        position: Position of the last checkpoint, or the first position of the log.

    Attributes:
        position: Position of the last checkpoint; the next start reads the log from there.
    """

    def __init__(self, disk: Disk, store: MessageStore, position: int) -> None:
        self._disk, self._store, self.position = disk, store, position
        self._obsolete_paths: list[str] = []
        self._purging: list[PositionRange] = []

    def is_purged(self, position: int) -> bool:
        """Return whether the segment with `position` is purged, and a checkpoint says so."""
        unwritten = any(begin <= position < end for begin, end in self._purging)
        return not unwritten and self._store.log.is_purged(position)

    @property
    def has_obsolete(self) -> bool:
        """Whether there are files that the next checkpoint removes."""
        return bool(self._obsolete_paths)

    def remove_later(self, paths: Iterable[str]) -> None:
        """Remove index files and folders after the next checkpoint, which does not need them."""
        self._obsolete_paths += paths

    @property
    def orders_end(self) -> int:
        """Position after the last purge or compaction order that is not carried out; 0 without any.

        The log must be safe up to here before `begin`.
        """
        purges, compactions = self._store.purge_orders, self._store.compacted.pending
        ends = [order.next_position for order in purges]
        return max([*ends, *(order.next_position for order in compactions)], default=0)

    def carry_out(self, position: int) -> None:
        """Carry out the purge orders before `position`: the log must be safe up to there.

        The next checkpoint makes it durable; after a crash before that the orders are read again.
        No checkpoint may be in progress.
        """
        store, orders = self._store, self._store.due_orders(position)
        self.remove_later(store.drop_messages({id_ for one in orders for id_ in one.topic_ids}))
        self.remove_later(store.trim(trim for one in orders for trim in one.trims))
        # Their files are not read from now on: they are replaced while other tasks run.
        for segment in (due := due_segments(store.log, orders)):
            store.log.purged(segment)
        self._purging = [one for one in self._purging if store.log.is_purged(one[0])] + due
        store.carried_out_to = max(store.carried_out_to, position)

    def begin(self) -> CheckpointCapture:
        """Capture the state at the present end of the log."""
        store, position = self._store, self._store.log.next_position
        store.apply_compactions(position)
        self.remove_later(store.take_unneeded_paths())
        self.carry_out(position)
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
            store.transactions.open.snapshot(),
            store.transactions.snapshot_ended(),
            store.outputs.snapshot(),
            tuple(self._obsolete_paths),
            list(self._purging),
            [
                (key, section)
                for key, part in store.compacted.parts.items()
                for section in part.sections
            ],
        )

    def collect(self, capture: CheckpointCapture) -> Iterator[None]:
        """Copy entries that are only in memory; yields now and then so that other tasks run."""
        for number, queue in enumerate(list(self._store.queues.values()), start=1):
            if queue.has_unsaved:
                capture.entries.append((queue, queue.unsaved()))
            if number % QUEUES_AT_ONCE == 0:
                yield

    def write(self, capture: CheckpointCapture) -> None:
        """Make everything durable, the checkpoint last.

        Raises:
            OSError: the checkpoint is not written; the previous one is still valid. Unless the
                disk is only full, or a file could not be opened for lack of a descriptor, it is
                unknown which index entries are on disk.
        """
        disk, keys = self._disk, capture.keys
        for begin, end in capture.purged:  # first, as it frees space for the rest
            disk.replace_sparse(segment_path(begin), purged_head(end - begin), end - begin)
        paths = []
        for run in keys.ended:
            disk.replace(run.path, encode_run(run))
        for _, entries in capture.entries:
            paths += entries.paths
            for path, at, raw in entries.writes:
                self._write(path, at, raw)
        if len(keys.rows):
            paths.append(open_path(keys.open_run.extent.first_position))
            self._write(paths[-1], keys.rows_from * keys.rows.itemsize, keys.rows.tobytes())
        try:
            disk.sync(paths)
        except OSError as error:
            if is_shortage(error):
                raise  # no sync has failed: the next checkpoint writes and syncs everything again
            raise OSError(errno.EIO, f"indexes not synced: {error}") from error
        disk.replace(PATH, encode(_checkpoint(capture)))
        for path in filter(None, (*capture.obsolete_paths, keys.obsolete)):
            disk.remove(path)

    def done(self, capture: CheckpointCapture) -> Iterator[None]:
        """Record that `write` succeeded; yields now and then so that other tasks run."""
        self.position = capture.position
        self._purging = [one for one in self._purging if one not in capture.purged]
        orders = self._store.purge_orders
        orders[:] = [order for order in orders if order.next_position > capture.position]
        self._store.keys.saved(capture.keys)
        for path in capture.obsolete_paths:
            self._store.cache.forget(path)
        del self._obsolete_paths[: len(capture.obsolete_paths)]
        for number, (queue, entries) in enumerate(capture.entries, start=1):
            queue.saved(entries)
            if number % QUEUES_AT_ONCE == 0:
                yield

    def run(self) -> None:
        """Run all four steps; the log must be safe up to its end."""
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
        _transactions(capture),
        capture.outputs.encode(),
        capture.sections,
    )


def _transactions(capture: CheckpointCapture) -> bytes:
    """Return the transactions of a checkpoint; empty if there are none."""
    if not capture.ended_transactions and not capture.open_transactions.groups:
        return b""
    return capture.open_transactions.encode() + encode_ended(capture.ended_transactions)
