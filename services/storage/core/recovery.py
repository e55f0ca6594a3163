"""Recovery at start: load the indexes of the checkpoint, read the log after it, cut a torn tail.

The log is checked batch by batch: position, both checksums, and the offset within its queue. The
log ends at the first batch that fails. What follows is the torn tail of a crash and was never
acknowledged. But if the failing batch lies below the position up to which the log was synced,
acknowledged messages are damaged, and recovery fails.

Without a valid checkpoint, or if an index does not match the checkpoint, all indexes are rebuilt
from the whole log.

    synced    0  8 position up to which the log is synced    8  4 CRC-32C of it

That file is written after each sync and is not synced itself: an old value only protects less.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from batonmq._core.checksum import crc32c
from batonmq._core.records import Header, read_header
from batonmq.errors import BatonError, DataLoss, DataLossDetail
from batonmq_server.storage.core import checkpoint, floors
from batonmq_server.storage.core.checkpoint import Checkpoint, QueueState
from batonmq_server.storage.core.compaction_order import is_relocated, written_unix_ms
from batonmq_server.storage.core.consumequeue import FOLDER as CONSUMEQUEUE_FOLDER
from batonmq_server.storage.core.consumequeue import ConsumeQueue, LastEntry
from batonmq_server.storage.core.files import BadIndex, Disk
from batonmq_server.storage.core.floors import QueueFloor
from batonmq_server.storage.core.keyindex import FOLDER as KEYINDEX_FOLDER
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.scan import HEAD_BYTES_MAX, LogScan
from batonmq_server.storage.core.store import MessageStore

SYNCED = struct.Struct(">qI")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What a recovery found and did; written to recovery.json.

    Attributes:
        epoch: Epoch that the node writes from now on.
        synced_position: Position up to which the log was known to be synced.
        checkpoint_position: Position at which the scan began.
        rebuilt: Why all indexes were rebuilt; empty if they were not.
        scanned_bytes: Bytes of the log that were scanned, including fillers.
        batches: Number of scanned batches.
        messages: Number of scanned messages.
        truncated_bytes: Bytes after the last good batch that were not zero and were cut off.
        end_reason: Why the scan ended: `end of log`, or the fault of the batch there.
    """

    epoch: int
    first_position: int
    next_position: int
    synced_position: int
    checkpoint_position: int
    rebuilt: str
    scanned_bytes: int
    batches: int
    messages: int
    queues: int
    producers: int
    truncated_bytes: int
    end_reason: str
    elapsed_ms: int


def encode_synced(position: int) -> bytes:
    """Return the content of the file `synced`."""
    raw = position.to_bytes(8, "big")
    return SYNCED.pack(position, crc32c(raw))


def decode_synced(raw: bytes) -> int:
    """Return the position in a file `synced`; 0 if the file is missing or damaged."""
    if len(raw) != SYNCED.size:
        return 0
    position, crc = SYNCED.unpack(raw)
    return int(position) if crc32c(raw[:8]) == crc else 0


class Recovery:
    """One recovery. Afterwards `store` is as before the stop, except for unsynced tails.

    The recovered log may be only in the page cache. Before any read the caller must sync
    `store.log.unsynced()` and call `store.synced`.

    Args:
        synced_position: Position up to which the log was synced.
        accept_loss: Cut the log even below `synced_position`.

    Attributes:
        store: The store that is recovered.
        obsolete_paths: Index files that only the previous checkpoint needs.
    """

    def __init__(
        self, disk: Disk, store: MessageStore, *, synced_position: int, accept_loss: bool = False
    ) -> None:
        self._disk, self.store, self._accept_loss = disk, store, accept_loss
        self._synced_position = synced_position
        self._floors: dict[QueueKey, QueueFloor] = {}
        self._dropped: dict[QueueKey, int] = {}
        self._indexes_reset = False
        self._batches = self._messages = self._indexed_to = 0
        self.obsolete_paths: list[str] = []

    def run(self) -> RecoveryReport:
        """Recover the store and return the report.

        Raises:
            DataLoss: the log is damaged below the synced position. The log was not changed.
        """
        log = self.store.log
        begin, rebuilt = self.restore()
        position, reason = self.scan(begin)
        if position < self._synced_position and not self._accept_loss:
            raise DataLoss(
                f"the log is damaged at position {position} ({reason}), but was synced up to "
                f"{self._synced_position}: acknowledged messages are damaged",
                remedy="Restore the node from a replica or backup; or set "
                "BATON_STORAGE_ACCEPT_LOSS=true to cut the log there and lose all later messages.",
                detail=DataLossDetail(position=position),
            )
        return RecoveryReport(
            epoch=self.store.epoch,
            first_position=log.first_position,
            next_position=position,
            synced_position=self._synced_position,
            checkpoint_position=begin,
            rebuilt=rebuilt,
            scanned_bytes=position - begin,
            batches=self._batches,
            messages=self._messages,
            queues=self.store.queue_count,
            producers=len(self.store.producers),
            truncated_bytes=log.truncate(position),
            end_reason=reason,
            elapsed_ms=0,
        )

    def restore(self) -> tuple[int, str]:
        """Load the indexes of the checkpoint, or reset them.

        Returns:
            The position from which the log must be scanned, and why the indexes were reset; empty
            if they were loaded, or the directory was empty.
        """
        raw = self._disk.load(checkpoint.PATH)
        decoded = checkpoint.decode(raw)
        try:
            if decoded is None:
                raise BadIndex("the checkpoint is damaged" if raw else "there is no checkpoint")
            self._resume(decoded)
        except (BadIndex, BatonError, OSError) as error:
            self.reset_indexes(decoded)
            log = self.store.log
            empty = not raw and log.first_position == log.next_position
            return log.first_position, "" if empty else str(error)
        return decoded.position, ""

    def scan(self, position: int) -> tuple[int, str]:
        """Index the batches from `position` on; return where and why the scan ended."""
        log = self.store.log
        scan = LogScan(log, position)
        for header, batch in scan:
            try:
                self.take(header, batch)
            except DataLoss as error:
                return header.position, str(error)
        for key, floor in self._floors.items():
            queue = self.store.queues.get(key)
            if queue is not None and queue.next_offset >= floor.next_offset:
                continue
            if queue is None:
                self.store.add_queue(key, floor.topic, floor.next_offset)
            self.store.skip_to(key, floor.next_offset, scan.position)
            # The log was cut before messages that the queue has dropped, or begins with them.
            self._dropped[key] = floor.next_offset
        self.store.dropped = self._dropped
        return scan.position, scan.reason

    def reset_indexes(self, saved: Checkpoint | None) -> None:
        """Remove all indexes, but keep the next offsets of the queues."""
        for path in (checkpoint.PATH, CONSUMEQUEUE_FOLDER, KEYINDEX_FOLDER):
            self._disk.remove(path)
            self.store.cache.forget(path)
        self._indexes_reset = True
        self.obsolete_paths.clear()
        try:
            known = floors.decode(self._disk.load(floors.PATH))
        except DataLoss:
            if not self._accept_loss:
                raise
            known = []
        if saved is not None:
            known += [QueueFloor(*queue[:4]) for queue in saved.queues]
            self._dropped = self.store.dropped = {
                (queue.topic_id, queue.queue_id): queue.first_offset for queue in saved.queues
            }
        for floor in known:
            key = floor.topic_id, floor.queue_id
            if key not in self._floors or self._floors[key].next_offset < floor.next_offset:
                self._floors[key] = floor

    def take(self, header: Header, batch: memoryview) -> None:
        """Index a batch.

        Raises:
            DataLoss: it does not follow the last batch of its queue.
        """
        key = header.topic_id, header.queue_id
        if header.position > self._indexed_to and self._lacks_before(header.position):
            self.store.outputs.forget_before(written_unix_ms(header))
        self._indexed_to = header.position + header.length
        if is_relocated(header) or self._is_dropped(header):
            self.store.restore_dropped(header, batch)
        else:
            if key not in self.store.queues:
                first_offset = self._first_offset(key, header.first_offset)
                self.store.add_queue(key, header.topic, first_offset)
            elif self._begins(key):
                self.store.skip_to(key, header.first_offset, header.position)
            else:  # an order before it may name the queue with a lower offset
                floor = min(self._dropped.get(key, 0), header.first_offset)
                self.store.skip_to(key, floor, header.position)
            self.store.restore(header, batch)
        self._batches += 1
        self._messages += header.count

    def _lacks_before(self, position: int) -> bool:
        """Return whether batches before `position` that are not indexed are removed."""
        log, begin = self.store.log, self._indexed_to
        return begin < log.first_position or log.purged_between(begin, position)

    def expected_offset(self, header: Header) -> int:
        """Return the offset that `take` expects as the first one of a batch."""
        key, first_offset = (header.topic_id, header.queue_id), header.first_offset
        if is_relocated(header) or self._is_dropped(header):
            return first_offset
        queue = self.store.queues.get(key)
        expected = queue.next_offset if queue else self._first_offset(key, first_offset)
        expected = max(expected, min(self._dropped.get(key, 0), first_offset))
        last_position = queue.last_position if queue else -1
        if queue is not None and self._begins(key):
            return max(expected, first_offset)
        if first_offset > expected and self.store.log.purged_between(
            last_position, header.position
        ):
            return first_offset
        return expected

    def _begins(self, key: QueueKey) -> bool:
        """Return whether the next batch of a queue is the first one in the log.

        A trim order has named the queue; its offset is a lower bound.
        """
        lost_begin = self._indexes_reset and self.store.log.first_position > 0
        return lost_begin and self.store.queues[key].last_position < 0

    def _is_dropped(self, header: Header) -> bool:
        """Return whether the queue of a batch has dropped it.

        The checkpoint says so, or the floors do: of the leader from which this copy begins, or of
        this copy when it was cut. For a batch that the log has had all the time, the file `floors`
        may be ahead: retention writes it before it removes segments.
        """
        return header.next_offset <= self._dropped.get((header.topic_id, header.queue_id), 0)

    def _resume(self, saved: Checkpoint) -> None:
        """Load the state of a checkpoint, all or nothing.

        Raises:
            BadIndex, BatonError, OSError: the log or an index does not match the checkpoint.
        """
        log, store = self.store.log, self.store
        if not log.first_position <= saved.position <= log.next_position:
            raise BadIndex(f"the checkpoint is at position {saved.position}, outside the log")
        queues = [self._queue(state, saved.position) for state in saved.queues]
        store.keys.resume(saved.open_run, log.first_position)
        store.resume(saved.store_unix_ms, queues)
        store.producers.load(saved.producers)
        store.schedule.waiting.restore(saved.waiting)
        store.transactions.restore(saved.transactions)
        store.outputs.restore(saved.outputs)
        self._indexed_to = saved.position
        # A copy that a follower completes may still lack messages that its queues have dropped.
        self._dropped = {queue[1:3]: queue.first_offset for queue in saved.queues}
        for key, section in saved.sections:
            store.compacted.put(key, section)
        self._remove_leftovers(
            {
                queue.folder: queue.paths(state.first_offset, state.first_offset + 1)[0]
                for state, (_, queue) in zip(saved.queues, queues, strict=True)
            }
        )

    def _remove_leftovers(self, first_paths: Mapping[str, str]) -> None:
        """Remove index files that a crash has left, because it interrupted their removal.

        Args:
            first_paths: The first file of each queue of the checkpoint, by folder. The entries of
                later queues are written again from the log.
        """
        disk = self._disk
        for topic in disk.names(CONSUMEQUEUE_FOLDER):
            path = f"{CONSUMEQUEUE_FOLDER}/{topic}"
            folders = [f"{path}/{queue_id}" for queue_id in disk.names(path)]
            known = [folder for folder in folders if folder in first_paths]
            for gone in [one for one in folders if one not in first_paths] if known else [path]:
                disk.remove(gone)
            for folder in known:
                for file in (f"{folder}/{name}" for name in disk.names(folder)):
                    if file < first_paths[folder]:
                        disk.remove(file)

    def _queue(self, state: QueueState, position: int) -> tuple[QueueKey, ConsumeQueue]:
        """Return a queue of a checkpoint at `position`, after a check of its files."""
        key = state.topic_id, state.queue_id
        queue = self.store.new_queue(key, state.topic, state.first_offset)
        last_position = state.first_position
        if state.first_offset < state.next_offset:
            last = queue.read_last_entry(self._disk, state.next_offset)
            self._check_last(state, last, position)
            last_position = last.position
        queue.resume(state.next_offset, state.first_position, last_position)
        self.obsolete_paths += queue.trim_before(self.store.log.first_position)
        return key, queue

    def _check_last(self, state: QueueState, last: LastEntry, position: int) -> None:
        """Compare the last entry of a queue with the batch that it points to.

        Raises:
            BadIndex, BatonError: there is no such batch.
        """
        log = self.store.log
        if last.position < log.first_position or log.is_purged(last.position):
            return  # the batch was removed since
        if log.stored(last.position) is not None:
            return  # it is only in the object store; a start does not need the store
        if last.position + last.size > position:
            raise BadIndex(
                f"queue {state.queue_id} of {state.topic} points to a batch after the checkpoint"
            )
        header = read_header(log.read(last.position, HEAD_BYTES_MAX))
        if (
            header.position, header.length, header.topic, header.topic_id, header.queue_id,
            header.next_offset,
        ) != (
            last.position, last.size, state.topic, state.topic_id, state.queue_id,
            state.next_offset,
        ):  # fmt: skip
            raise BadIndex(f"queue {state.queue_id} of {state.topic} points to a wrong batch")

    def _first_offset(self, key: QueueKey, first_offset: int) -> int:
        """Return the first offset of a new queue of which the first batch has `first_offset`.

        If the log has lost its begin, it may have had the queue before: a queue of a deleted topic
        is forgotten when it loses its last message, and a follower may not have all of them yet.
        """
        if self.store.log.first_position > 0:
            return first_offset
        return self._dropped.get(key, 0)  # or the first batches were trimmed
