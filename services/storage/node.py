"""Opens a data directory and keeps it: lock, epoch, recovery, sync, close.

data_dir/lock            flock of the process that owns the folder
data_dir/epoch           how often the node has started, decimal
data_dir/checkpoint      up to where the log is synced
data_dir/recovery.json   report of the last start
data_dir/log/            segments
data_dir/consumequeue/   index, made anew at start
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from services.storage.core.commitlog import CommitLog, Unsynced
from services.storage.core.files import FileCache
from services.storage.core.producers import ProducerTable
from services.storage.core.recovery import (
    Recovery,
    RecoveryReport,
    decode_checkpoint,
    encode_checkpoint,
)
from services.storage.core.store import Store
from services.storage.disk import RealDisk, locked

CHECKPOINT = "checkpoint"
EPOCH = "epoch"
REPORT = "recovery.json"


class Node:
    """An open data directory. All blocking: `sync` is for a worker thread.

    Attributes:
        store: What is in it.
        report: What recovery did.
    """

    def __init__(self, disk: RealDisk, store: Store, report: RecoveryReport) -> None:
        self.store, self.report = store, report
        self._checkpoint = disk.open(CHECKPOINT, create=True)

    def sync(self, unsynced: Unsynced) -> None:
        """Make the log safe up to `unsynced.position`, and note that it is.

        Raises:
            OSError: it may not be safe, and never will be.
        """
        for file in unsynced.files:
            file.sync()
        self._checkpoint.write(0, [encode_checkpoint(unsynced.position)])

    def close(self) -> None:
        """Give the files back. What is not synced stays to the operating system."""
        self.store.log.close()
        self._checkpoint.close()


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
        begin_ms = monotonic_ms()
        disk = RealDisk(folder)
        cache = FileCache(disk)
        epoch = int(disk.load(EPOCH) or b"0") + 1
        disk.replace(EPOCH, str(epoch).encode())
        log = CommitLog(disk, cache, segment_bytes)
        store = Store(log, cache, ProducerTable(), epoch)
        recovery = Recovery(
            disk,
            store,
            checkpoint_position=decode_checkpoint(disk.load(CHECKPOINT)),
            accept_loss=accept_loss,
        )
        try:
            report = recovery.run()
            node = Node(disk, store, report)
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
