"""The producer's books of one queue: what waits, what is on its way, under which sequence."""

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
    "Check that the storage service runs. It may have stored the message before it was lost."
)
ONE_BATCH_EPOCH = (1 << 32) - 1
"""Epoch of a producer that sends one batch in its life, whose id is the name of that batch."""


@dataclass(slots=True)
class Batch(Generic[Token]):
    """Messages of one queue that travel together.

    Attributes:
        token: What the shell attaches, to tell the senders of the outcome.
        begin_ms: Monotonic time of its beginning; the delivery timeout counts from there.
        encoded: The bytes once they are fixed: from the first try on.
        failures: Tries that failed.
        unsure: Whether one of them may have stored it.
    """

    token: Token
    begin_ms: int
    builder: BatchBuilder
    encoded: bytes = b""
    failures: int = 0
    unsure: bool = False


class QueueSender(Generic[Token]):
    """One queue's batches, in order, at most one of them in flight.

    Because of that a repeated batch can never be overtaken, and sequences have no gaps.

    Args:
        producer_id: Of this producer on this queue; not 0. Not shared by queues, because a new
            epoch on one queue ends the one before on all queues of the id.
    """

    def __init__(
        self,
        queue: QueueRef,
        producer_id: int,
        bytes_max: int,
        count_max: int,
        packing: RecordCompressor | None = None,
    ) -> None:
        self.queue = queue
        self._producer_id, self._bytes_max, self._count_max = producer_id, bytes_max, count_max
        self._packing = packing or RecordCompressor()
        self._epoch = 0
        self._sequence = 0
        self._waiting: deque[Batch[Token]] = deque()
        self.in_flight: Batch[Token] | None = None
        self.backing_off = False

    @property
    def ready(self) -> bool:
        """Whether a batch could be sent now."""
        return bool(self._waiting) and self.in_flight is None and not self.backing_off

    @property
    def failures(self) -> int:
        """Failed tries of the batch that is next."""
        return self._waiting[0].failures if self._waiting else 0

    @property
    def idle(self) -> bool:
        """Whether nothing waits or travels."""
        return self.last is None

    @property
    def last(self) -> Batch[Token] | None:
        """The batch behind which nothing waits or travels; None if nothing does."""
        return self._waiting[-1] if self._waiting else self.in_flight

    def open_batch(self, record_bytes: int) -> Batch[Token] | None:
        """The batch that takes another record of this size; None if a new one has to begin."""
        if not self._waiting:
            return None
        batch = self._waiting[-1]
        builder = batch.builder
        full = (
            builder.count >= self._count_max or builder.bytes_count + record_bytes > self._bytes_max
        )
        return None if full or batch.encoded else batch

    def begin_batch(self, token: Token, monotonic_ms: int) -> Batch[Token]:
        """A new batch behind the others."""
        batch = Batch(token, monotonic_ms, BatchBuilder(self._packing))
        self._waiting.append(batch)
        return batch

    def take(self, unix_ms: int) -> Batch[Token]:
        """Put the first waiting batch in flight; its bytes are fixed from then on."""
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
        """The batch in flight is stored."""
        batch = self._landed()
        self._sequence = (self._sequence + batch.builder.count) % SEQUENCE_LIMIT
        return batch

    def again(self, *, anew: bool = False) -> None:
        """The batch in flight is to be sent once more, unchanged and before all others.

        Nothing is ready until the caller has set `backing_off` to False.

        Args:
            anew: In a new epoch: it is not stored, and a batch before it is lost.
        """
        batch = self._landed()
        if anew:
            self._epoch, self._sequence = self._epoch + 1, 0
            batch.encoded, batch.unsure = b"", False
        batch.failures += 1
        self.backing_off = True
        self._waiting.appendleft(batch)

    def refused(self) -> Batch[Token]:
        """The batch in flight was refused for good; its sequence numbers go to the next.

        Not if an earlier try may have stored it: the next batch would pass for a repetition.
        """
        batch = self.in_flight
        return self.unknown() if batch is not None and batch.failures else self._landed()

    def unknown(self) -> Batch[Token]:
        """Nobody will ever know whether the batch in flight is stored.

        A new epoch begins, so that the next sequence neither leaves a gap nor looks repeated.
        """
        self._epoch += 1
        self._sequence = 0
        return self._landed()

    def expire(self, begin_ms_max: int) -> list[Batch[Token]]:
        """Forget the batches that were begun so early and never sent; the dropped ones."""
        return self.take_away(lambda one: one.begin_ms <= begin_ms_max and not one.encoded)

    def take_away(
        self, wanted: Callable[[Batch[Token]], bool], count_max: int = sys.maxsize
    ) -> list[Batch[Token]]:
        """Give up those waiting batches of which `wanted` is true; no try may have stored one."""
        kept: deque[Batch[Token]] = deque()
        taken: list[Batch[Token]] = []
        for batch in self._waiting:
            (taken if len(taken) < count_max and wanted(batch) else kept).append(batch)
        self._waiting = kept
        return taken

    def drop(self) -> list[Batch[Token]]:
        """Forget everything that waits or travels; the dropped batches."""
        dropped = [*([self.in_flight] if self.in_flight else []), *self._waiting]
        self.in_flight = None
        self._waiting.clear()
        return dropped

    def _landed(self) -> Batch[Token]:
        batch = self.in_flight
        assert batch is not None
        self.in_flight = None
        return batch


def maybe_stored(error: BatonError) -> BatonError:
    """What is told of a message that an earlier try may have stored, if the last one says no."""
    if isinstance(error, Unreachable):
        return Unreachable(error.message, remedy=MAYBE_STORED, facts=error.facts)
    return Unreachable(
        f"{error.message}; an earlier try may have stored the message",
        remedy="Look whether it is stored before you send it again: baton message get.",
        facts=error.facts,
    )
