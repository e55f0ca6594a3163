"""Opens a data directory and keeps it: lock, epochs, recovery, sync, cut, close.

data_dir/lock            flock of the process that owns the folder
data_dir/epochs          which epoch wrote which part of the log
data_dir/synced          up to where the log is synced
data_dir/floors          where queues go on that have lost messages to retention
data_dir/checkpoint      up to where the indexes are good, and what was known then
data_dir/recovery.json   report of the last start
data_dir/log/            segments
data_dir/consumequeue/   index by queue and offset
data_dir/keyindex/       index by topic and key
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from batonmq.errors import DataLoss
from batonmq_server.runtime.position import Position
from batonmq_server.storage.core import checkpoint, epochs, floors
from batonmq_server.storage.core.checkpoint_writer import CheckpointWriter
from batonmq_server.storage.core.commitlog import FOLDER as LOG
from batonmq_server.storage.core.commitlog import (
    CommitLog,
    PositionRange,
    UnsyncedFiles,
    segment_path,
)
from batonmq_server.storage.core.consumequeue import FOLDER as CONSUMEQUEUE
from batonmq_server.storage.core.epochs import EpochHistory
from batonmq_server.storage.core.files import Disk, FileCache
from batonmq_server.storage.core.keyindex import FOLDER as KEYINDEX
from batonmq_server.storage.core.keyindex import KeyIndex
from batonmq_server.storage.core.producers import ProducerTable
from batonmq_server.storage.core.recovery import (
    Recovery,
    RecoveryReport,
    decode_synced,
    encode_synced,
)
from batonmq_server.storage.core.store import Store
from batonmq_server.storage.disk import RealDisk, locked

log = logging.getLogger(__name__)

REPORT = "recovery.json"
SYNCED = "synced"
_LAST_EPOCH = "epoch"
"""What folders had before there was a history: the epoch of the last start, decimal."""


class StorageNode:
    """An open data directory. All blocking: `sync` is for a worker thread.

    Attributes:
        store: What is in it.
        report: What recovery did.
        recovery: Takes batches that come from elsewhere, as it did at the start.
        checkpointing: Takes checkpoints; the start takes none.
        history: Which epoch wrote which part of the log.
    """

    def __init__(
        self, disk: Disk, recovery: Recovery, report: RecoveryReport, history: EpochHistory
    ) -> None:
        self.disk, self.store, self.report = disk, recovery.store, report
        self.recovery, self.history = recovery, history
        self.checkpointing = CheckpointWriter(disk, self.store, report.checkpoint_position)
        self._synced = disk.open(SYNCED, create=True)

    @property
    def position(self) -> Position:
        """How far this copy has come."""
        return self.history.position(self.store.log.next_position)

    def sync(self, unsynced: UnsyncedFiles) -> None:
        """Make the log safe up to `unsynced.position`, and note that it is.

        Raises:
            OSError: it may not be safe, and never will be.
        """
        for file in unsynced.files:
            file.sync()
        self._synced.write(0, [encode_synced(unsynced.position)])

    def begin_epoch(self, epoch: int) -> None:
        """Note, durably, that everything from the end of the log on is written by `epoch`.

        What was elected has everything that counts, so nothing is missing any more.
        """
        history = self.history.with_epoch(epoch, self.store.log.next_position)
        self.keep(replace(history, damaged=False))
        self.store.epoch = epoch

    def keep(self, history: EpochHistory) -> None:
        """Make `history` that of the log, durably."""
        if history != self.history:
            self.disk.replace(epochs.PATH, epochs.encode(history))
            self.history = history

    def cut(self, position: int, *, damaged: bool = False) -> None:
        """Forget everything from `position` on, durably; afterwards only `close` may be called.

        Args:
            damaged: Some of it was safe.
        """
        if damaged:
            self.keep(replace(self.history, damaged=True))
        if position < self.checkpointing.position:
            self.disk.replace(floors.PATH, floors.encode(self.store.floors()))
            self.disk.remove(checkpoint.PATH)
        self.disk.replace(SYNCED, encode_synced(position))
        self.store.log.truncate(position)
        self.keep(self.history.truncated(position))

    def close(self) -> None:
        """Give the files back. What is not synced stays to the operating system."""
        self.store.log.close()
        self._synced.close()


@dataclass(frozen=True, slots=True)
class LogStart:
    """Where a copy begins that has nothing yet: at position 0 if nothing else is said.

    Attributes:
        floors: Where the queues go on, as in the file of that name.
        segment: The first one.
        history: Of the log up to there.
    """

    floors: bytes = b""
    segment: PositionRange = (0, 0)
    history: EpochHistory = field(default_factory=EpochHistory)


def reset_disk(disk: Disk, start: LogStart) -> None:
    """Give up all that `disk` has, and make it a copy that begins there; nobody has it open."""
    _wipe(disk)
    begin, end = start.segment
    if begin < end:
        disk.replace(floors.PATH, start.floors)
        disk.create(segment_path(begin), end - begin).close()
    disk.replace(epochs.PATH, epochs.encode(replace(start.history, damaged=True)))


@contextmanager
def opened(
    folder: Path,
    *,
    segment_bytes: int,
    monotonic_ms: Callable[[], int],
    accept_loss: bool = False,
) -> Iterator[StorageNode]:
    """Own `folder`, recover what is in it, and close it in the end.

    Raises:
        InUse: another process owns the folder.
        DataLoss: acknowledged messages are damaged, and `accept_loss` is not set.
    """
    with locked(folder):
        disk = RealDisk(folder)
        recovering = recovered(
            disk, segment_bytes=segment_bytes, monotonic_ms=monotonic_ms, accept_loss=accept_loss
        )
        with recovering as node:
            yield node


@contextmanager
def recovered(
    disk: Disk,
    *,
    segment_bytes: int,
    monotonic_ms: Callable[[], int],
    accept_loss: bool = False,
    replicated: bool = False,
) -> Iterator[StorageNode]:
    """Recover what is on `disk`, which nobody else uses, and close it in the end.

    A node without replicas begins an epoch. One with replicas does so when it is elected; what of
    its copy is damaged it cuts off, to fetch it from the others.

    Raises:
        DataLoss: acknowledged messages are damaged, and `accept_loss` is not set.
    """
    begin_ms = monotonic_ms()
    cache = FileCache(disk)
    attempt = _Attempt(disk, cache, segment_bytes)
    try:
        if replicated:
            history = _of_replica(attempt, accept_loss=accept_loss)
        else:
            history = _history(disk)
            epoch = history.epoch + 1
            attempt.run(epoch, accept_loss=accept_loss)
            end = attempt.report.next_position
            history = replace(history.truncated(end).with_epoch(epoch, end), damaged=False)
        _keep_history(disk, history)
        node = StorageNode(disk, attempt.recovery, attempt.report, history)
        if replicated:
            node.store.confirmed(attempt.report.checkpoint_position)
        node.checkpointing.remove_later(attempt.recovery.obsolete_paths)
        unsynced = node.store.log.unsynced()
        node.sync(unsynced)
        node.store.synced(unsynced.position)
        node.report = replace(attempt.report, elapsed_ms=monotonic_ms() - begin_ms)
        disk.replace(REPORT, json.dumps(asdict(node.report), indent=2).encode())
        try:
            yield node
        finally:
            node.close()
    finally:
        cache.close()
        attempt.close()


class _Attempt:
    """A try to recover; the next one begins anew."""

    recovery: Recovery
    report: RecoveryReport

    def __init__(self, disk: Disk, cache: FileCache, segment_bytes: int) -> None:
        self.disk, self._cache, self._segment_bytes = disk, cache, segment_bytes
        self._log: CommitLog | None = None

    def run(self, epoch: int, *, accept_loss: bool) -> None:
        """Recover.

        Raises:
            DataLoss: acknowledged messages are damaged, and `accept_loss` is not set.
        """
        self.close()
        log = self._log = CommitLog(self.disk, self._cache, self._segment_bytes)
        keys = KeyIndex(self.disk, self._cache, log.segment_end, log.first_position)
        store = Store(log, self._cache, ProducerTable(), epoch, keys)
        self.recovery = Recovery(
            self.disk,
            store,
            synced_position=_synced_position(self.disk),
            accept_loss=accept_loss,
        )
        self.report = self.recovery.run()

    def wipe(self) -> None:
        """Give up everything."""
        self.close()
        _wipe(self.disk)

    def close(self) -> None:
        """Close what is open."""
        self._cache.close()
        if self._log is not None:
            self._log.close()
            self._log = None


def _of_replica(attempt: _Attempt, *, accept_loss: bool) -> EpochHistory:
    """Recover what of a copy is good; its history.

    That something is missing is made durable before it is cut off: such a node must not be leader.
    Nor must one whose folder is empty, on its way through epochs that others have served.
    """
    disk = attempt.disk
    try:
        history = _history(disk)
        try:
            attempt.run(history.epoch, accept_loss=accept_loss)
        except DataLoss as error:
            log.error("this copy is damaged, the rest is fetched from the others error=%s", error)
            history = replace(history, damaged=True)
            _keep_history(disk, history)
            attempt.run(history.epoch, accept_loss=True)
    except DataLoss as error:
        log.error("this copy can't be used, all of it is fetched anew error=%s", error)
        attempt.wipe()
        history = EpochHistory(damaged=True)
        attempt.run(0, accept_loss=True)
    end = attempt.report.next_position
    kept = history.truncated(end)
    if accept_loss and history.starts:  # what was lost counts no more: it may be leader
        kept = kept if kept.epoch == history.epoch else kept.with_epoch(history.epoch, end)
        return replace(kept, damaged=False)
    return kept if kept.starts else replace(kept, damaged=True)


def _wipe(disk: Disk) -> None:
    disk.replace(epochs.PATH, epochs.encode(EpochHistory(damaged=True)))
    for path in (checkpoint.PATH, CONSUMEQUEUE, KEYINDEX, floors.PATH, SYNCED, LOG):
        disk.remove(path)


def _synced_position(disk: Disk) -> int:
    """Up to where the log is known to be synced; a checkpoint knows too, if the file is lost.

    It is noted anew, for the start after this one: recovery may give up the checkpoint.
    """
    known = decode_synced(disk.load(SYNCED))
    vouched = checkpoint.position_of(disk.load(checkpoint.PATH))
    if vouched > known:
        disk.replace(SYNCED, encode_synced(vouched))
    return max(known, vouched)


def _keep_history(disk: Disk, history: EpochHistory) -> None:
    content = epochs.encode(history)
    if disk.load(epochs.PATH) != content:
        disk.replace(epochs.PATH, content)
    if disk.load(_LAST_EPOCH):
        disk.remove(_LAST_EPOCH)


def _history(disk: Disk) -> EpochHistory:
    """What is known of the epochs; of a folder that has no history, that one wrote everything.

    Raises:
        DataLoss: it can't be read.
    """
    if raw := disk.load(epochs.PATH):
        return epochs.decode(raw)
    last = disk.load(_LAST_EPOCH) or (b"1" if disk.names(LOG) else b"")
    if last and not last.isdigit():
        raise DataLoss(
            f"{_LAST_EPOCH} can't be read: {last[:20]!r} is no number",
            remedy="Write a number into the file that is larger than any epoch before; "
            f"{REPORT} has the one of the last start.",
        )
    return EpochHistory(((int(last), 0),)) if last else EpochHistory()
