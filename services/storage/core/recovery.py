"""What happens at start: find the last good batch, cut off the rest, make the indexes anew.

The scan begins at the first segment and checks, batch by batch, position, both checksums and
the offset within its queue. Where it ends, the log ends: what follows is the torn tail of a
crash and was acknowledged to nobody. Unless it lies below the position up to which the log was
known to be synced: then acknowledged messages are damaged, and recovery refuses to go on.

    checkpoint    0  8 position up to which the log is synced    8  4 CRC-32C of it

The checkpoint is written after each sync and is itself not synced: an old one is only weaker.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import google_crc32c

from batonmq.common.errors import BadBatch, BatonError, DataLoss
from batonmq.core.records import (
    BATCH_BYTES_MAX,
    check_body,
    check_stamp,
    read_header,
)
from services.storage.core.commitlog import FILLER, FILLER_MAGIC, CommitLog
from services.storage.core.consumequeue import FOLDER as CONSUMEQUEUE_FOLDER
from services.storage.core.files import Disk
from services.storage.core.store import Store

CHECKPOINT = struct.Struct(">qI")
CHUNK_BYTES = 2 * BATCH_BYTES_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What a recovery found and did; written to recovery.json.

    Attributes:
        scanned_bytes: Positions looked at, fillers included.
        truncated_bytes: Bytes behind the last good batch that were not zero and were cut off.
        end_reason: Why the scan ended: `end of log`, or what is wrong with the batch there.
        epoch: Epoch the node runs under from now on.
    """

    epoch: int
    first_position: int
    next_position: int
    checkpoint_position: int
    scanned_bytes: int
    batches: int
    messages: int
    queues: int
    producers: int
    truncated_bytes: int
    end_reason: str
    elapsed_ms: int


def encode_checkpoint(position: int) -> bytes:
    """The checkpoint file for a log that is synced up to `position`."""
    raw = position.to_bytes(8, "big")
    return CHECKPOINT.pack(position, google_crc32c.value(raw))


def decode_checkpoint(raw: bytes) -> int:
    """Position of a checkpoint file; 0 if it is missing or damaged."""
    if len(raw) != CHECKPOINT.size:
        return 0
    position, crc = CHECKPOINT.unpack(raw)
    return int(position) if google_crc32c.value(raw[:8]) == crc else 0


class Recovery:
    """One pass over the log. Afterwards `store` is as it was, except for unsynced tails.

    What is recovered is in the page cache, not necessarily on disk: the caller syncs
    `store.log.unsynced()` and tells `store.synced` before anybody reads.

    Args:
        checkpoint_position: The log was synced up to here.
        accept_loss: Cut the log even below the checkpoint.
    """

    def __init__(
        self, disk: Disk, store: Store, *, checkpoint_position: int, accept_loss: bool = False
    ) -> None:
        self._disk, self._store, self._accept_loss = disk, store, accept_loss
        self._checkpoint_position = checkpoint_position
        self._batches = self._messages = 0

    def run(self) -> RecoveryReport:
        """Do it.

        Raises:
            DataLoss: the log is damaged below the checkpoint. The log was not changed.
        """
        log = self._store.log
        self._disk.remove(CONSUMEQUEUE_FOLDER)
        position, reason = self._scan(log)
        if position < self._checkpoint_position and not self._accept_loss:
            raise DataLoss(
                f"the log is damaged at position {position} ({reason}), but was safe up to "
                f"{self._checkpoint_position}: acknowledged messages are missing",
                remedy="Restore the node from a replica or backup; or set "
                "BATON_STORAGE_ACCEPT_LOSS=true to cut the log there and lose what follows.",
                facts={"position": position},
            )
        truncated_bytes = log.truncate(position)
        return RecoveryReport(
            epoch=self._store.epoch,
            first_position=log.first_position,
            next_position=position,
            checkpoint_position=self._checkpoint_position,
            scanned_bytes=position - log.first_position,
            batches=self._batches,
            messages=self._messages,
            queues=self._store.queue_count,
            producers=len(self._store.producers),
            truncated_bytes=truncated_bytes,
            end_reason=reason,
            elapsed_ms=0,
        )

    def _scan(self, log: CommitLog) -> tuple[int, str]:
        """Position after the last good batch, and why the scan ended there."""
        position = log.first_position
        while position < log.next_position:
            end = log.segment_end(position)
            position, reason = self._scan_segment(log, position, end)
            if position < end:
                return position, reason
        return position, "end of log"

    def _scan_segment(self, log: CommitLog, position: int, end: int) -> tuple[int, str]:
        """As `_scan`, for one segment; `end` if the log goes on in the next one."""
        while position < end:
            chunk = memoryview(log.read(position, CHUNK_BYTES))
            chunk_end = position + len(chunk)
            while position < chunk_end:
                if chunk_end < min(position + BATCH_BYTES_MAX, end):
                    break  # the batch may be cut by the chunk: read on from here
                view = chunk[len(chunk) - (chunk_end - position) :]
                try:
                    step = self._step(view, position, end - position)
                except BatonError as error:
                    return position, str(error)
                if not step:
                    return position, "end of log"
                position += step
        return end, ""

    def _step(self, view: memoryview, position: int, room: int) -> int:
        """Take what stands at `position`; its length, 0 if nothing was written there.

        Args:
            view: The log from `position` on, a batch or the rest of the segment at least.
            room: Bytes to the end of the segment.
        """
        if room < FILLER.size:
            if any(view):
                raise BadBatch(f"{room} bytes before the end of the segment are not zero")
            return room
        magic, length = FILLER.unpack_from(view)
        if magic == length == 0:
            return 0
        if magic == FILLER_MAGIC and length == room:
            return room
        header = read_header(view)
        if header.length > room or header.position != position:
            raise BadBatch(f"a batch of {header.length} bytes that names {header.position}")
        batch = view[: header.length]
        check_stamp(batch)
        check_body(batch)
        self._store.restore(header, batch)
        self._batches += 1
        self._messages += header.count
        return header.length
