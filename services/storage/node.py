"""Opens a data directory and keeps it: lock, epoch, recovery, sync, close.

data_dir/lock            flock of the process that owns the folder
data_dir/epoch           how often the node has started, decimal
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from batonmq.common.errors import DataLoss
from services.storage.core import checkpoint
from services.storage.core.checkpointing import Checkpointing
from services.storage.core.commitlog import CommitLog, Unsynced
from services.storage.core.files import Disk, FileCache
from services.storage.core.keyindex import KeyIndex
from services.storage.core.producers import ProducerTable
from services.storage.core.recovery import (
    Recovery,
    RecoveryReport,
    decode_synced,
    encode_synced,
)
from services.storage.core.store import Store
from services.storage.disk import RealDisk, locked

EPOCH = "epoch"
REPORT = "recovery.json"
SYNCED = "synced"


class Node:
    """An open data directory. All blocking: `sync` is for a worker thread.

    Attributes:
        store: What is in it.
        report: What recovery did.
        checkpointing: Takes checkpoints; the start takes none.
    """

    def __init__(self, disk: Disk, store: Store, report: RecoveryReport) -> None:
        self.disk, self.store, self.report = disk, store, report
        self.checkpointing = Checkpointing(disk, store, report.checkpoint_position)
        self._synced = disk.open(SYNCED, create=True)

    def sync(self, unsynced: Unsynced) -> None:
        """Make the log safe up to `unsynced.position`, and note that it is.

        Raises:
            OSError: it may not be safe, and never will be.
        """
        for file in unsynced.files:
            file.sync()
        self._synced.write(0, [encode_synced(unsynced.position)])

    def close(self) -> None:
        """Give the files back. What is not synced stays to the operating system."""
        self.store.log.close()
        self._synced.close()


@contextmanager
def opened(
    folder: Path,
    *,
    segment_bytes: int,
    monotonic_ms: Callable[[], int],
    accept_loss: bool = False,
) -> Iterator[Node]:
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
    disk: Disk, *, segment_bytes: int, monotonic_ms: Callable[[], int], accept_loss: bool = False
) -> Iterator[Node]:
    """Recover what is on `disk`, which nobody else uses, and close it in the end.

    Raises:
        DataLoss: acknowledged messages are damaged, and `accept_loss` is not set.
    """
    begin_ms = monotonic_ms()
    cache = FileCache(disk)
    epoch = _last_epoch(disk) + 1
    disk.replace(EPOCH, str(epoch).encode())
    log = CommitLog(disk, cache, segment_bytes)
    keys = KeyIndex(disk, cache, log.segment_end, log.first_position)
    store = Store(log, cache, ProducerTable(), epoch, keys)
    recovery = Recovery(
        disk,
        store,
        synced_position=_synced_position(disk),
        accept_loss=accept_loss,
    )
    try:
        report = recovery.run()
        node = Node(disk, store, report)
        node.checkpointing.remove_later(recovery.doomed)
        unsynced = log.unsynced()
        node.sync(unsynced)
        store.synced(unsynced.position)
        node.report = replace(report, elapsed_ms=monotonic_ms() - begin_ms)
        disk.replace(REPORT, json.dumps(asdict(node.report), indent=2).encode())
        try:
            yield node
        finally:
            node.close()
    finally:
        cache.close()
        log.close()


def _synced_position(disk: Disk) -> int:
    """Up to where the log is known to be synced; a checkpoint knows too, if the file is lost.

    It is noted anew, for the start after this one: recovery may give up the checkpoint.
    """
    known = decode_synced(disk.load(SYNCED))
    vouched = checkpoint.position_of(disk.load(checkpoint.PATH))
    if vouched > known:
        disk.replace(SYNCED, encode_synced(vouched))
    return max(known, vouched)


def _last_epoch(disk: Disk) -> int:
    """Epoch of the last start; 0 if there was none.

    Raises:
        DataLoss: it can't be read.
    """
    raw = disk.load(EPOCH)
    if raw and not raw.isdigit():
        raise DataLoss(
            f"{EPOCH} can't be read: {raw[:20]!r} is no number",
            remedy="Write a number into the file that is larger than any epoch before; "
            f"{REPORT} has the one of the last start.",
        )
    return int(raw or b"0")
