"""The state of a storage node, and its only owner: log, consume queues, producers.

Everything here happens at once; time comes in as an argument. A caller appends, syncs what
`log.unsynced()` names, tells `synced`, and only then lets readers and producers know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batonmq.common.errors import (
    BadBatch,
    BatonError,
    DataLoss,
    OffsetAheadOfLog,
    OffsetOutOfRange,
    Overloaded,
    QueueNotFound,
)
from batonmq.core.names import check_topic
from batonmq.core.records import (
    BODY_FROM,
    Header,
    check_batch,
    check_body,
    check_stamp,
    read_header,
    stamped_head,
    tag_hashes,
)
from services.storage.core.commitlog import CommitLog, Stamped
from services.storage.core.consumequeue import ConsumeQueue, folder_of
from services.storage.core.files import FileCache
from services.storage.core.filter import HashFilter, select
from services.storage.core.producers import ProducerTable, QueueKey, Receipt

SCANNED_MAX = 16_384
"""Entries one read looks at, unless the caller wants more messages than that."""
GAP_BYTES_MAX = 64 * 1024
"""Bytes of other queues between two batches that are read along rather than jumped over."""
READ_BYTES_MAX = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TopicQueues:
    """What storage needs to know of a topic.

    Attributes:
        queue_count: Queues on this node; 0 if the topic has none here.
    """

    topic_id: int
    queue_count: int


@dataclass(frozen=True, slots=True)
class Checked:
    """A batch that passed every check that needs no state."""

    header: Header
    batch: bytes


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a pull asks for.

    Attributes:
        offset: First offset wanted.
        bytes_max: Stop at about this many bytes; the first batch always fits.
        messages_max: Stop at this many messages that pass the filter.
    """

    offset: int
    bytes_max: int
    messages_max: int
    filter: HashFilter


@dataclass(frozen=True, slots=True)
class Reading:
    """What a pull may deliver.

    Attributes:
        batches: Stored bytes of the batches that hold a message to deliver.
        next_offset: One past the last offset scanned.
        message_count: Messages in [offset, next_offset) that pass the filter.
        filtered_count: Messages in [offset, next_offset) that do not.
    """

    batches: list[bytes]
    next_offset: int
    message_count: int
    filtered_count: int


@dataclass(frozen=True, slots=True)
class QueueRange:
    """Offsets [first_offset, next_offset) of a queue are visible to consumers."""

    first_offset: int
    next_offset: int


def check(batch: bytes) -> Checked:
    """Check a batch as it came from a producer.

    Raises:
        BadBatch, BadChecksum, LimitExceeded, InvalidName: it is refused.
    """
    header = check_batch(batch, stamped=False)
    check_topic(header.topic)
    return Checked(header, batch)


def check_queue(topic: str, queues: TopicQueues, queue_id: int) -> QueueKey:
    """The key of a queue.

    Raises:
        QueueNotFound: the topic has no such queue on this node.
    """
    if queue_id >= queues.queue_count:
        raise QueueNotFound(
            f"topic {topic} has {queues.queue_count} queues here; there is no queue {queue_id}",
            facts={"topic": topic, "queue_id": queue_id, "queue_count": queues.queue_count},
        )
    return queues.topic_id, queue_id


class Store:
    """See the module.

    Args:
        cache: Open files of the consume queues.
        epoch: Epoch of the master, stamped on every batch.
    """

    def __init__(
        self, log: CommitLog, cache: FileCache, producers: ProducerTable, epoch: int
    ) -> None:
        self.log, self.producers, self.epoch = log, producers, epoch
        self._cache = cache
        self._queues: dict[QueueKey, ConsumeQueue] = {}
        self._unseen: deque[tuple[int, QueueKey, int]] = deque()
        self._store_unix_ms = 0
        self.appended_count = 0

    @property
    def queue_count(self) -> int:
        """Queues that have, or had, a message."""
        return len(self._queues)

    def append(
        self,
        batches: Sequence[Checked],
        topics: Mapping[str, TopicQueues | BatonError],
        now_unix_ms: int,
    ) -> list[Receipt | BatonError]:
        """Write `batches`; one outcome each, in order. Nothing is safe until a sync.

        Args:
            topics: Every topic of `batches`, or why it can't be used.
        """
        self._store_unix_ms = max(self._store_unix_ms, now_unix_ms)
        outcomes: dict[int, Receipt | BatonError] = {}
        run = _Run()
        for index, checked in enumerate(batches):
            header, topic = checked.header, topics[checked.header.topic]
            try:
                if isinstance(topic, BatonError):
                    raise topic
                key = check_queue(header.topic, topic, header.queue_id)
                if run.decides(header, key):
                    outcomes |= self._write(run)
                    run = _Run()
                receipt = self.producers.check(header, key)
                if receipt is None:
                    self.log.place([header.length])
                    run.add(index, checked, key, self._next_offset(key))
                else:
                    outcomes[index] = receipt
            except BatonError as error:
                outcomes[index] = error
        outcomes |= self._write(run)
        return [outcomes[index] for index in range(len(batches))]

    def read(self, key: QueueKey, wanted: Wanted) -> Reading | None:
        """What is to be delivered from `wanted.offset` on; None if nothing is there yet.

        Raises:
            OffsetAheadOfLog: the offset is beyond the end of the queue.
            OffsetOutOfRange: the offset is before the first that is kept.
            DataLoss: a stored batch fails its checksum.
        """
        queue = self._queues.get(key)
        _check_offset(queue, wanted.offset)
        if queue is None or wanted.offset >= queue.visible_offset:
            return None
        scanned_max = wanted.messages_max
        if not wanted.filter.keeps_all:
            scanned_max = max(SCANNED_MAX, scanned_max)
        end = min(queue.visible_offset, wanted.offset + scanned_max)
        selection = select(
            queue.read(wanted.offset, end),
            wanted.filter,
            bytes_max=wanted.bytes_max,
            messages_max=wanted.messages_max,
        )
        return Reading(
            self._read_batches(selection.positions, selection.sizes),
            wanted.offset + selection.scanned_count,
            selection.kept_count,
            selection.scanned_count - selection.kept_count,
        )

    def offsets(self, key: QueueKey) -> QueueRange:
        """What consumers can read; nothing of a queue without messages."""
        queue = self._queues.get(key)
        return QueueRange(queue.first_offset, queue.visible_offset) if queue else QueueRange(0, 0)

    def synced(self, position: int) -> frozenset[QueueKey]:
        """Let readers see what lies below `position`, now safe; the queues that have grown."""
        self.log.synced(position)
        grown: dict[QueueKey, int] = {}
        while self._unseen and self._unseen[0][0] <= position:
            _, key, next_offset = self._unseen.popleft()
            grown[key] = next_offset
        for key, next_offset in grown.items():
            self._queues[key].show(next_offset)
        return frozenset(grown)

    def restore(self, header: Header, batch: bytes | memoryview) -> None:
        """Take a batch that recovery has found; batches come in the order of the log.

        Raises:
            DataLoss: it does not follow the last batch of its queue.
        """
        key = (header.topic_id, header.queue_id)
        queue = self._queues.get(key)
        if queue is None:
            start = header.first_offset if self.log.first_position else 0
            queue = self._add_queue(key, header.topic, start)
        if header.first_offset != queue.next_offset:
            raise DataLoss(
                f"the batch at {header.position} starts at offset {header.first_offset}; queue "
                f"{header.queue_id} of {header.topic} goes on at {queue.next_offset}",
                facts={"position": header.position},
            )
        self._store_unix_ms = max(self._store_unix_ms, header.store_unix_ms)
        receipt = Receipt(
            header.first_offset,
            header.position,
            header.position + header.length,
            header.store_unix_ms,
        )
        self._index(key, queue, receipt, tag_hashes(batch, header))
        self.producers.record(header, key, receipt)

    def flush(self) -> None:
        """Move what the consume queues have in memory to their files."""
        for queue in self._queues.values():
            queue.flush()

    def _next_offset(self, key: QueueKey) -> int:
        queue = self._queues.get(key)
        return queue.next_offset if queue else 0

    def _write(self, run: _Run) -> dict[int, Receipt | BatonError]:
        """Write a run, then take it into queues and producers; outcomes by index."""
        admitted = run.admitted
        if not admitted:
            return {}
        positions = self.log.place([one.checked.header.length for one in admitted])
        try:
            self.log.append(
                [self._stamped(*each) for each in zip(admitted, positions, strict=True)]
            )
        except Overloaded as error:
            return {one.index: error for one in admitted}
        outcomes: dict[int, Receipt | BatonError] = {}
        for one, position in zip(admitted, positions, strict=True):
            header = one.checked.header
            queue = self._queues.get(one.key) or self._add_queue(one.key, header.topic, 0)
            receipt = Receipt(
                one.first_offset, position, position + header.length, self._store_unix_ms
            )
            self._index(one.key, queue, receipt, tag_hashes(one.checked.batch, header))
            self.producers.record(header, one.key, receipt)
            self.appended_count += header.count
            outcomes[one.index] = receipt
        return outcomes

    def _stamped(self, one: _Admitted, position: int) -> Stamped:
        batch = one.checked.batch
        head = stamped_head(
            batch,
            position=position,
            first_offset=one.first_offset,
            store_unix_ms=self._store_unix_ms,
            topic_id=one.key[0],
            epoch=self.epoch,
        )
        return Stamped(position, head, memoryview(batch)[BODY_FROM:])

    def _index(
        self,
        key: QueueKey,
        queue: ConsumeQueue,
        receipt: Receipt,
        hashes: npt.NDArray[np.int32],
    ) -> None:
        queue.append(receipt.position, receipt.next_position - receipt.position, hashes)
        self._unseen.append((receipt.next_position, key, queue.next_offset))

    def _add_queue(self, key: QueueKey, topic: str, first_offset: int) -> ConsumeQueue:
        folder = folder_of(topic, *key)
        queue = self._queues[key] = ConsumeQueue(self._cache, folder, first_offset=first_offset)
        return queue

    def _read_batches(self, positions: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """Batches at ascending positions, in as few reads as is sensible."""
        batches: list[bytes] = []
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
                batches.append(_verified(chunk[at : at + sizes[index]], positions[index]))
            begin = last
        return batches


def _check_offset(queue: ConsumeQueue | None, offset: int) -> None:
    first_offset, next_offset = (queue.first_offset, queue.next_offset) if queue else (0, 0)
    if offset > next_offset:
        raise OffsetAheadOfLog(
            f"offset {offset} is beyond the end of the queue, {next_offset}",
            facts={"offset": offset, "next_offset": next_offset},
        )
    if offset < first_offset:
        raise OffsetOutOfRange(
            f"offset {offset} is no longer kept; the queue holds [{first_offset}, {next_offset})",
            facts={"offset": offset, "first_offset": first_offset, "next_offset": next_offset},
        )


def _verified(batch: bytes, position: int) -> bytes:
    """`batch`, if it is what was written at `position`."""
    try:
        if read_header(batch).position != position:
            raise BadBatch("it names another position")
        check_stamp(batch)
        check_body(batch)
    except BatonError as error:
        raise DataLoss(
            f"the batch at {position} is damaged: {error}", facts={"position": position}
        ) from error
    return batch


@dataclass(frozen=True, slots=True)
class _Admitted:
    index: int
    checked: Checked
    key: QueueKey
    first_offset: int


class _Run:
    """Batches that are written together: none of them decides about a later one."""

    def __init__(self) -> None:
        self.admitted: list[_Admitted] = []
        self._next_offsets: dict[QueueKey, int] = {}
        self._writers: set[tuple[int, QueueKey]] = set()
        self._epochs: dict[int, int] = {}

    def decides(self, header: Header, key: QueueKey) -> bool:
        """Whether the check of this batch's producer needs what the run writes."""
        return (header.producer_id, key) in self._writers or (
            self._epochs.get(header.producer_id, header.producer_epoch) != header.producer_epoch
        )

    def add(self, index: int, checked: Checked, key: QueueKey, next_offset: int) -> None:
        """Add a batch; `next_offset` is where its queue ended before the run."""
        header = checked.header
        first_offset = self._next_offsets.get(key, next_offset)
        self._next_offsets[key] = first_offset + header.count
        if header.producer_id:
            self._writers.add((header.producer_id, key))
            self._epochs[header.producer_id] = header.producer_epoch
        self.admitted.append(_Admitted(index, checked, key, first_offset))
