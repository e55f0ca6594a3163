"""The last batches of idempotent producers, so that a retry gets the first receipt again.

A batch contains the id and epoch of its producer, and the sequence of its first message: an
unsigned 32-bit number that counts messages per producer and queue, and wraps. The state is in
memory and derived from the log: recovery restores it from the checkpoint and the log after it.

An id belongs to one topic and one owner. The owner is a digest of the identity that sent the batch;
it is part of the batch's stamp in the log, and 0 without access control. The same id in another
topic or of another owner is another producer. So no identity can use up the sequences of another
one, or fence it. Only ids of messages that a group sends back or sets aside are shared by its
members: they identify the message. Other bytes under a stored sequence are an error.

An unknown producer, or one with a new epoch, may start at any sequence, because its earlier state
may have expired. A producer expires after 7 days without a batch. If there are more than 100,000
producers, the owner with the most loses one, in its topic with the most, the least recently used
there: the producers of one owner or topic do not push out those of another. Producers that send
only one batch are kept in a table of their own: there may be many, and they must not push out the
others. An id in one table is another producer than the same id in the other.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from batonmq._core.queue_sender import ONE_BATCH_EPOCH
from batonmq._core.records import Header
from batonmq._core.retries import group_of
from batonmq.errors import DuplicateSequence, ProducerFenced, SequenceGap

BATCHES_KEPT = 5
IDLE_MS_MAX = 7 * 24 * 3_600_000
PRODUCERS_MAX = 100_000
QUEUES_MAX = 400_000
SEQUENCES = 1 << 32

QueueKey = tuple[int, int]
"""Topic id and queue id."""
Share = tuple[int, int]
"""Owner and topic id: producers of different shares have nothing in common."""
Key = TypeVar("Key")


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


StoredBatch = tuple[int, int, StoreReceipt, int]
"""Sequence, count, receipt and producer's checksum of a stored batch; checksum 0: not known."""


class ProducerState(NamedTuple):
    """The state of a producer in a checkpoint, with its last batches by queue.

    A checkpoint of version 1 has no owner, and queues of several topics in one row.
    """

    producer_id: int
    epoch: int
    used_unix_ms: int
    queues: dict[QueueKey, tuple[StoredBatch, ...]]
    owner: int = 0


class ProducerColumns(NamedTuple):
    """Producers as columns: few objects, so a snapshot takes little time."""

    producer_ids: list[int]
    epochs: list[int]
    used_unix_ms: list[int]
    queues: list[dict[QueueKey, tuple[StoredBatch, ...]]]
    owners: list[int]

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
            ProducerFenced: a newer epoch of the producer has written to a queue of the topic.
            SequenceGap: messages before this batch are missing.
            DuplicateSequence: the sequence was stored, but its receipt is no longer known, or it
                was stored with other content.
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
        """Return all producers by owner and topic, the least recently used first within these.

        One table comes after the other. The snapshot is immutable.
        """
        lasting, once = self._lasting.snapshot(), self._once.snapshot()
        return ProducerColumns(
            lasting.producer_ids + once.producer_ids,
            lasting.epochs + once.epochs,
            lasting.used_unix_ms + once.used_unix_ms,
            lasting.queues + once.queues,
            lasting.owners + once.owners,
        )

    def load(self, producers: Iterable[ProducerState]) -> None:
        """Load what `snapshot` or `states_below` has returned, into empty tables."""
        for one in producers:
            table = self._of(one.epoch)
            for topic_id in dict.fromkeys(queue[0] for queue in one.queues):
                queues = {key: value for key, value in one.queues.items() if key[0] == topic_id}
                table.load((one.owner, topic_id), one._replace(queues=queues))

    def _of(self, epoch: int) -> _ProducerSubtable:
        return self._once if epoch == ONE_BATCH_EPOCH else self._lasting


class _Sizes(Generic[Key]):
    """Sizes by key; finds the key with the largest one in constant time."""

    def __init__(self) -> None:
        self._sizes: dict[Key, int] = {}
        self._keys: dict[int, dict[Key, None]] = {}
        self._largest = 0

    def add(self, key: Key, count: int) -> None:
        """Add `count`, which may be negative, to the size of `key`."""
        size = self._sizes.pop(key, 0)
        if size:
            same = self._keys[size]
            del same[key]
            if not same:
                del self._keys[size]
        size += count
        if size:
            self._sizes[key] = size
            self._keys.setdefault(size, {})[key] = None
            self._largest = max(self._largest, size)

    def largest(self) -> Key:
        """Return the key with the largest size; of equal ones that which has it for longest."""
        while self._largest not in self._keys:  # each step undoes an addition
            self._largest -= 1
        return next(iter(self._keys[self._largest]))


class _ProducerSubtable:
    """One of the two tables of `ProducerTable`."""

    def __init__(self, producers_max: int, queues_max: int) -> None:
        self._producers_max, self._queues_max = producers_max, queues_max
        self._shares: dict[Share, OrderedDict[int, _Producer]] = {}
        self._owners = _Sizes[int]()
        self._topics: dict[int, _Sizes[int]] = {}
        self._count = self._queues_count = self._snapshots = 0

    def __len__(self) -> int:
        return self._count

    def check(self, header: Header, queue: QueueKey) -> StoreReceipt | None:
        if header.producer_id <= 0:
            return None
        producer = self._find(header, queue)
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
        for sequence, count, receipt, checksum in batches:
            if sequence == header.sequence:
                _check_content(header, count, checksum)
                return replace(receipt, duplicate=True)
        raise DuplicateSequence(
            f"sequence {header.sequence} of producer {header.producer_id} was stored already; "
            f"expected {expected}",
            facts={"sequence": header.sequence, "expected": expected},
        )

    def record(self, header: Header, queue: QueueKey, receipt: StoreReceipt) -> None:
        if header.producer_id <= 0:
            return
        share, producer_id = _share(header, queue), header.producer_id
        producer = self._producer(share, producer_id)
        if producer is None or producer.epoch < header.producer_epoch:
            self._forget(share, producer_id)
            producer = _Producer(header.producer_epoch, receipt.store_unix_ms, self._snapshots)
            self._add(share, producer_id, producer)
        producer.used_unix_ms = receipt.store_unix_ms
        self._shares[share].move_to_end(producer_id)
        if producer.snapshots < self._snapshots:
            producer.queues, producer.snapshots = producer.queues.copy(), self._snapshots
        batches = producer.queues.get(queue, ())
        producer.queues[queue] = (
            *batches[1 - BATCHES_KEPT :],
            (header.sequence, header.count, receipt, header.checksum),
        )
        if not batches:
            self._resize(share, 1)
            self._evict()

    def expire(self, now_unix_ms: int) -> None:
        for share in list(self._shares):
            while producers := self._shares.get(share):
                producer_id, producer = next(iter(producers.items()))
                if producer.used_unix_ms > now_unix_ms - IDLE_MS_MAX:
                    break
                self._forget(share, producer_id)

    def snapshot(self) -> ProducerColumns:
        self._snapshots += 1
        producers = [one for share in self._shares.values() for one in share.values()]
        return ProducerColumns(
            [producer_id for share in self._shares.values() for producer_id in share],
            [one.epoch for one in producers],
            [one.used_unix_ms for one in producers],
            [one.queues for one in producers],
            [owner for (owner, _), share in self._shares.items() for _ in share],
        )

    def load(self, share: Share, one: ProducerState) -> None:
        producer = _Producer(one.epoch, one.used_unix_ms, self._snapshots, one.queues.copy())
        self._add(share, one.producer_id, producer)
        self._resize(share, len(one.queues))
        self._evict()

    def _find(self, header: Header, queue: QueueKey) -> _Producer | None:
        """Return the producer of a batch; one from before access control has no owner.

        It has that state until the producer has written to the same queue since.
        """
        owner, topic_id = _share(header, queue)
        own = self._producer((owner, topic_id), header.producer_id)
        before = self._producer((0, topic_id), header.producer_id) if owner else None
        if own is None or before is None:
            return own or before
        goes_on = own.epoch == before.epoch and queue not in own.queues
        return before if goes_on else own

    def _producer(self, share: Share, producer_id: int) -> _Producer | None:
        producers = self._shares.get(share)
        return producers.get(producer_id) if producers is not None else None

    def _add(self, share: Share, producer_id: int, producer: _Producer) -> None:
        self._shares.setdefault(share, OrderedDict())[producer_id] = producer
        self._count += 1

    def _forget(self, share: Share, producer_id: int) -> None:
        producers = self._shares.get(share)
        producer = producers.pop(producer_id, None) if producers is not None else None
        if producer is None:
            return
        self._count -= 1
        self._resize(share, -len(producer.queues))
        if not producers:
            del self._shares[share]

    def _resize(self, share: Share, count: int) -> None:
        """Count `count` more pairs of producer and queue in a share."""
        owner, topic_id = share
        self._queues_count += count
        self._owners.add(owner, count)
        self._topics.setdefault(owner, _Sizes()).add(topic_id, count)

    def _evict(self) -> None:
        """Remove producers of the largest shares until both bounds are kept."""
        while self._count > 1 and (
            self._count > self._producers_max or self._queues_count > self._queues_max
        ):
            owner = self._owners.largest()
            share = owner, self._topics[owner].largest()
            self._forget(share, next(iter(self._shares[share])))


def states_below(columns: ProducerColumns, position: int, queues_max: int) -> list[ProducerState]:
    """Return the state from batches below `position` only, in the order of `columns`.

    It may take a second; another thread may call it.

    Args:
        queues_max: Maximum number of pairs of producer and queue in each of the two tables; the
            others are left out by the rule of the module.
    """
    lasting: list[ProducerState] = []
    once: list[ProducerState] = []
    for one in map(ProducerState._make, zip(*columns, strict=True)):
        queues = {
            queue: old
            for queue, batches in one.queues.items()
            if (old := tuple(b for b in batches if b[2].position < position))
        }
        if queues:
            table = once if one.epoch == ONE_BATCH_EPOCH else lasting
            table.append(one._replace(queues=queues))
    return _without_excess(lasting, queues_max) + _without_excess(once, queues_max)


def _without_excess(states: list[ProducerState], queues_max: int) -> list[ProducerState]:
    """Remove producers of the largest shares until `queues_max` pairs are left at most."""
    count = sum(len(one.queues) for one in states)
    if count <= queues_max:
        return states
    shares: dict[Share, deque[ProducerState]] = {}
    for one in states:
        share = one.owner, next(iter(one.queues))[0]
        shares.setdefault(share, deque()).append(one)
    owners, topics = _Sizes[int](), dict[int, _Sizes[int]]()
    for (owner, topic_id), members in shares.items():
        size = sum(len(one.queues) for one in members)
        owners.add(owner, size)
        topics.setdefault(owner, _Sizes()).add(topic_id, size)
    while count > queues_max:
        owner = owners.largest()
        topic_id = topics[owner].largest()
        removed = len(shares[owner, topic_id].popleft().queues)
        owners.add(owner, -removed)
        topics[owner].add(topic_id, -removed)
        count -= removed
    return [one for members in shares.values() for one in members]


def _share(header: Header, queue: QueueKey) -> Share:
    """Return the share of a producer; members of a group share ids of its own topics."""
    shared = header.producer_epoch == ONE_BATCH_EPOCH and group_of(header.topic)
    return 0 if shared else header.owner, queue[0]


def _check_content(header: Header, count: int, checksum: int) -> None:
    """Raise DuplicateSequence unless a batch is the stored one with its sequence.

    Copies of a message under its own id may differ, for example in the member that sends it back.
    """
    same_bytes = header.producer_epoch == ONE_BATCH_EPOCH or checksum in (0, header.checksum)
    if header.count != count or not same_bytes:
        raise DuplicateSequence(
            f"sequence {header.sequence} of producer {header.producer_id} was stored with other "
            "content",
            remedy="These messages are not stored: send them with another producer. Another "
            "program may use the same producer id.",
            facts={"sequence": header.sequence, "content": "other"},
        )
