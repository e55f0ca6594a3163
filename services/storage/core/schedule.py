"""Scheduled batches in the log, and which of them are not delivered yet.

A scheduled batch is stored in the log inside a batch of a system topic. Its delivery is a batch of
its own queue; its producer fields identify the scheduled batch. A withdrawal (cancelled, or not
deliverable) is a batch of the system topic too. So the log alone decides which batches still wait:
there is no other state that a crash could leave behind. docs/reference/format.md describes the
bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from batonmq._core.checksum import crc32c
from batonmq._core.records import (
    BATCH_BYTES_MAX,
    BODY_BYTES_MAX,
    BODY_FROM,
    HEADER_BYTES,
    RECORD,
    BatchBuilder,
    Header,
    Message,
    column_starts,
    decode_records,
    encode_record,
    read_header,
    read_topic,
)
from batonmq.errors import BadBatch, BatonError, DataLoss, DataLossDetail, LimitExceeded
from batonmq_server.storage.core.commitlog import CommitLog
from batonmq_server.storage.core.delay_queue import DelayedBatch, DelayKey, DelayQueue
from batonmq_server.storage.core.producers import ProducerTable, QueueKey, StoreReceipt
from batonmq_server.storage.core.scan import HEAD_BYTES_MAX, examine
from batonmq_server.storage.core.tier import NotCached

TOPIC = "BATON_SYS_SCHEDULE"
TOPIC_ID = 0
SCHEDULED, WITHDRAWN = 0, 1
"""Queues of the system topic; `purge`, `transactions`, `outputs` and `compaction_order` have
others."""
QUEUE_COUNT = 8

FIRST = -1
ENVELOPE = struct.Struct(">qqq")
WITHDRAWAL = struct.Struct(">qq")
DELIVERED = struct.Struct(">qQ")
DELIVERED_FROM, QUEUE_FROM = BODY_FROM, 80
SCHEDULED_BYTES_MAX = BATCH_BYTES_MAX - 512
"""Maximum length of a scheduled batch: it must fit into another batch."""
READ_BYTES = 64 * 1024
_RECORDS_MAX = -(-BATCH_BYTES_MAX // BODY_BYTES_MAX)
SCHEDULED_HEAD_BYTES_MAX = (
    HEADER_BYTES + len(TOPIC) + 12 * _RECORDS_MAX + RECORD.size + ENVELOPE.size + HEAD_BYTES_MAX
)
"""Bytes of a batch of the system topic up to the end of the topic of the scheduled batch."""


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A scheduled batch.

    Attributes:
        deliver_unix_ms: Delivery time, Unix milliseconds.
        topic_id: Id of its topic.
        schedule_id: Position at which it was stored first; `FIRST` if it is stored the first time.
        batch: The batch as the producer sent it.
    """

    deliver_unix_ms: int
    topic_id: int
    schedule_id: int
    batch: bytes

    def key(self, position: int) -> DelayKey:
        """Return the key of this batch if it is stored at `position`."""
        first = self.schedule_id == FIRST
        return self.deliver_unix_ms, position if first else self.schedule_id


def encode_scheduled(scheduled: ScheduledBatch) -> bytes:
    """Return the unstamped batch of the system topic that contains a scheduled batch.

    Raises:
        LimitExceeded: the batch is too long.
    """
    if len(scheduled.batch) > SCHEDULED_BYTES_MAX:
        raise LimitExceeded(
            f"scheduled batch has {len(scheduled.batch)} bytes; the limit is {SCHEDULED_BYTES_MAX}",
            facts={
                "field": "batch",
                "limit": SCHEDULED_BYTES_MAX,
                "actual": len(scheduled.batch),
            },
        )
    envelope = ENVELOPE.pack(scheduled.deliver_unix_ms, scheduled.topic_id, scheduled.schedule_id)
    content = envelope + scheduled.batch
    bodies = [content[at : at + BODY_BYTES_MAX] for at in range(0, len(content), BODY_BYTES_MAX)]
    return encode_system(bodies, SCHEDULED)


def decode_scheduled(header: Header, batch: bytes) -> ScheduledBatch:
    """Inverse of `encode_scheduled`.

    Raises:
        BadBatch: it is not such a batch.
    """
    records = decode_records(batch, header, range(header.count))
    content = b"".join(record.body for record in records)
    deliver_unix_ms, topic_id, schedule_id = ENVELOPE.unpack_from(content)
    return ScheduledBatch(deliver_unix_ms, topic_id, schedule_id, content[ENVELOPE.size :])


def encode_withdrawn(keys: Sequence[DelayKey]) -> bytes:
    """Return the unstamped batch of the system topic that withdraws scheduled batches."""
    return encode_system([WITHDRAWAL.pack(*key) for key in keys], WITHDRAWN)


def delivery(key: DelayKey, batch: bytes, queue_id: int) -> bytes:
    """Return the unstamped batch that delivers `batch` to a queue.

    It differs from `batch` in the producer's id, epoch and sequence, which hold the key, in the
    queue, and in the checksum.
    """
    deliver_unix_ms, schedule_id = key
    head = bytearray(batch[:HEADER_BYTES])
    DELIVERED.pack_into(head, DELIVERED_FROM, -deliver_unix_ms, schedule_id)
    struct.pack_into(">I", head, QUEUE_FROM, queue_id)
    crc = crc32c(batch[HEADER_BYTES:], crc32c(bytes(head[BODY_FROM:])))
    struct.pack_into(">I", head, BODY_FROM - 4, crc)
    return bytes(head) + batch[HEADER_BYTES:]


def delivered_key(header: Header) -> DelayKey | None:
    """Return the key of the scheduled batch that a batch delivers; None if a producer sent it."""
    if header.producer_id >= 0:
        return None
    return -header.producer_id, header.producer_epoch << 32 | header.sequence


def sequence_key(queue: QueueKey) -> QueueKey:
    """Return the key for producer sequences of scheduled batches, which are counted separately."""
    topic_id, queue_id = queue
    return -1 - topic_id, queue_id


class Schedule:
    """The scheduled batches that are not delivered yet, derived from the log.

    Args:
        producers: Keeps the sequences of scheduled batches, under `sequence_key`.
    """

    def __init__(self, producers: ProducerTable) -> None:
        self.waiting = DelayQueue()
        self._producers = producers

    @staticmethod
    def concerns(header: Header, queue: QueueKey) -> bool:
        """Return whether a batch schedules, delivers or withdraws a scheduled batch."""
        return queue[0] == TOPIC_ID or header.producer_id < 0

    def take(self, header: Header, receipt: StoreReceipt, batch: bytes | memoryview) -> None:
        """Apply a batch of the log for which `concerns` is True.

        Args:
            header: Header of the batch; it need not be stamped, but names the owner.
        """
        if (key := delivered_key(header)) is not None:
            self.waiting.remove(key)
        elif header.queue_id == SCHEDULED:
            self._schedule(decode_scheduled(header, bytes(batch)), header.owner, receipt)
        else:
            for record in decode_records(bytes(batch), header, range(header.count)):
                deliver_unix_ms, schedule_id = WITHDRAWAL.unpack(record.body)
                self.waiting.remove((deliver_unix_ms, schedule_id))

    def earlier(self, header: Header, queue: QueueKey) -> StoreReceipt | None:
        """Return the receipt of an earlier attempt to schedule this batch; None if it is new.

        Raises:
            ProducerFenced, SequenceGap, DuplicateSequence: as `ProducerTable.check`.
        """
        return self._producers.check(header, sequence_key(queue))

    def _schedule(self, batch: ScheduledBatch, owner: int, receipt: StoreReceipt) -> None:
        key = batch.key(receipt.position)
        self.waiting.add(DelayedBatch(*key, receipt.position))
        if batch.schedule_id == FIRST:
            header = replace(read_header(batch.batch), owner=owner)
            queue = batch.topic_id, header.queue_id
            self._producers.record(header, sequence_key(queue), receipt)


def read_scheduled_topic(log: CommitLog, position: int) -> str:
    """Return the topic of the scheduled batch that is stored at `position`; read nothing else.

    Checksums are not checked, as that needs the whole batch.

    Raises:
        DataLoss: there is no scheduled batch.
    """
    head = log.read(position, SCHEDULED_HEAD_BYTES_MAX)
    try:
        header = read_header(head)
        if (header.position, header.topic_id, header.queue_id) == (position, TOPIC_ID, SCHEDULED):
            records_at = column_starts(header).extra_keys + 8 * header.extra_key_count
            return read_topic(head[records_at + RECORD.size + ENVELOPE.size :])
    except BadBatch:
        pass
    raise DataLoss(
        f"there is no scheduled batch at position {position}",
        detail=DataLossDetail(position=position),
    )


def read_scheduled(log: CommitLog, positions: Sequence[int]) -> Iterator[ScheduledBatch | DataLoss]:
    """Read the scheduled batches at ascending positions of the log, with few reads.

    Yields:
        One result for each position: the batch, or the error if the log is damaged there.

    Raises:
        NotCached: as `read_system`.
    """
    for stored in read_system(log, positions, SCHEDULED, "scheduled batch"):
        if isinstance(stored, DataLoss):
            yield stored
            continue
        try:
            yield decode_scheduled(*stored)
        except BatonError as error:
            yield _damaged(stored[0].position, error)


def read_system(
    log: CommitLog, positions: Sequence[int], queue_id: int, what: str
) -> Iterator[tuple[Header, bytes] | DataLoss]:
    """Read the batches of a queue of the system topic at ascending positions, with few reads.

    Args:
        what: What such a batch is, for errors.

    Yields:
        One result for each position: header and batch, or the error if the log is damaged there.

    Raises:
        NotCached: a batch has to be fetched from the object store first.
    """
    begin, chunk = 0, b""
    for position in positions:
        at = position - begin
        try:
            if not 0 <= at <= len(chunk) - HEADER_BYTES:
                begin, chunk, at = position, log.read(position, READ_BYTES), 0
            length = int.from_bytes(chunk[at + 8 : at + 12], "big")
            if at + length > len(chunk):
                wanted = max(min(length, BATCH_BYTES_MAX), READ_BYTES)
                begin, chunk, at = position, log.read(position, wanted), 0
            view = memoryview(chunk)[at:]
            header, length = examine(view, position, len(view))
            if header is None or (header.topic_id, header.queue_id) != (TOPIC_ID, queue_id):
                raise DataLoss(f"there is no {what} at position {position}")
            yield header, bytes(view[:length])
        except NotCached:
            raise
        except BatonError as error:
            yield _damaged(position, error)


def _damaged(position: int, error: BatonError) -> DataLoss:
    return DataLoss(
        f"the batch at {position} is damaged: {error}", detail=DataLossDetail(position=position)
    )


def encode_system(bodies: Sequence[bytes], queue_id: int, topic: str = TOPIC) -> bytes:
    """Return the unstamped batch of a queue of the system topic with these bodies."""
    builder = BatchBuilder()
    for body in bodies:
        message = Message(body)
        builder.add(message, encode_record(message))
    return builder.encode(topic=topic, queue_id=queue_id)
