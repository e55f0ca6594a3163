"""Batches of a producer for one queue: waiting or in flight, with their sequence numbers."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from batonmq._core.compression import RecordCompressor
from batonmq._core.queues import QueueRef
from batonmq._core.records import BatchBuilder
from batonmq.errors import BatonError, Unreachable

Token = TypeVar("Token")

SEQUENCE_LIMIT = 1 << 32
MAYBE_STORED = (
    "Check that the storage service runs. It may have stored the message before it failed."
)
ONE_BATCH_EPOCH = (1 << 32) - 1
"""Epoch of a producer id that is used for one batch only."""


@dataclass(slots=True)
class Batch(Generic[Token]):
    """Messages of one queue that are sent together.

    Attributes:
        token: Object that the caller attaches, to report the outcome to the senders.
        begin_ms: Monotonic time of the start of the batch; the delivery timeout counts from it.
        encoded: The bytes; fixed by the first attempt, empty before.
        failures: Number of failed attempts.
        unsure: Whether a failed attempt may have stored the batch.
        topic_epoch: Epoch of the topic that attempts have named; see `epoch_to_name`.
    """

    token: Token
    begin_ms: int
    builder: BatchBuilder
    encoded: bytes = b""
    failures: int = 0
    unsure: bool = False
    topic_epoch: int | None = None


class QueueSender(Generic[Token]):
    """The batches of one queue, in order, at most one of them in flight.

    With one batch in flight, no batch overtakes a repeated one, and sequence numbers have no gaps.

    Args:
        producer_id: Producer id for this queue only, not 0. A new epoch on one queue would end the
            previous epoch on all queues of the id.
    """

    def __init__(
        self,
        queue: QueueRef,
        producer_id: int,
        bytes_max: int,
        count_max: int,
        compressor: RecordCompressor | None = None,
    ) -> None:
        self.queue = queue
        self._producer_id, self._bytes_max, self._count_max = producer_id, bytes_max, count_max
        self._compressor = compressor or RecordCompressor()
        self._epoch = 0
        self._sequence = 0
        self._waiting: deque[Batch[Token]] = deque()
        self.in_flight: Batch[Token] | None = None
        self.backing_off = False

    @property
    def ready(self) -> bool:
        """Whether a batch can be sent now."""
        return bool(self._waiting) and self.in_flight is None and not self.backing_off

    @property
    def next_bytes(self) -> int:
        """Bytes of the records in the next batch."""
        return self._waiting[0].builder.bytes_count if self._waiting else 0

    @property
    def failures(self) -> int:
        """Number of failed attempts of the next batch."""
        return self._waiting[0].failures if self._waiting else 0

    @property
    def batches(self) -> list[Batch[Token]]:
        """All batches, in order: in flight, or waiting."""
        return [*([self.in_flight] if self.in_flight else []), *self._waiting]

    @property
    def last(self) -> Batch[Token] | None:
        """The last batch that waits or is in flight; None if there is none."""
        return self._waiting[-1] if self._waiting else self.in_flight

    def open_batch(self, record_bytes: int, count: int = 1) -> Batch[Token] | None:
        """Return the batch with room for records of this size; None if a new one is needed."""
        if not self._waiting:
            return None
        batch = self._waiting[-1]
        builder = batch.builder
        full = (
            builder.count + count > self._count_max
            or builder.bytes_count + record_bytes > self._bytes_max
        )
        return None if full or batch.encoded else batch

    def begin_batch(self, token: Token, monotonic_ms: int) -> Batch[Token]:
        """Append a new batch, and return it."""
        batch = Batch(token, monotonic_ms, BatchBuilder(self._compressor))
        self._waiting.append(batch)
        return batch

    def take(self, unix_ms: int) -> Batch[Token]:
        """Put the first waiting batch in flight, and return it; its bytes are fixed."""
        assert self.ready
        batch = self.in_flight = self._waiting.popleft()
        if not batch.encoded:
            batch.encoded = batch.builder.encode(
                topic=self.queue.topic,
                queue_id=self.queue.queue_id,
                producer=(self._producer_id, self._epoch),
                sequence=self._sequence,
                born_unix_ms=unix_ms,
            )
        return batch

    def stored(self) -> Batch[Token]:
        """Record that the batch in flight is stored, and return it."""
        batch = self._take_in_flight()
        self._sequence = (self._sequence + batch.builder.count) % SEQUENCE_LIMIT
        return batch

    def retry(self, *, new_epoch: bool = False) -> None:
        """Return the batch in flight to the front of the queue, to be sent again.

        No batch is ready until the caller sets `backing_off` to False.

        Args:
            new_epoch: Send it in a new epoch: it is not stored, and an earlier batch is lost.
        """
        batch = self._take_in_flight()
        if new_epoch:
            self._epoch, self._sequence = self._epoch + 1, 0
            batch.encoded, batch.unsure = b"", False
        batch.failures += 1
        self.backing_off = True
        self._waiting.appendleft(batch)

    def rejected(self) -> Batch[Token]:
        """Record that the batch in flight was rejected for good, and return it.

        The next batch reuses its sequence numbers, unless an earlier attempt may have stored the
        batch: storage would then take the next one for a repetition.
        """
        batch = self.in_flight
        return self.unknown() if batch is not None and batch.failures else self._take_in_flight()

    def unknown(self) -> Batch[Token]:
        """Record that it is unknown whether the batch in flight is stored, and return it.

        A new epoch begins, so that the next sequence number is neither a gap nor a repetition.
        """
        self._epoch += 1
        self._sequence = 0
        return self._take_in_flight()

    def expire(self, begin_ms_max: int) -> list[Batch[Token]]:
        """Remove and return batches started at or before `begin_ms_max` that were never sent."""
        return self.take_away(lambda one: one.begin_ms <= begin_ms_max and not one.encoded)

    def take_away(
        self, wanted: Callable[[Batch[Token]], bool], count_max: int = sys.maxsize
    ) -> list[Batch[Token]]:
        """Remove and return the waiting batches for which `wanted` is true.

        No attempt may have stored one of them.
        """
        kept: deque[Batch[Token]] = deque()
        taken: list[Batch[Token]] = []
        for batch in self._waiting:
            (taken if len(taken) < count_max and wanted(batch) else kept).append(batch)
        self._waiting = kept
        return taken

    def drop(self) -> list[Batch[Token]]:
        """Remove and return all batches, waiting or in flight."""
        dropped = self.batches
        self.in_flight = None
        self._waiting.clear()
        return dropped

    def _take_in_flight(self) -> Batch[Token]:
        batch = self.in_flight
        assert batch is not None
        self.in_flight = None
        return batch


def maybe_stored(error: BatonError) -> BatonError:
    """Return the error for a message that an earlier attempt may have stored."""
    if isinstance(error, Unreachable):
        return Unreachable(error.message, remedy=MAYBE_STORED, facts=error.facts)
    return Unreachable(
        f"{error.message}; an earlier attempt may have stored the message",
        remedy="Check whether it is stored before you send it again: baton message get.",
        facts=error.facts,
    )
