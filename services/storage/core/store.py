"""The state of a storage node: log, consume queues, key index, producers, schedule, transactions.

The store is their only owner. Nothing here waits, and the caller passes the time. The caller
appends, syncs the files of `log.unsynced()`, calls `synced`, and only then answers producers and
wakes readers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from batonmq._columns.batch_columns import key_hashes, tag_hashes
from batonmq._core.records import BODY_FROM, Header, stamped_head
from batonmq.errors import (
    BatonError,
    DataLoss,
    DataLossDetail,
    DiskFull,
    NotLeader,
    Overloaded,
)
from batonmq_server.storage.core.checks import CheckedBatch, LocalTopic, check_queue, check_takes
from batonmq_server.storage.core.commitlog import CommitLog, PositionRange, StampedBatch
from batonmq_server.storage.core.compacted import CompactedQueues, PendingOrder, section_of
from batonmq_server.storage.core.compaction_order import (
    ORDERS,
    CompactionOrder,
    Relocation,
    is_relocated,
    written_unix_ms,
)
from batonmq_server.storage.core.compaction_order import decode_order as decode_compaction
from batonmq_server.storage.core.consumequeue import ConsumeQueue, folder_of, topic_of
from batonmq_server.storage.core.files import FileCache
from batonmq_server.storage.core.floors import QueueFloor
from batonmq_server.storage.core.keyindex import KeyIndex
from batonmq_server.storage.core.outputs import OutputBatch, OutputTable, parse_outputs
from batonmq_server.storage.core.producers import ProducerTable, QueueKey, StoreReceipt
from batonmq_server.storage.core.purge import ORDER_QUEUES, PurgeOrder, QueueTrim, decode_order
from batonmq_server.storage.core.queue_reader import QueueReader, ReadResult, ReadSpec
from batonmq_server.storage.core.schedule import Schedule
from batonmq_server.storage.core.transactions import Transactions
from batonmq_server.storage.core.write_run import AdmittedBatch, WriteRun


@dataclass(frozen=True, slots=True)
class VisibleRange:
    """Offsets [first_offset, next_offset) of a queue are visible to consumers."""

    first_offset: int
    next_offset: int


def check_covered(
    store: MessageStore, queues: LocalTopic, key: QueueKey, offset: int, *, has_confirmed: bool
) -> None:
    """Check that a follower knows which messages a compacted queue keeps at an offset.

    A copy without all that the in-sync set has may lack orders, and so have messages that the
    others removed. A copy that got segments purged must have the order that purged them.

    Raises:
        NotLeader: it does not know it yet.
    """
    if queues.compaction is None:
        return
    if not has_confirmed:
        raise NotLeader(
            "this follower may lack compactions: it lags behind, or its leader does not answer",
            retry_after_ms=100,
        )
    if not store.covers(key, offset):
        raise NotLeader(
            f"this follower does not have the compaction of offset {offset} yet", retry_after_ms=100
        )


class MessageStore:
    """The state of a storage node; see the module.

    Args:
        cache: Open files of the consume queues.
        epoch: Epoch that is stamped on every batch; a new leader sets its own.

    Attributes:
        dropped: Offsets below which queues have dropped their messages, from a recovery.
        purge_orders: Orders that no checkpoint has recorded as carried out.
        carried_out_to: Position before which the orders are carried out.
    """

    def __init__(
        self,
        log: CommitLog,
        cache: FileCache,
        producers: ProducerTable,
        epoch: int,
        keys: KeyIndex,
    ) -> None:
        self.log, self.producers, self.epoch, self.keys = log, producers, epoch, keys
        self.schedule = Schedule(producers)
        self.transactions = Transactions(producers)
        self.outputs = OutputTable()
        self.purge_orders: list[PurgeOrder] = []
        self.carried_out_to = 0
        self.compacted = CompactedQueues(log)
        self._reader = QueueReader(log, self.compacted)
        self.dropped: Mapping[QueueKey, int] = {}
        self._unneeded_paths: list[str] = []
        self.cache = cache
        self._queues: dict[QueueKey, ConsumeQueue] = {}
        self._unseen: deque[tuple[int, QueueKey, int]] = deque()
        self.store_unix_ms = 0
        self.appended_count = 0
        self._confirmed: int | None = None

    @property
    def readable_position(self) -> int:
        """End of the safe part of the log: consumers may read it, and no failover loses it."""
        synced = self.log.synced_position
        return synced if self._confirmed is None else min(synced, self._confirmed)

    @property
    def queues(self) -> Mapping[QueueKey, ConsumeQueue]:
        """The queues that have, or had, a message."""
        return self._queues

    @property
    def queue_count(self) -> int:
        """Number of `queues`."""
        return len(self._queues)

    def append(
        self,
        batches: Sequence[CheckedBatch],
        topics: Mapping[str, LocalTopic | BatonError],
        now_unix_ms: int,
        rejection: BatonError | None = None,
    ) -> list[StoreReceipt | BatonError]:
        """Write `batches` and return one outcome each, in order. Nothing is safe until a sync.

        A batch that an earlier attempt has stored gets its receipt even if nothing may be written.

        Args:
            topics: Every topic of `batches`, or the error that makes it unusable.
            rejection: Why new batches are rejected; None if they are accepted.
        """
        self.store_unix_ms = max(self.store_unix_ms, now_unix_ms)
        outcomes: dict[int, StoreReceipt | BatonError] = {}
        run = WriteRun()
        for index, checked in enumerate(batches):
            header, topic = checked.header, topics[checked.header.topic]
            try:
                if isinstance(topic, BatonError):
                    raise topic
                key = check_queue(header.topic, topic, header.queue_id)
                if run.affects(checked, key) or not self._has_room(run, checked.outputs):
                    outcomes |= self._write(run)
                    run = WriteRun()
                if checked.outputs is None:
                    receipt = self.producers.check(header, key)
                else:
                    receipt = self.outputs.check(checked.outputs, self.store_unix_ms)
                if receipt is None:
                    check_takes(checked, topic)
                    if rejection is not None:
                        raise rejection
                    self.log.check_length(header.length)
                    run.add(index, checked, key, self._next_offset(key))
                else:
                    outcomes[index] = receipt
            except BatonError as error:
                outcomes[index] = error
        outcomes |= self._write(run)
        return [outcomes[index] for index in range(len(batches))]

    def read(self, key: QueueKey, spec: ReadSpec) -> ReadResult | None:
        """See `QueueReader.read`."""
        return self._reader.read(key, self._queues.get(key), spec)

    def pull(self, key: QueueKey, spec: ReadSpec) -> ReadResult | None:
        """As `read`, but messages that retention has removed count as scanned and as lost.

        Raises:
            OffsetAheadOfLog, DataLoss: as `read`.
        """
        queue = self._queues.get(key)
        if queue is None or spec.offset >= queue.first_offset:
            return self.read(key, spec)
        kept_from = queue.first_offset
        if (part := self.compacted.get(key)) is not None:
            covered = part.covered_from(spec.offset)
            kept_from = kept_from if covered is None else covered
        lost_count = kept_from - spec.offset
        if not lost_count:
            return self.read(key, spec)
        reading = self.read(key, spec._replace(offset=kept_from))
        return replace(reading or ReadResult([], kept_from, 0, 0), lost_count=lost_count)

    def offsets(self, key: QueueKey) -> VisibleRange:
        """Return the offsets that consumers can read; [0, 0) for a queue without messages."""
        queue = self._queues.get(key)
        if queue is None:
            return VisibleRange(0, 0)
        first_offset, part = queue.first_offset, self.compacted.get(key)
        if part is not None:
            first_offset = min(first_offset, part.first_offset)
        return VisibleRange(first_offset, max(queue.first_offset, queue.visible_offset))

    def covers(self, key: QueueKey, offset: int) -> bool:
        """Return whether this copy knows which message, if any, a queue has at `offset`."""
        queue, part = self._queues.get(key), self.compacted.get(key)
        if queue is None or offset >= queue.first_offset:
            return queue is not None or not offset
        return part is not None and part.find(offset) is not None

    def is_kept(self, header: Header) -> bool:
        """Return whether a batch of the log is the one that its queue has for its messages.

        Raises:
            DataLoss, NotLeader: the compacted part of the queue can't be read.
        """
        key, offset = (header.topic_id, header.queue_id), header.first_offset
        queue = self._queues.get(key)
        if queue is None:
            return False
        if is_relocated(header) or offset < queue.first_offset:
            return self.compacted.position_of(key, offset) == header.position
        return True

    def needs(self, key: QueueKey, position: int, next_position: int) -> bool:
        """Return whether a queue needs a part of the log for messages that it keeps.

        Raises:
            DataLoss: its index can't be read.
        """
        if self.compacted.needs(key, position, next_position):
            return True
        queue = self._queues.get(key)
        return queue is not None and queue.has_batch(position, next_position)

    def count_from(self, key: QueueKey, offset: int) -> int:
        """Return how many messages at or after `offset` a queue has that consumers can read.

        Raises:
            DataLoss, NotLeader: its compacted part can't be read.
        """
        queue = self._queues.get(key)
        if queue is None:
            return 0
        tail = max(0, queue.visible_offset - max(offset, queue.first_offset))
        return tail + self.compacted.count_from(key, offset)

    def synced(self, position: int) -> frozenset[QueueKey]:
        """Record that the log is on disk below `position`; return the queues that have grown.

        A queue has grown if new messages became visible to consumers.
        """
        self.log.synced(position)
        return self._make_visible()

    def confirmed(self, position: int) -> frozenset[QueueKey]:
        """Record that the in-sync set has the log below `position`; returns as `synced`.

        On a node without replicas this is never called, and everything counts as confirmed.
        """
        self._confirmed = max(position, self._confirmed or 0)
        return self._make_visible()

    def _make_visible(self) -> frozenset[QueueKey]:
        position = self.readable_position
        grown: dict[QueueKey, int] = {}
        while self._unseen and self._unseen[0][0] <= position:
            _, key, next_offset = self._unseen.popleft()
            grown[key] = next_offset
        for key, next_offset in grown.items():
            self._queues[key].make_visible(next_offset)
        self.apply_compactions(position)
        return frozenset(grown)

    def apply_compactions(self, position: int) -> None:
        """Apply the compaction orders before `position`: the log is safe up to there."""
        pending = self.compacted.pending
        while pending and pending[0].next_position <= position:
            order = pending.pop(0)
            if (queue := self._queues.get(order.key)) is not None:
                self.compacted.put(order.key, order.section)
                next_offset = order.section.next_offset
                self._unneeded_paths += queue.trim_to(next_offset, order.queue_position)

    def due_orders(self, position: int) -> list[PurgeOrder]:
        """Return the purge orders before `position` that are not carried out."""
        begin = self.carried_out_to
        return [one for one in self.purge_orders if begin < one.next_position <= position]

    def take_unneeded_paths(self) -> list[str]:
        """Return the index files that compactions have made obsolete since the last call."""
        paths, self._unneeded_paths = self._unneeded_paths, []
        return paths

    def restore(self, header: Header, batch: bytes | memoryview) -> None:
        """Index a batch that recovery has read; batches are passed in log order.

        A queue that was not added before begins at offset 0.

        Raises:
            DataLoss: the batch does not follow the last batch of its queue.
        """
        key = (header.topic_id, header.queue_id)
        queue = self._queues.get(key) or self.add_queue(key, header.topic)
        if header.first_offset > queue.next_offset and self.log.purged_between(
            queue.last_position, header.position
        ):
            queue.skip_to(header.first_offset)
        if header.first_offset != queue.next_offset:
            raise DataLoss(
                f"the batch at {header.position} starts at offset {header.first_offset}; queue "
                f"{header.queue_id} of {header.topic} continues at {queue.next_offset}",
                detail=DataLossDetail(position=header.position),
            )
        self._take(key, queue, self._restored(header), _Taken(header, batch))

    def restore_dropped(self, header: Header, batch: bytes | memoryview) -> None:
        """As `restore`, for a batch that its queue has dropped, or that a compaction has written.

        It is not readable, unless a compaction order refers to it.
        """
        key = header.topic_id, header.queue_id
        self._take_unqueued(key, self._restored(header), _Taken(header, batch))

    def _restored(self, header: Header) -> StoreReceipt:
        self.store_unix_ms = max(self.store_unix_ms, written_unix_ms(header))
        return StoreReceipt(
            header.first_offset,
            header.position,
            header.position + header.length,
            header.store_unix_ms,
        )

    def add_queue(self, key: QueueKey, topic: str, first_offset: int = 0) -> ConsumeQueue:
        """Add a queue without messages; its next message gets `first_offset`."""
        queue = self._queues[key] = self.new_queue(key, topic, first_offset)
        return queue

    def new_queue(self, key: QueueKey, topic: str, first_offset: int) -> ConsumeQueue:
        """Return a queue as `add_queue` adds it, without adding it."""
        return ConsumeQueue(self.cache, folder_of(topic, *key), first_offset=first_offset)

    def resume(self, store_unix_ms: int, queues: Iterable[tuple[QueueKey, ConsumeQueue]]) -> None:
        """Load the queues of a checkpoint into the empty store."""
        self.store_unix_ms = store_unix_ms
        self._queues.update(queues)

    def floors(self) -> list[QueueFloor]:
        """Return the first offset of each queue that has lost messages to retention."""
        return [
            QueueFloor(topic_of(queue.folder), *key, queue.first_offset)
            for key, queue in self._queues.items()
            if queue.first_offset
        ]

    def forget_queue(self, key: QueueKey) -> None:
        """Remove a queue without messages, of a deleted topic."""
        queue = self._queues.pop(key)
        self.compacted.forget(key)
        assert queue.first_offset == queue.next_offset, (key, queue.first_offset)

    def drop_messages(self, topic_ids: Collection[int]) -> list[str]:
        """Drop the messages of deleted topics; return the folders to remove.

        The queues keep their next offset until the log no longer has a batch of them.
        """
        folders = []
        for key, queue in self._queues.items():
            if key[0] in topic_ids:
                queue.skip_to(queue.next_offset)
                self.compacted.forget(key)
                folders.append(queue.folder)
        return folders

    def relocate(self, relocated: Sequence[Relocation], now_unix_ms: int) -> list[int]:
        """Write messages of compacted queues again; return the positions of the batches.

        Nothing is safe until a sync, and nothing is read from there until an order says so.

        Raises:
            DiskFull, Overloaded: nothing was written.
            OSError: the disk has failed; it is unknown what was written.
        """
        self.store_unix_ms = max(self.store_unix_ms, now_unix_ms)
        relocated = [one.finished(self.store_unix_ms) for one in relocated]
        positions = self.log.place([one.header.length for one in relocated])
        self.log.append(
            [
                StampedBatch(
                    position,
                    stamped_head(
                        one.batch,
                        position=position,
                        first_offset=one.header.first_offset,
                        store_unix_ms=one.header.store_unix_ms,
                        topic_id=one.header.topic_id,
                        epoch=self.epoch,
                        owner=one.header.owner,
                    ),
                    memoryview(one.batch)[BODY_FROM:],
                )
                for one, position in zip(relocated, positions, strict=True)
            ]
        )
        for one, position in zip(relocated, positions, strict=True):
            span = position, position + one.header.length
            self._take_relocated(span, one.header, one.batch)
        return positions

    def trim(self, trims: Iterable[QueueTrim]) -> list[str]:
        """Drop the oldest messages of queues; return the files to remove."""
        paths: list[str] = []
        for topic_id, queue_id, first_offset, position in trims:
            if (queue := self._queues.get((topic_id, queue_id))) is not None:
                paths += queue.trim_to(first_offset, position)
        return paths

    def flush(self) -> None:
        """Move the entries that consume queues have only in memory to their files."""
        for queue in self._queues.values():
            queue.flush()

    def _has_room(self, run: WriteRun, outputs: OutputBatch | None) -> bool:
        """Return whether a batch and those of a run fit into what is remembered of outputs."""
        return outputs is None or self.outputs.has_room(
            run.outputs_count + len(outputs.keys), run.sources_count + 1
        )

    def _next_offset(self, key: QueueKey) -> int:
        queue = self._queues.get(key)
        return queue.next_offset if queue else 0

    def _write(self, run: WriteRun) -> dict[int, StoreReceipt | BatonError]:
        """Write a run of batches, then index them; return the outcomes by index."""
        admitted = run.admitted
        if not admitted:
            return {}
        positions = self.log.place([one.checked.header.length for one in admitted])
        try:
            self.log.append(
                [self._stamped(*each) for each in zip(admitted, positions, strict=True)]
            )
        except (DiskFull, Overloaded) as error:
            return {one.index: error for one in admitted}
        outcomes: dict[int, StoreReceipt | BatonError] = {}
        for one, position in zip(admitted, positions, strict=True):
            header = one.checked.header
            queue = self._queues.get(one.key) or self.add_queue(one.key, header.topic)
            receipt = StoreReceipt(
                one.first_offset, position, position + header.length, self.store_unix_ms
            )
            taken = _Taken(header, one.checked.batch, one.checked.outputs)
            self._take(one.key, queue, receipt, taken)
            self.appended_count += header.count
            outcomes[one.index] = receipt
        return outcomes

    def _stamped(self, one: AdmittedBatch, position: int) -> StampedBatch:
        batch = one.checked.batch
        head = stamped_head(
            batch,
            position=position,
            first_offset=one.first_offset,
            store_unix_ms=self.store_unix_ms,
            topic_id=one.key[0],
            epoch=self.epoch,
            owner=one.checked.header.owner,
        )
        return StampedBatch(position, head, memoryview(batch)[BODY_FROM:])

    def _take(
        self,
        key: QueueKey,
        queue: ConsumeQueue,
        receipt: StoreReceipt,
        taken: _Taken,
    ) -> None:
        """Update everything that is derived from the log with one batch."""
        header, batch, _ = taken
        queue.append(receipt.position, header.length, tag_hashes(batch, header))
        self._unseen.append((receipt.next_position, key, queue.next_offset))
        self._take_unqueued(key, receipt, taken)

    def _take_unqueued(self, key: QueueKey, receipt: StoreReceipt, taken: _Taken) -> None:
        header, batch, outputs = taken
        if is_relocated(header):
            self._take_relocated((receipt.position, receipt.next_position), header, batch)
            return
        span = receipt.position, receipt.next_position
        self.keys.append(span, key[0], key_hashes(batch, header), receipt.store_unix_ms)
        self.producers.record(header, key, receipt)
        if key == ORDERS:
            self._take_compaction(decode_compaction(header, bytes(batch)), receipt)
        elif key in ORDER_QUEUES:
            order = decode_order(header, bytes(batch), receipt.next_position)
            self.purge_orders.append(order)
            self._skip_purged(order)
        elif self.transactions.concerns(header, key):
            self.transactions.take(header, receipt, batch)
        elif header.output_head_bytes:
            self.outputs.take(outputs or parse_outputs(batch, header), receipt)
        elif self.outputs.concerns(key):
            self.outputs.open(header, receipt, batch)
        elif self.schedule.concerns(header, key):
            self.schedule.take(header, receipt, batch)

    def _take_relocated(
        self, span: PositionRange, header: Header, batch: bytes | memoryview
    ) -> None:
        keys = key_hashes(batch, header)
        self.keys.append(span, header.topic_id, keys, written_unix_ms(header))

    def _take_compaction(self, order: CompactionOrder, receipt: StoreReceipt) -> None:
        """Note an order; it is applied once it is safe.

        A copy that got the original messages purged learns from it where the queue continues, at
        once: a new leader gives offsets before it applies the order.
        """
        if order.key not in self._queues:
            self.add_queue(order.key, order.topic, order.next_offset)
        self.skip_to(order.key, order.next_offset, receipt.next_position)
        section = section_of(order, receipt)
        self.compacted.pending.append(
            PendingOrder(receipt.next_position, order.key, order.queue_position, section)
        )

    def _skip_purged(self, order: PurgeOrder) -> None:
        """Raise the next offsets of queues whose last batches this copy got purged.

        It is done at once: a new leader gives offsets before it carries the order out.
        """
        for trim in order.trims:
            key = trim.topic_id, trim.queue_id
            offset = max(trim.first_offset, self.dropped.get(key, 0))
            if key not in self._queues:
                self.add_queue(key, order.names[trim.topic_id], offset)
            self.skip_to(key, offset, order.next_position)

    def skip_to(self, key: QueueKey, offset: int, position: int) -> None:
        """Raise the next offset of a queue: the log below `position` has no message before it.

        All messages of the queue are dropped. Nothing is done if its next offset is not lower.
        """
        queue = self._queues[key]
        if queue.next_offset < offset:
            queue.skip_to(offset)
            self._unseen.append((position, key, offset))


class _Taken(NamedTuple):
    """A batch of the log; its outputs if they were parsed already."""

    header: Header
    batch: bytes | memoryview
    outputs: OutputBatch | None = None
