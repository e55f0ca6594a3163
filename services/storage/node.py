"""An open data directory: lock, recovery, epochs, sync, cut, close.

data_dir/lock            flock of the process that owns the directory
data_dir/epochs          which epoch wrote which part of the log
data_dir/synced          position up to which the log is synced
data_dir/floors          next offsets of queues that lost all their messages to retention
data_dir/checkpoint      position up to which the indexes are durable, and the state at that point
data_dir/recovery.json   report of the last recovery
data_dir/unsent-metrics  batches of the metrics stream, kept by the runtime
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
from typing import Protocol

from batonmq.errors import DataLoss
from batonmq_server.runtime.descriptors import descriptors_max
from batonmq_server.runtime.replication.position import ReplicaPosition
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
from batonmq_server.storage.core.files import FILES_MAX, Disk, FileCache
from batonmq_server.storage.core.keyindex import FOLDER as KEYINDEX
from batonmq_server.storage.core.keyindex import KeyIndex
from batonmq_server.storage.core.producers import ProducerTable
from batonmq_server.storage.core.recovery import (
    Recovery,
    RecoveryReport,
    decode_synced,
    encode_synced,
)
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.core.tier import RemoteSegments, SegmentName, TierManifest
from batonmq_server.storage.core.tier_file import FetchBlocks, TierDisk, damaged_stubs, mend_stub
from batonmq_server.storage.disk import RealDisk, locked

log = logging.getLogger(__name__)

REPORT = "recovery.json"
SYNCED = "synced"
_LAST_EPOCH = "epoch"
"""File of directories without `epochs`: the epoch of the last start, decimal."""


class StorageNode:
    """An open data directory. Its methods block; `sync` waits for the disk, so call it in a thread.

    Attributes:
        store: The log and everything derived from it.
        report: Report of the recovery.
        recovery: Indexes batches that are copied from the leader, as it did at the start.
        checkpointing: Writes checkpoints.
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
    def position(self) -> ReplicaPosition:
        """Epoch and end of the log of this node."""
        return self.history.position(self.store.log.next_position)

    def sync(self, unsynced: UnsyncedFiles) -> None:
        """Sync the log up to `unsynced.position` and record that position.

        Raises:
            OSError: the log may not be on disk, and a later sync would not change that.
        """
        for file in unsynced.files:
            file.sync()
        self.note_synced(unsynced.position)

    def note_synced(self, position: int) -> None:
        """Record that the log is on disk below `position`.

        Raises:
            OSError: it may not be recorded.
        """
        self._synced.write(0, [encode_synced(position)])

    def begin_epoch(self, epoch: int) -> None:
        """Record durably that `epoch` writes the log from its present end on.

        An elected node has every confirmed message, so its copy is no longer damaged.
        """
        history = self.history.with_epoch(epoch, self.store.log.next_position)
        self.save_history(replace(history, damaged=False))
        self.store.epoch = epoch

    def save_history(self, history: EpochHistory) -> None:
        """Replace the epoch history, durably."""
        if history != self.history:
            self.disk.replace(epochs.PATH, epochs.encode(history))
            self.history = history

    def cut(self, position: int, *, damaged: bool = False) -> None:
        """Cut the log at `position`, durably; afterwards only `close` may be called.

        Args:
            damaged: Safe messages are lost by this cut.
        """
        position = self.store.log.file_cut_position(position)
        if damaged:
            self.save_history(replace(self.history, damaged=True))
        if position < self.checkpointing.position:
            self.disk.replace(floors.PATH, floors.encode(self.store.floors()))
            self.disk.remove(checkpoint.PATH)
        self.disk.replace(SYNCED, encode_synced(position))
        self.store.log.truncate(position)
        self.save_history(self.history.truncated(position))

    def close(self) -> None:
        """Close the files. What is not synced is left to the operating system."""
        self.store.log.close()
        self._synced.close()


@dataclass(frozen=True, slots=True)
class LogStart:
    """Where an empty copy of a log starts; position 0 by default.

    Attributes:
        floors: Next offsets of the queues: content of the file `floors`.
        segment: The first segment.
        history: Epoch history up to the start.
    """

    floors: bytes = b""
    segment: PositionRange = (0, 0)
    history: EpochHistory = field(default_factory=EpochHistory)


class RemoteLog(RemoteSegments, Protocol):
    """Reads the segments of a log that are only in the object store.

    Attributes:
        may_block: Whether `read` waits for the store: set while a directory is recovered.
    """

    may_block: bool

    @property
    def fetch_now(self) -> FetchBlocks:
        """Read blocks from the store; blocks. Raises BatonError if it can't."""
        ...

    def manifest_now(self, name: SegmentName) -> TierManifest | None:
        """Return the manifest of a segment; None if the store has none; blocks.

        Raises:
            DataLoss: it is damaged.
            Unreachable: the store can't be read.
        """
        ...


def reset_disk(disk: Disk, start: LogStart) -> None:
    """Discard everything on `disk` and start an empty copy there; the directory is closed."""
    _wipe(disk)
    begin, end = start.segment
    if begin < end:
        disk.replace(floors.PATH, start.floors)
        disk.create(segment_path(begin), end - begin).close()
    disk.replace(epochs.PATH, epochs.encode(replace(start.history, damaged=True)))


@contextmanager
def open_directory(
    folder: Path,
    *,
    segment_bytes: int,
    monotonic_ms: Callable[[], int],
    accept_loss: bool = False,
    remote: RemoteLog | None = None,
) -> Iterator[StorageNode]:
    """Lock `folder`, recover it, yield the node and close it at the end.

    Raises:
        InUse: another process owns the folder.
        DataLoss: acknowledged messages are damaged, and `accept_loss` is not set.
    """
    with locked(folder):
        disk = RealDisk(folder)
        recovering = recover_directory(
            disk,
            segment_bytes=segment_bytes,
            monotonic_ms=monotonic_ms,
            accept_loss=accept_loss,
            remote=remote,
        )
        with recovering as node:
            yield node


@contextmanager
def recover_directory(
    disk: Disk,
    *,
    segment_bytes: int,
    monotonic_ms: Callable[[], int],
    accept_loss: bool = False,
    replicated: bool = False,
    remote: RemoteLog | None = None,
) -> Iterator[StorageNode]:
    """Recover the directory on `disk`, yield the node and close it at the end.

    The directory must not be in use. A node without replicas begins a new epoch here; a member of a
    replica set does so when it is elected. A member cuts off the damaged part of its copy, to fetch
    it from the other members.

    Args:
        remote: Reads segments that are only in the object store; None without a store.

    Raises:
        DataLoss: acknowledged messages are damaged, and `accept_loss` is not set.
        Unreachable: the indexes have to be rebuilt from segments in the object store, and it can't
            be read.
    """
    begin_ms = monotonic_ms()
    if remote is not None:
        disk = TierDisk(disk, remote.fetch_now)
    cache = FileCache(disk, min(FILES_MAX, descriptors_max() // 4))  # the rest is for other uses
    attempt = _Attempt(disk, cache, segment_bytes, remote)
    try:
        with _may_block(remote):
            if replicated:
                history = _recover_replica(attempt, accept_loss=accept_loss)
            else:
                history = _recover_single(attempt, accept_loss=accept_loss)
            _write_history(disk, history)
            node = StorageNode(disk, attempt.recovery, attempt.report, history)
            if replicated:
                node.store.confirmed(attempt.report.checkpoint_position)
            node.checkpointing.remove_later(attempt.recovery.obsolete_paths)
            node.store.log.sync_closed()
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


@contextmanager
def _may_block(remote: RemoteLog | None) -> Iterator[None]:
    """Let reads of the log wait for the object store inside."""
    if remote is None:
        yield
        return
    remote.may_block = True
    try:
        yield
    finally:
        remote.may_block = False


class _Attempt:
    """An attempt to recover the directory; `run` can be called again after a failure."""

    recovery: Recovery
    report: RecoveryReport

    def __init__(
        self, disk: Disk, cache: FileCache, segment_bytes: int, remote: RemoteLog | None = None
    ) -> None:
        self.disk, self._cache, self._segment_bytes = disk, cache, segment_bytes
        self._remote = remote
        self._log: CommitLog | None = None

    def mend_stubs(self, history: EpochHistory) -> None:
        """Write each damaged manifest in a segment file again, as the store has it.

        Raises:
            DataLoss: the store does not have it.
            Unreachable: the store can't be read.
        """
        if self._remote is not None:
            for path, name in damaged_stubs(self.disk, history.epoch_at):
                manifest = self._remote.manifest_now(name)
                mend_stub(self.disk, path, name, manifest)
                log.warning("damaged manifest written again path=%s", path)

    def run(self, epoch: int, *, accept_loss: bool) -> None:
        """Recover.

        Raises:
            DataLoss: acknowledged messages are damaged, and `accept_loss` is not set.
        """
        self.close()
        log = self._log = CommitLog(self.disk, self._cache, self._segment_bytes, self._remote)
        keys = KeyIndex(self.disk, self._cache, log.segment_end, log.first_position)
        store = MessageStore(log, self._cache, ProducerTable(), epoch, keys)
        self.recovery = Recovery(
            self.disk,
            store,
            synced_position=_synced_position(self.disk),
            accept_loss=accept_loss,
        )
        self.report = self.recovery.run()

    def wipe(self) -> None:
        """Remove everything."""
        self.close()
        _wipe(self.disk)

    def close(self) -> None:
        """Close the open files."""
        self._cache.close()
        if self._log is not None:
            self._log.close()
            self._log = None


def _recover_single(attempt: _Attempt, *, accept_loss: bool) -> EpochHistory:
    """Recover the log of a node without replicas, which begins an epoch; return its history."""
    history = _history(attempt.disk)
    attempt.mend_stubs(history)
    epoch = history.epoch + 1
    attempt.run(epoch, accept_loss=accept_loss)
    end = attempt.report.next_position
    return replace(history.truncated(end).with_epoch(epoch, end), damaged=False)


def _recover_replica(attempt: _Attempt, *, accept_loss: bool) -> EpochHistory:
    """Recover the undamaged part of a member's copy; return its epoch history.

    The copy is marked as damaged, durably, before anything is cut off: a node that lacks safe
    messages must not be elected. A node with an empty folder is marked too, because it lacks what
    earlier epochs have written.
    """
    disk = attempt.disk
    try:
        history = _history(disk)
        attempt.mend_stubs(history)
        try:
            attempt.run(history.epoch, accept_loss=accept_loss)
        except DataLoss as error:
            log.error("copy is damaged; the rest is fetched from the other members error=%s", error)
            history = replace(history, damaged=True)
            _write_history(disk, history)
            attempt.run(history.epoch, accept_loss=True)
    except DataLoss as error:
        log.error("copy is unusable; all of it is fetched from the other members error=%s", error)
        attempt.wipe()
        history = EpochHistory(damaged=True)
        attempt.run(0, accept_loss=True)
    end = attempt.report.next_position
    kept = history.truncated(end)
    if accept_loss and history.starts:  # the operator accepted the loss: it may be elected
        kept = kept if kept.epoch == history.epoch else kept.with_epoch(history.epoch, end)
        return replace(kept, damaged=False)
    return kept if kept.starts else replace(kept, damaged=True)


def _wipe(disk: Disk) -> None:
    disk.replace(epochs.PATH, epochs.encode(EpochHistory(damaged=True)))
    for path in (checkpoint.PATH, CONSUMEQUEUE, KEYINDEX, floors.PATH, SYNCED, LOG):
        disk.remove(path)


def _synced_position(disk: Disk) -> int:
    """Return the position up to which the log is known to be synced.

    If the file `synced` is lost, the checkpoint knows a position too. That one is written to the
    file, because recovery may remove the checkpoint.
    """
    known = decode_synced(disk.load(SYNCED))
    vouched = checkpoint.position_of(disk.load(checkpoint.PATH))
    if vouched > known:
        disk.replace(SYNCED, encode_synced(vouched))
    return max(known, vouched)


def _write_history(disk: Disk, history: EpochHistory) -> None:
    content = epochs.encode(history)
    if disk.load(epochs.PATH) != content:
        disk.replace(epochs.PATH, content)
    if disk.load(_LAST_EPOCH):
        disk.remove(_LAST_EPOCH)


def _history(disk: Disk) -> EpochHistory:
    """Return the epoch history on `disk`; without one, a single epoch that wrote the whole log.

    Raises:
        DataLoss: the file can't be read.
    """
    if raw := disk.load(epochs.PATH):
        return epochs.decode(raw)
    last = disk.load(_LAST_EPOCH) or (b"1" if disk.names(LOG) else b"")
    if last and not last.isdigit():
        raise DataLoss(
            f"{_LAST_EPOCH} can't be read: {last[:20]!r} is not a number",
            remedy="Write a number into the file that is larger than every earlier epoch; "
            f"{REPORT} has the epoch of the last start.",
        )
    return EpochHistory(((int(last), 0),)) if last else EpochHistory()
