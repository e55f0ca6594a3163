"""The state of a storage node: log, consume queues, key index, producers, schedule, transactions.

The store is their only owner. Nothing here waits, and the caller passes the time. The caller
appends, syncs the files of `log.unsynced()`, calls `synced`, and only then answers producers and
wakes readers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from batonmq._columns.batch_columns import check_batch, key_hashes, tag_hashes
from batonmq._core.names import check_topic
from batonmq._core.outputs import OutputSource
from batonmq._core.records import (
    BODY_FROM,
    Header,
    check_body,
    check_stamp,
    read_header,
    stamped_head,
)
from batonmq._core.subscription import SqlFilter
from batonmq.errors import (
    BadBatch,
    BatonError,
    DataLoss,
    DataLossDetail,
    DiskFull,
    NotLeader,
    NotReadable,
    NotWritable,
    OffsetAheadOfLog,
    OffsetOutOfRange,
    OffsetOutOfRangeDetail,
    Overloaded,
    QueueNotFound,
)
from batonmq_server.storage.core.commitlog import CommitLog, PositionRange, StampedBatch
from batonmq_server.storage.core.compacted import (
    CompactedPart,
    CompactedQueues,
    PendingOrder,
    Section,
    section_of,
)
from batonmq_server.storage.core.compaction_order import (
    ORDERS,
    CompactionOrder,
    Relocation,
    is_relocated,
    written_unix_ms,
)
from batonmq_server.storage.core.compaction_order import decode_order as decode_compaction
from batonmq_server.storage.core.compaction_policy import CompactionPolicy
from batonmq_server.storage.core.consumequeue import (
    ConsumeQueue,
    Entries,
    Int64Array,
    folder_of,
    topic_of,
)
from batonmq_server.storage.core.files import FileCache
from batonmq_server.storage.core.floors import QueueFloor
from batonmq_server.storage.core.key_digests import check_keyed
from batonmq_server.storage.core.keyindex import KeyIndex
from batonmq_server.storage.core.outputs import OutputBatch, OutputTable, parse_outputs
from batonmq_server.storage.core.producers import ProducerTable, QueueKey, StoreReceipt
from batonmq_server.storage.core.property_filter import find_passing
from batonmq_server.storage.core.purge import ORDER_QUEUES, PurgeOrder, QueueTrim, decode_order
from batonmq_server.storage.core.schedule import Schedule
from batonmq_server.storage.core.tag_filter import HashFilter, batch_starts, select
from batonmq_server.storage.core.transactions import Transactions

SCANNED_MAX = 16_384
"""Maximum number of entries that one read scans, unless the caller asks for more messages."""
GAP_BYTES_MAX = 64 * 1024
"""Two batches with at most this many bytes of other queues between them are read with one read."""
READ_BYTES_MAX = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LocalTopic:
    """The queues of a topic on this broker.

    Attributes:
        queue_count: Number of queues on this broker; 0 if there are none.
        write_queue_count: Queues with an id below this accept messages; None means all.
        readable: Whether consumers may read the topic.
        writable: Whether producers may write to the topic.
        retention_ms: Retention time of its messages; 0 for that of the broker.
        retention_bytes: Maximum bytes of a queue; 0 for unlimited.
        compaction: How its queues are compacted; None if they are not.
    """

    topic_id: int
    queue_count: int
    write_queue_count: int | None = None
    readable: bool = True
    writable: bool = True
    retention_ms: int = 0
    retention_bytes: int = 0
    compaction: CompactionPolicy | None = None

    def takes(self, queue_id: int) -> bool:
        """Return whether the queue accepts messages."""
        count = self.queue_count if self.write_queue_count is None else self.write_queue_count
        return self.writable and queue_id < count


@dataclass(frozen=True, slots=True)
class CheckedBatch:
    """A batch that has passed all checks that need no state of the store.

    Attributes:
        outputs: Its output columns; None if its messages are not outputs.
    """

    header: Header
    batch: bytes
    outputs: OutputBatch | None = None


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """What to read from a queue.

    Attributes:
        offset: First offset to read.
        bytes_max: Approximate maximum of bytes; the first batch always fits.
        messages_max: Maximum number of messages that pass the filter.
    """

    offset: int
    bytes_max: int
    messages_max: int
    filter: HashFilter | SqlFilter


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of a read.

    Attributes:
        batches: Stored batches with at least one message to deliver.
        next_offset: Offset after the last scanned one.
        message_count: Messages in [offset, next_offset) that pass the filter.
        filtered_count: Messages in [offset, next_offset) that do not pass it.
        lost_count: Messages in [offset, next_offset) that retention has removed.
        kept: Messages that pass, as indexes from the first one not lost; None if all pass.
    """

    batches: list[bytes]
    next_offset: int
    message_count: int
    filtered_count: int
    lost_count: int = 0
    kept: Int64Array | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class VisibleRange:
    """Offsets [first_offset, next_offset) of a queue are visible to consumers."""

    first_offset: int
    next_offset: int


def check(batch: bytes, owner: int = 0) -> CheckedBatch:
    """Check a batch that a producer has sent.

    Args:
        owner: Owner of the batch, see `owner_of`. What the batch itself says is ignored.

    Raises:
        BadBatch, BadChecksum, LimitExceeded, InvalidName: the batch is rejected.
    """
    header = check_batch(batch, stamped=False)
    if header.owner != owner:
        header = replace(header, owner=owner)
    check_topic(header.topic)
    outputs = parse_outputs(batch, header) if header.output_head_bytes else None
    if header.producer_id < 0 or (outputs is not None and header.producer_id):
        least = "be 0 in a batch of outputs" if outputs is not None else "not be negative"
        raise BadBatch(
            f"producer_id must {least}, got {header.producer_id}", facts={"field": "producer_id"}
        )
    return CheckedBatch(header, batch, outputs)


def check_no_outputs(checked: CheckedBatch) -> CheckedBatch:
    """Return the batch if its messages are not outputs.

    Raises:
        BadBatch: They are, and only `append` stores these.
    """
    if checked.outputs is not None:
        raise BadBatch(
            "outputs can't be scheduled, nor be part of a transaction", facts={"field": "outputs"}
        )
    return checked


def check_queue(topic: str, queues: LocalTopic, queue_id: int) -> QueueKey:
    """Return the key of a queue.

    Raises:
        QueueNotFound: the topic has no such queue on this broker.
    """
    if queue_id >= queues.queue_count:
        raise QueueNotFound(
            f"topic {topic} has {queues.queue_count} queues on this broker; there is no "
            f"queue {queue_id}",
            facts={"topic": topic, "queue_id": queue_id, "queue_count": queues.queue_count},
        )
    return queues.topic_id, queue_id


def check_readable(topic: str, queues: LocalTopic) -> None:
    """Check that consumers may read a topic.

    Raises:
        NotReadable: the topic is write-only.
    """
    if not queues.readable:
        raise NotReadable(
            f"topic {topic} is write-only: its messages can't be read",
            retry_after_ms=2_000,
            facts={"topic": topic},
        )


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
            f"this follower has not got the compaction of offset {offset} yet", retry_after_ms=100
        )


def check_takes(checked: CheckedBatch, queues: LocalTopic) -> None:
    """Check that the queue of a batch accepts its messages.

    Raises:
        NotWritable: it accepts no messages.
        BadBatch: the topic is compacted, and a message has no ordering key.
    """
    header = checked.header
    if queues.compaction is not None:
        check_keyed(header.topic, checked.batch, header)
    if not queues.takes(header.queue_id):
        which = f"queue {header.queue_id} of " if queues.writable else ""
        raise NotWritable(
            f"{which}topic {header.topic} accepts no messages",
            facts={"topic": header.topic, "queue_id": header.queue_id},
        )


class MessageStore:
    """The state of a storage node; see the module.

    Args:
        cache: Open files of the consume queues.
        epoch: Epoch that is stamped on every batch; a new leader sets its own.

    Attributes:
        dropped: Offsets below which queues have dropped their messages, from a recovery.
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
        self.compacted = CompactedQueues(log)
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
        run = _WriteRun()
        for index, checked in enumerate(batches):
            header, topic = checked.header, topics[checked.header.topic]
            try:
                if isinstance(topic, BatonError):
                    raise topic
                key = check_queue(header.topic, topic, header.queue_id)
                if run.affects(checked, key):
                    outcomes |= self._write(run)
                    run = _WriteRun()
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
        """Read messages from `spec.offset` on; None if there is no message yet.

        Raises:
            OffsetAheadOfLog: the offset is beyond the end of the queue.
            OffsetOutOfRange: the offset is before the first offset of the queue.
            DataLoss: a stored batch is damaged.
        """
        queue = self._queues.get(key)
        part = self.compacted.get(key)
        if part is not None and (section := part.find(spec.offset)) is not None:
            return self._read_section(key, part, section, spec)
        _check_offset(queue, spec.offset)
        if queue is None or spec.offset >= queue.visible_offset:
            return None
        scanned_max = spec.messages_max
        if isinstance(spec.filter, SqlFilter) or not spec.filter.keeps_all:
            scanned_max = max(SCANNED_MAX, scanned_max)
        entries = queue.read(spec.offset, min(queue.visible_offset, spec.offset + scanned_max))
        if isinstance(spec.filter, SqlFilter):
            return self._find(key, entries, spec, spec.filter)
        selection = select(
            entries, spec.filter, bytes_max=spec.bytes_max, messages_max=spec.messages_max
        )
        return ReadResult(
            list(self._read_batches(key, selection.positions, selection.sizes)),
            spec.offset + selection.scanned_count,
            selection.kept_count,
            selection.scanned_count - selection.kept_count,
            kept=selection.kept,
        )

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
        reading = self.read(key, replace(spec, offset=kept_from))
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

    def _next_offset(self, key: QueueKey) -> int:
        queue = self._queues.get(key)
        return queue.next_offset if queue else 0

    def _write(self, run: _WriteRun) -> dict[int, StoreReceipt | BatonError]:
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

    def _stamped(self, one: _Admitted, position: int) -> StampedBatch:
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

        A copy that got the original messages purged learns from it where the queue goes on, at
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

    def _read_section(
        self, key: QueueKey, part: CompactedPart, section: Section, spec: ReadSpec
    ) -> ReadResult:
        """Read from a section of the compacted part; empty ones are passed over."""
        offset = spec.offset
        while True:
            rows = self.compacted.rows(section)
            begin = int(np.searchsorted(rows.offsets, offset))
            if begin < len(rows):
                break
            offset = section.next_offset
            if (following := part.find(offset)) is None:
                return ReadResult([], offset, 0, 0, kept=np.empty(0, np.int64))
            section = following
        end = begin + min(len(rows) - begin, max(SCANNED_MAX, spec.messages_max))
        offsets = rows.offsets[begin:end]
        entries = Entries(rows.positions[begin:end], rows.sizes[begin:end], rows.tags[begin:end])
        stop = section.next_offset if end == len(rows) else int(rows.offsets[end])
        if isinstance(spec.filter, SqlFilter):
            return self._find_in_rows(key, offsets, entries, stop, spec, spec.filter)
        selection = select(
            entries, spec.filter, bytes_max=spec.bytes_max, messages_max=spec.messages_max
        )
        self.compacted.check_positions(selection.positions)
        scanned = selection.scanned_count
        kept = np.arange(scanned) if selection.kept is None else selection.kept
        return ReadResult(
            list(self._read_batches(key, selection.positions, selection.sizes)),
            stop if scanned == len(offsets) else int(offsets[scanned]),
            selection.kept_count,
            scanned - selection.kept_count,
            kept=offsets[kept] - spec.offset,
        )

    def _find_in_rows(
        self,
        key: QueueKey,
        offsets: Int64Array,
        entries: Entries,
        stop: int,
        spec: ReadSpec,
        condition: SqlFilter,
    ) -> ReadResult:
        """As `_find`, for messages of which the offsets are not consecutive."""
        starts = batch_starts(entries.positions)
        places = entries.positions[starts].tolist(), entries.sizes[starts].tolist()
        self.compacted.check_positions(places[0])
        ends = offsets[np.append(starts[1:], len(offsets)) - 1] + 1 - spec.offset
        matches = find_passing(
            zip(ends.tolist(), self._read_batches(key, *places), strict=True),
            spec.offset,
            condition,
            bytes_max=spec.bytes_max,
            messages_max=spec.messages_max,
        )
        scanned = int(np.searchsorted(offsets, spec.offset + matches.scanned_count))
        return ReadResult(
            matches.batches,
            stop if scanned == len(offsets) else int(offsets[scanned]),
            matches.kept_count,
            scanned - matches.kept_count,
            kept=np.array(matches.kept, np.int64),
        )

    def _find(
        self, key: QueueKey, entries: Entries, spec: ReadSpec, condition: SqlFilter
    ) -> ReadResult:
        """As `read`, with a condition on properties: batches must be read to test it."""
        starts = batch_starts(entries.positions)
        places = entries.positions[starts].tolist(), entries.sizes[starts].tolist()
        matches = find_passing(
            zip(
                [*starts[1:].tolist(), len(entries)], self._read_batches(key, *places), strict=True
            ),
            spec.offset,
            condition,
            bytes_max=spec.bytes_max,
            messages_max=spec.messages_max,
        )
        return ReadResult(
            matches.batches,
            spec.offset + matches.scanned_count,
            matches.kept_count,
            matches.scanned_count - matches.kept_count,
            kept=np.array(matches.kept, np.int64),
        )

    def _read_batches(
        self, key: QueueKey, positions: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[bytes]:
        """Read the batches of a queue at ascending positions, with few reads."""
        begin = 0
        while begin < len(positions):
            first = positions[begin]
            limit = min(self.log.segment_end(first), first + READ_BYTES_MAX)
            last, end = begin + 1, first + sizes[begin]
            while (
                last < len(positions)
                and positions[last] - end <= GAP_BYTES_MAX
                and positions[last] + sizes[last] <= limit
            ):
                end = positions[last] + sizes[last]
                last += 1
            chunk = self.log.read(first, end - first)
            for index in range(begin, last):
                at = positions[index] - first
                batch = chunk[at : at + sizes[index]]
                yield verified(batch, positions[index], key)
            begin = last


def _check_offset(queue: ConsumeQueue | None, offset: int) -> None:
    first_offset, next_offset = (queue.first_offset, queue.next_offset) if queue else (0, 0)
    if offset > next_offset:
        raise OffsetAheadOfLog(
            f"offset {offset} is beyond the end of the queue, {next_offset}",
            facts={"offset": offset, "next_offset": next_offset},
        )
    if offset < first_offset:
        raise OffsetOutOfRange(
            f"offset {offset} is no longer kept; the queue has [{first_offset}, {next_offset})",
            facts={"next_offset": next_offset},
            detail=OffsetOutOfRangeDetail(offset=offset, first_offset=first_offset),
        )


def verified(batch: bytes, position: int, key: QueueKey) -> bytes:
    """Return `batch` if it is the undamaged batch at `position` of the queue `key`.

    Raises:
        DataLoss: it is not.
    """
    verified_header(batch, position, key)
    return batch


def verified_header(batch: bytes, position: int, key: QueueKey) -> Header:
    """Return the header of `batch`; see `verified`."""
    try:
        header = read_header(batch)
        if (header.position, header.length) != (position, len(batch)):
            raise BadBatch("its header has another position or length")
        if (header.topic_id, header.queue_id) != key:
            raise BadBatch("its header has another queue")
        check_stamp(batch)
        check_body(batch)
    except BatonError as error:
        raise DataLoss(
            f"the batch at {position} is damaged: {error}", detail=DataLossDetail(position=position)
        ) from error
    return header


class _Taken(NamedTuple):
    """A batch of the log; its outputs if they were parsed already."""

    header: Header
    batch: bytes | memoryview
    outputs: OutputBatch | None = None


@dataclass(frozen=True, slots=True)
class _Admitted:
    index: int
    checked: CheckedBatch
    key: QueueKey
    first_offset: int


class _WriteRun:
    """Batches that are written together: the check of none depends on another one of them."""

    def __init__(self) -> None:
        self.admitted: list[_Admitted] = []
        self._next_offsets: dict[QueueKey, int] = {}
        self._writers: set[tuple[int, QueueKey]] = set()
        self._epochs: dict[int, int] = {}
        self._sources: dict[OutputSource, list[OutputBatch]] = {}

    def affects(self, checked: CheckedBatch, key: QueueKey) -> bool:
        """Return whether the check of this batch depends on a batch of the run."""
        header, outputs = checked.header, checked.outputs
        if outputs is not None:
            others = self._sources.get(outputs.head.source, ())
            return any(one.head != outputs.head or one.overlaps(outputs) for one in others)
        return (header.producer_id, key) in self._writers or (
            self._epochs.get(header.producer_id, header.producer_epoch) != header.producer_epoch
        )

    def add(self, index: int, checked: CheckedBatch, key: QueueKey, next_offset: int) -> None:
        """Add a batch; `next_offset` is the next offset of its queue before the run."""
        header = checked.header
        first_offset = self._next_offsets.get(key, next_offset)
        self._next_offsets[key] = first_offset + header.count
        if (outputs := checked.outputs) is not None:
            self._sources.setdefault(outputs.head.source, []).append(outputs)
        if header.producer_id > 0:
            self._writers.add((header.producer_id, key))
            self._epochs[header.producer_id] = header.producer_epoch
        self.admitted.append(_Admitted(index, checked, key, first_offset))
