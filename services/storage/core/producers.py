"""The last batches of idempotent producers, so that a retry gets the first receipt again.

A batch contains the id and epoch of its producer, and the sequence of its first message: an
unsigned 32-bit number that counts messages per producer and queue, and wraps. The state is in
memory and derived from the log: recovery restores it from the checkpoint and the log after it.

An unknown producer, or one with a new epoch, may start at any sequence, because its earlier state
may have expired. A producer expires after 7 days without a batch. If there are more than 100,000
producers, the least recently used ones are removed. Producers that send only one batch are kept in
a table of their own: there may be many, and they must not push out the others. An id in one table
is another producer than the same id in the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from batonmq._core.queue_sender import ONE_BATCH_EPOCH
from batonmq._core.records import Header
from batonmq.errors import DuplicateSequence, ProducerFenced, SequenceGap

BATCHES_KEPT = 5
IDLE_MS_MAX = 7 * 24 * 3_600_000
PRODUCERS_MAX = 100_000
QUEUES_MAX = 400_000
SEQUENCES = 1 << 32

QueueKey = tuple[int, int]
"""Topic id and queue id."""


@dataclass(frozen=True, slots=True)
class StoreReceipt:
    """The place of a stored batch.

    Attributes:
        next_position: Position after the batch.
        duplicate: Whether an earlier attempt had stored the batch.
    """

    first_offset: int
    position: int
    next_position: int
    store_unix_ms: int
    duplicate: bool = False


StoredBatch = tuple[int, int, StoreReceipt]
"""Sequence, count and receipt of a stored batch."""


class ProducerState(NamedTuple):
    """The state of a producer in a checkpoint, with its last batches by queue."""

    producer_id: int
    epoch: int
    used_unix_ms: int
    queues: dict[QueueKey, tuple[StoredBatch, ...]]


class ProducerColumns(NamedTuple):
    """Producers as columns: few objects, so a snapshot takes little time."""

    producer_ids: list[int]
    epochs: list[int]
    used_unix_ms: list[int]
    queues: list[dict[QueueKey, tuple[StoredBatch, ...]]]

    def states(self) -> list[ProducerState]:
        """Return the producers as rows."""
        return [ProducerState(*row) for row in zip(*self, strict=True)]


@dataclass(slots=True)
class _Producer:
    """The state of a producer.

    Snapshots share `queues`. It must be copied before a change if a snapshot was taken since:
    `snapshots` is the number of snapshots at the last copy.
    """

    epoch: int
    used_unix_ms: int
    snapshots: int
    queues: dict[QueueKey, tuple[StoredBatch, ...]] = field(default_factory=dict)


class ProducerTable:
    """Sequences and receipts by producer and queue, in two tables (see the module).

    Args:
        producers_max: Maximum number of producers in each table.
        queues_max: Maximum number of pairs of producer and queue in each table.
    """

    def __init__(self, producers_max: int = PRODUCERS_MAX, queues_max: int = QUEUES_MAX) -> None:
        self._lasting, self._once = (_ProducerSubtable(producers_max, queues_max) for _ in range(2))

    def __len__(self) -> int:
        return len(self._lasting) + len(self._once)

    def check(self, header: Header, queue: QueueKey) -> StoreReceipt | None:
        """Return the receipt of an earlier attempt of this batch; None if the batch is new.

        Raises:
            ProducerFenced: a newer epoch of the producer has written to a queue of this broker.
            SequenceGap: messages before this batch are missing.
            DuplicateSequence: the sequence was stored, but its receipt is no longer known, or it
                was stored with another batch.
        """
        return self._of(header.producer_epoch).check(header, queue)

    def record(self, header: Header, queue: QueueKey, receipt: StoreReceipt) -> None:
        """Record a stored batch, for which `check` has returned None."""
        self._of(header.producer_epoch).record(header, queue, receipt)

    def expire(self, now_unix_ms: int) -> None:
        """Remove the producers without a batch for 7 days."""
        for table in (self._lasting, self._once):
            table.expire(now_unix_ms)

    def snapshot(self) -> ProducerColumns:
        """Return all producers, the least recently used first, one table after the other.

        The snapshot is immutable.
        """
        lasting, once = self._lasting.snapshot(), self._once.snapshot()
        return ProducerColumns(
            lasting.producer_ids + once.producer_ids,
            lasting.epochs + once.epochs,
            lasting.used_unix_ms + once.used_unix_ms,
            lasting.queues + once.queues,
        )

    def below(self, position: int, queues_max: int) -> list[ProducerState]:
        """Return the state from batches below `position` only, in the order of `snapshot`.

        Args:
            queues_max: Maximum number of pairs of producer and queue; the least recently used
                producers are left out.
        """
        found: list[ProducerState] = []
        count = 0
        for one in reversed(self.snapshot().states()):
            queues = {
                queue: old
                for queue, batches in one.queues.items()
                if (old := tuple(b for b in batches if b[2].position < position))
            }
            count += len(queues)
            if count > queues_max:
                break
            if queues:
                found.append(one._replace(queues=queues))
        return found[::-1]

    def load(self, producers: Iterable[ProducerState]) -> None:
        """Load what `snapshot` or `below` has returned, into empty tables."""
        for one in producers:
            self._of(one.epoch).load(one)

    def _of(self, epoch: int) -> _ProducerSubtable:
        return self._once if epoch == ONE_BATCH_EPOCH else self._lasting


class _ProducerSubtable:
    """One of the two tables of `ProducerTable`."""

    def __init__(self, producers_max: int, queues_max: int) -> None:
        self._producers_max, self._queues_max = producers_max, queues_max
        self._producers: OrderedDict[int, _Producer] = OrderedDict()
        self._queues_count = self._snapshots = 0

    def __len__(self) -> int:
        return len(self._producers)

    def check(self, header: Header, queue: QueueKey) -> StoreReceipt | None:
        producer = self._producers.get(header.producer_id) if header.producer_id > 0 else None
        if producer is None:
            return None
        if header.producer_epoch < producer.epoch:
            raise ProducerFenced(
                f"epoch {header.producer_epoch} of producer {header.producer_id} is fenced: "
                f"epoch {producer.epoch} has written",
                facts={"epoch": header.producer_epoch, "current": producer.epoch},
            )
        batches = producer.queues.get(queue)
        if header.producer_epoch > producer.epoch or batches is None:
            return None
        expected = (batches[-1][0] + batches[-1][1]) % SEQUENCES
        if header.sequence == expected:
            return None
        if (header.sequence - expected) % SEQUENCES < SEQUENCES // 2:
            raise SequenceGap(
                f"expected sequence {expected} of producer {header.producer_id}, "
                f"got {header.sequence}",
                facts={"expected": expected, "actual": header.sequence},
            )
        for sequence, count, receipt in batches:
            if (sequence, count) == (header.sequence, header.count):
                return replace(receipt, duplicate=True)
        raise DuplicateSequence(
            f"sequence {header.sequence} of producer {header.producer_id} was stored already; "
            f"expected {expected}",
            facts={"sequence": header.sequence},
        )

    def record(self, header: Header, queue: QueueKey, receipt: StoreReceipt) -> None:
        if header.producer_id <= 0:
            return
        producer = self._producers.get(header.producer_id)
        if producer is None or producer.epoch < header.producer_epoch:
            self._forget(header.producer_id)
            producer = _Producer(header.producer_epoch, receipt.store_unix_ms, self._snapshots)
            self._producers[header.producer_id] = producer
        producer.used_unix_ms = receipt.store_unix_ms
        self._producers.move_to_end(header.producer_id)
        if producer.snapshots < self._snapshots:
            producer.queues, producer.snapshots = producer.queues.copy(), self._snapshots
        batches = producer.queues.get(queue, ())
        self._queues_count += not batches
        producer.queues[queue] = (
            *batches[1 - BATCHES_KEPT :], (header.sequence, header.count, receipt),
        )  # fmt: skip
        while len(self._producers) > 1 and (
            len(self._producers) > self._producers_max or self._queues_count > self._queues_max
        ):
            self._forget(next(iter(self._producers)))

    def expire(self, now_unix_ms: int) -> None:
        while self._producers:
            producer_id, producer = next(iter(self._producers.items()))
            if producer.used_unix_ms > now_unix_ms - IDLE_MS_MAX:
                break
            self._forget(producer_id)

    def snapshot(self) -> ProducerColumns:
        self._snapshots += 1
        producers = list(self._producers.values())
        return ProducerColumns(
            list(self._producers),
            [one.epoch for one in producers],
            [one.used_unix_ms for one in producers],
            [one.queues for one in producers],
        )

    def load(self, one: ProducerState) -> None:
        self._producers[one.producer_id] = _Producer(
            one.epoch, one.used_unix_ms, self._snapshots, one.queues.copy()
        )
        self._queues_count += len(one.queues)

    def _forget(self, producer_id: int) -> None:
        producer = self._producers.pop(producer_id, None)
        if producer is not None:
            self._queues_count -= len(producer.queues)
