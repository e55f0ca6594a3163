"""Transactions in the log, and which of them are open.

A half message is stored inside a batch of a system topic. Its commit is a batch of its own queue,
and its discard a batch of the topic of unresolved messages; their producer fields name the
transaction. Rollbacks and checks are records of the system topic. So the log alone decides which
transactions are open, and how often each was asked about. docs/reference/format.md describes the
bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from batonmq._core.names import UNRESOLVED_TOPIC
from batonmq._core.records import (
    BODY_BYTES_MAX,
    HEADER_BYTES,
    LENGTH_AT,
    RECORD,
    STORED_PROPERTIES_BYTES_MAX,
    TOPIC_BYTES_AT,
    BatchBuilder,
    Header,
    Message,
    check_columns,
    column_starts,
    decode_records,
    encode_record,
    read_header,
    read_topic,
)
from batonmq._core.transactions import COMMITTED_PRODUCER_ID, DISCARDED_PRODUCER_ID
from batonmq.errors import BadBatch, BatonError, DataLoss, LimitExceeded
from batonmq_server.storage.core.commitlog import CommitLog
from batonmq_server.storage.core.open_transactions import OpenTransaction, OpenTransactions
from batonmq_server.storage.core.producers import ProducerTable, QueueKey, StoreReceipt
from batonmq_server.storage.core.schedule import (
    SCHEDULED_BYTES_MAX,
    SCHEDULED_HEAD_BYTES_MAX,
    TOPIC_ID,
    delivered_key,
    delivery,
    encode_system,
    read_system,
    sequence_key,
)

TOPIC = "BATON_SYS_TRANSACTION"
HALF, MARKS = 3, 4
"""Queues of the system topic; the others are those of `schedule` and `purge`."""
QUEUE_COUNT = 5

FIRST = -1
COMMITTED_FROM, DISCARDED_FROM = -COMMITTED_PRODUCER_ID, -DISCARDED_PRODUCER_ID
"""Delivery times of the keys that name a transaction: no scheduled batch has such a time."""
ENVELOPE = struct.Struct(">qqqIBB")
_MARK = struct.Struct(">BqIB")
_LENGTH, _TOPIC_BYTES = struct.Struct(">I"), struct.Struct(">H")
GROUP_BYTES_MAX = 255
"""The envelope has the length of the group in one byte."""
ENDED_MAX = 65_536
"""Number of ended transactions whose outcome is remembered."""
_ENDED_COUNT, _ENDED = struct.Struct(">I"), struct.Struct(">qqB")
NO_POSITION = -1

ORIGIN_TOPIC, ORIGIN_QUEUE = "baton.transaction_topic", "baton.transaction_queue"
GROUP, TRANSACTION_ID = "baton.transaction_group", "baton.transaction_id"
REASON = "baton.transaction_reason"
"""Properties of a message in the topic of unresolved messages."""


class Outcome(IntEnum):
    """How a transaction has ended."""

    COMMITTED = 1
    ROLLED_BACK = 2
    DISCARDED = 3


@dataclass(frozen=True, slots=True)
class HalfMessage:
    """A half message.

    Attributes:
        topic_id: Id of its topic.
        transaction_id: Position at which it was stored first; `FIRST` if it is stored the first
            time.
        begin_unix_ms: Time at which it was stored first, Unix milliseconds.
        check_unix_s: Time from which the next check is due, Unix seconds.
        checks: Number of checks before it was stored here.
        group: Producer group.
        batch: The batch as the producer sent it.
    """

    topic_id: int
    transaction_id: int
    begin_unix_ms: int
    check_unix_s: int
    checks: int
    group: str
    batch: bytes

    def opened(self, position: int) -> OpenTransaction:
        """Return the transaction of a half message that is stored at `position`."""
        first = self.transaction_id == FIRST
        return OpenTransaction(
            position if first else self.transaction_id,
            position,
            self.check_unix_s,
            self.group,
            self.checks,
        )


@dataclass(frozen=True, slots=True)
class EndedTransaction:
    """The end of a transaction.

    Attributes:
        position: Position of the record that ended it.
    """

    outcome: Outcome
    position: int


def encode_half(half: HalfMessage) -> bytes:
    """Return the unstamped batch of the system topic that contains a half message.

    Raises:
        LimitExceeded: the batch is too long.
    """
    if len(half.batch) > SCHEDULED_BYTES_MAX:
        raise LimitExceeded(
            f"half message has {len(half.batch)} bytes; the limit is {SCHEDULED_BYTES_MAX}",
            facts={"field": "batch", "limit": SCHEDULED_BYTES_MAX, "actual": len(half.batch)},
        )
    group = half.group.encode("ascii")
    envelope = ENVELOPE.pack(
        half.topic_id,
        half.transaction_id,
        half.begin_unix_ms,
        half.check_unix_s,
        half.checks,
        len(group),
    )
    content = envelope + group + half.batch
    bodies = [content[at : at + BODY_BYTES_MAX] for at in range(0, len(content), BODY_BYTES_MAX)]
    return encode_system(bodies, HALF, TOPIC)


def decode_half(header: Header, batch: bytes) -> HalfMessage:
    """Inverse of `encode_half`.

    Raises:
        BadBatch: it is not such a batch.
    """
    records = decode_records(batch, header, range(header.count))
    content = b"".join(record.body for record in records)
    topic_id, transaction_id, begin_unix_ms, check_unix_s, checks, length = ENVELOPE.unpack_from(
        content
    )
    batch_at = ENVELOPE.size + length
    return HalfMessage(
        topic_id,
        transaction_id,
        begin_unix_ms,
        check_unix_s,
        checks,
        content[ENVELOPE.size : batch_at].decode("ascii"),
        content[batch_at:],
    )


@dataclass(frozen=True, slots=True)
class CheckMark:
    """A check of a transaction: the time of the next one, and the number of this one, from 1."""

    transaction_id: int
    check_unix_s: int
    checks: int


@dataclass(frozen=True, slots=True)
class RollbackMark:
    """A rollback of a transaction."""

    transaction_id: int


Mark = CheckMark | RollbackMark


def encode_marks(marks: Sequence[Mark]) -> bytes:
    """Return the unstamped batch of the system topic that contains marks."""
    bodies = [
        _MARK.pack(1, one.transaction_id, one.check_unix_s, one.checks)
        if isinstance(one, CheckMark)
        else _MARK.pack(2, one.transaction_id, 0, 0)
        for one in marks
    ]
    return encode_system(bodies, MARKS, TOPIC)


def decode_marks(header: Header, batch: bytes) -> list[Mark]:
    """Inverse of `encode_marks`.

    Raises:
        BadBatch: it is not such a batch.
    """
    marks: list[Mark] = []
    for record in decode_records(batch, header, range(header.count)):
        kind, transaction_id, check_unix_s, checks = _MARK.unpack(record.body)
        if kind not in (1, 2):
            raise BadBatch(f"a mark of a transaction has the unknown kind {kind}")
        marks.append(
            CheckMark(transaction_id, check_unix_s, checks)
            if kind == 1
            else RollbackMark(transaction_id)
        )
    return marks


def commit_batch(transaction_id: int, half: HalfMessage, queue_id: int) -> bytes:
    """Return the unstamped batch that commits a transaction: the message, in its queue."""
    return delivery((COMMITTED_FROM, transaction_id), half.batch, queue_id)


def discard_batch(
    transaction_id: int, half: HalfMessage, queue_id: int, *, name: str, reason: str
) -> bytes:
    """Return the unstamped batch that moves a message to the topic of unresolved messages.

    Each message gets properties that say where it comes from, unless the batch gets too long, or a
    client has sent a tag, keys or properties that this one would not send.

    Args:
        name: Id of the transaction as clients know it.

    Raises:
        BadBatch, LimitExceeded: the half message can't be read, or not in that topic.
    """
    header = read_header(half.batch)
    added = {
        ORIGIN_TOPIC: header.topic,
        ORIGIN_QUEUE: str(header.queue_id),
        GROUP: half.group,
        TRANSACTION_ID: name,
        REASON: reason,
    }
    try:
        batch = _with_properties(header, half.batch, queue_id, added)
    except (BadBatch, LimitExceeded):
        batch = _renamed(header, half.batch)
        check_columns(batch, read_header(batch))
    return delivery((DISCARDED_FROM, transaction_id), batch, queue_id)


def damaged_batch(
    transaction_id: int, queue_id: int, *, group: str, name: str, reason: str, now_unix_ms: int
) -> bytes:
    """Return the unstamped batch that ends a transaction whose half message can't be read.

    It is a message without a body for the topic of unresolved messages.

    Args:
        name: Id of the transaction as clients know it.
    """
    builder = BatchBuilder()
    message = Message(b"", properties={GROUP: group, TRANSACTION_ID: name, REASON: reason})
    builder.add(message, encode_record(message, properties_bytes_max=STORED_PROPERTIES_BYTES_MAX))
    batch = builder.encode(topic=UNRESOLVED_TOPIC, queue_id=queue_id, born_unix_ms=now_unix_ms)
    return delivery((DISCARDED_FROM, transaction_id), batch, queue_id)


def _with_properties(
    header: Header, batch: bytes, queue_id: int, added: Mapping[str, str]
) -> bytes:
    builder = BatchBuilder()
    for record in decode_records(batch, header, range(header.count)):
        properties = {**record.properties, **added}
        message = Message(record.body, record.tag, tuple(record.keys), properties)
        builder.add(
            message, encode_record(message, properties_bytes_max=STORED_PROPERTIES_BYTES_MAX)
        )
    return builder.encode(
        topic=UNRESOLVED_TOPIC, queue_id=queue_id, born_unix_ms=header.born_unix_ms
    )


def _renamed(header: Header, batch: bytes) -> bytes:
    """Return a batch for the topic of unresolved messages; `delivery` sets its checksum."""
    name = UNRESOLVED_TOPIC.encode("ascii")
    rest = batch[HEADER_BYTES + len(header.topic) :]
    head = bytearray(batch[:HEADER_BYTES])
    _LENGTH.pack_into(head, LENGTH_AT, HEADER_BYTES + len(name) + len(rest))
    _TOPIC_BYTES.pack_into(head, TOPIC_BYTES_AT, len(name))
    return bytes(head) + name + rest


def ended_by(header: Header) -> tuple[int, Outcome] | None:
    """Return the transaction that a batch commits or discards; None if it does neither."""
    key = delivered_key(header)
    if key is None or key[0] < COMMITTED_FROM:
        return None
    return key[1], Outcome.COMMITTED if key[0] == COMMITTED_FROM else Outcome.DISCARDED


class Transactions:
    """The transactions of a log, derived from it.

    Args:
        producers: Keeps the sequences of half messages, under `schedule.sequence_key`.

    Attributes:
        open: Those that have not ended.
        ended: The last ones that have, the oldest end first.
    """

    def __init__(self, producers: ProducerTable) -> None:
        self.open = OpenTransactions()
        self.ended: dict[int, EndedTransaction] = {}
        self._producers = producers

    @staticmethod
    def concerns(header: Header, queue: QueueKey) -> bool:
        """Return whether a batch begins, checks or ends transactions."""
        internal = queue[0] == TOPIC_ID and queue[1] in (HALF, MARKS)
        return internal or ended_by(header) is not None

    def take(self, header: Header, receipt: StoreReceipt, batch: bytes | memoryview) -> None:
        """Apply a batch of the log for which `concerns` is True.

        Args:
            header: Header of the batch; it need not be stamped, but names the owner.
        """
        if (end := ended_by(header)) is not None:
            self._end(*end, receipt.position)
        elif header.queue_id == HALF:
            self._begin(decode_half(header, bytes(batch)), header.owner, receipt)
        else:
            for mark in decode_marks(header, bytes(batch)):
                if isinstance(mark, CheckMark):
                    self.open.checked(mark.transaction_id, mark.check_unix_s, mark.checks)
                else:
                    self._end(mark.transaction_id, Outcome.ROLLED_BACK, receipt.position)

    def earlier(self, header: Header, queue: QueueKey) -> StoreReceipt | None:
        """Return the receipt of an earlier attempt to store a half message; None if it is new.

        Raises:
            ProducerFenced, SequenceGap, DuplicateSequence: as `ProducerTable.check`.
        """
        return self._producers.check(header, sequence_key(queue))

    def snapshot_ended(self) -> list[tuple[int, EndedTransaction]]:
        """Return a snapshot of the ends; another thread may encode it with `encode_ended`."""
        return list(self.ended.items())

    def restore(self, raw: bytes) -> None:
        """Load the part of a checkpoint: the open transactions, then the ended ones.

        A checkpoint from before transactions has no such part.
        """
        if not raw:
            return
        at = self.open.restore(raw)
        (count,) = _ENDED_COUNT.unpack_from(raw, at)
        rows = raw[at + _ENDED_COUNT.size : at + _ENDED_COUNT.size + count * _ENDED.size]
        for transaction_id, position, outcome in _ENDED.iter_unpack(rows):
            self.ended[transaction_id] = EndedTransaction(Outcome(outcome), position)

    def _begin(self, half: HalfMessage, owner: int, receipt: StoreReceipt) -> None:
        self.open.add(half.opened(receipt.position))
        if half.transaction_id == FIRST:
            header = replace(read_header(half.batch), owner=owner)
            queue = half.topic_id, header.queue_id
            self._producers.record(header, sequence_key(queue), receipt)

    def _end(self, transaction_id: int, outcome: Outcome, position: int) -> None:
        if not self.open.remove(transaction_id) and transaction_id in self.ended:
            return
        self.ended[transaction_id] = EndedTransaction(outcome, position)
        if len(self.ended) > ENDED_MAX:
            del self.ended[next(iter(self.ended))]


def encode_ended(ended: Sequence[tuple[int, EndedTransaction]]) -> bytes:
    """Return the part of a checkpoint with the ended transactions."""
    rows = [_ENDED.pack(transaction_id, one.position, one.outcome) for transaction_id, one in ended]
    return _ENDED_COUNT.pack(len(rows)) + b"".join(rows)


def read_halves(log: CommitLog, positions: Sequence[int]) -> Iterator[HalfMessage | DataLoss]:
    """Read the half messages at ascending positions of the log, with few reads.

    Yields:
        One result for each position: the half message, or the error if the log is damaged there.

    Raises:
        NotCached: as `read_system`.
    """
    for stored in read_system(log, positions, HALF, "half message"):
        if isinstance(stored, DataLoss):
            yield stored
            continue
        try:
            yield decode_half(*stored)
        except BatonError as error:
            yield DataLoss(f"the half message at {stored[0].position} is damaged: {error}")


def read_half_head(log: CommitLog, position: int) -> tuple[str, int]:
    """Return topic and begin, Unix milliseconds, of a half message; read nothing else.

    Checksums are not checked, as that needs the whole batch.

    Raises:
        DataLoss: there is no half message, or the log is damaged there.
    """
    try:
        head = log.read(position, SCHEDULED_HEAD_BYTES_MAX + ENVELOPE.size + GROUP_BYTES_MAX)
        header = read_header(head)
        if (header.position, header.topic_id, header.queue_id) == (position, TOPIC_ID, HALF):
            records_at = column_starts(header).extra_keys + 8 * header.extra_key_count
            content = head[records_at + RECORD.size :]
            envelope = ENVELOPE.unpack_from(content)
            return read_topic(content[ENVELOPE.size + envelope[-1] :]), envelope[2]
    except (BatonError, struct.error) as error:
        raise DataLoss(f"the half message at {position} is damaged: {error}") from error
    raise DataLoss(f"there is no half message at position {position}")
