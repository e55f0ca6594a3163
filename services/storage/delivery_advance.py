"""What offsets has recorded in advance, so that the next frames need no call (protocol 6.8).

A delivery that sends frame after frame asks offsets to record more than it has read: an advance.
Frames below its end leave without a call for a short time. When the delivery ends or falls idle,
the advance is settled: offsets learns what was sent in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.common.v1 import queue_pb2
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.long_polls import QueueOwner

ADVANCE_MS = 1_000
"""An advance is used for so long after its record was requested; offsets counts on 2 s at most."""
OFFSETS_MIN = 16
"""Smallest advance: more than this is recorded only for what was read."""


@dataclass(frozen=True, slots=True)
class RecordedDelivery:
    """A delivery that offsets has recorded.

    Attributes:
        redelivered: Offsets that an earlier owner may have started.
        offsets_epoch: Epoch of `offsets_set` that recorded it.
        sent_ms: Monotonic time at which the request was sent.
        offsets_set: Name of the offsets set.
        advance: Number of the advance; 0 for none.
        advance_to: End of the advance.
    """

    redelivered: Sequence[queue_pb2.OffsetRange]
    offsets_epoch: int
    sent_ms: int
    offsets_set: str = ""
    advance: int = 0
    advance_to: int = 0

    def between(self, first_offset: int, next_offset: int) -> RecordedDelivery:
        """Return the record with the redelivered offsets of a range only."""
        if not self.redelivered:
            return self
        ranges = (
            queue_pb2.OffsetRange(
                first_offset=max(each.first_offset, first_offset),
                next_offset=min(each.next_offset, next_offset),
            )
            for each in self.redelivered
        )
        return replace(self, redelivered=[r for r in ranges if r.first_offset < r.next_offset])


@dataclass(frozen=True, slots=True)
class Settlement:
    """What was sent in an advance that has ended."""

    owner: QueueOwner
    advance: int
    sent_offset: int
    offsets_set: str


class DeliveryAdvance:
    """The advance of one delivery.

    Args:
        on_request: Called when an advance is asked for.

    Attributes:
        number: Its number, to be named with the next record; 0 for none.
        covered: Whether the last range needed no call.
        ended: The delivery has ended.
    """

    def __init__(
        self, owner: QueueOwner, on_request: Callable[[DeliveryAdvance], None] = lambda _: None
    ) -> None:
        self._owner, self._on_request = owner, on_request
        self._record: RecordedDelivery | None = None
        self._key: QueueKey | None = None
        self._calling = self.covered = self.ended = False
        self.number = self._sent_offset = self._rate_offset = 0
        self._rate_ms: int | None = None

    def covering(
        self, key: QueueKey, range_: tuple[int, int], epoch: tuple[str, int], now_ms: int
    ) -> RecordedDelivery | None:
        """Return the record that permits to send a range without a call; None if a call is due.

        Args:
            epoch: Offsets set that keeps the group, and its newest epoch.
        """
        record, (first_offset, next_offset) = self._record, range_
        if (
            record is None
            or next_offset > record.advance_to
            or now_ms - record.sent_ms > ADVANCE_MS
            or key != self._key
            or epoch != (record.offsets_set, record.offsets_epoch)
        ):
            return None
        self._sent_offset = next_offset
        self.covered = True
        return record.between(first_offset, next_offset)

    def begin_call(self, key: QueueKey, range_: tuple[int, int], now_ms: int) -> int:
        """Note that a range is being recorded; return the offset to be recorded to in advance."""
        self._key, self._calling, self.covered = key, True, False
        next_offset = range_[1]
        before_ms, self._rate_ms = self._rate_ms, now_ms
        passed, self._rate_offset = next_offset - self._rate_offset, next_offset
        if before_ms is None or (elapsed_ms := now_ms - before_ms) > ADVANCE_MS:
            return 0
        self._on_request(self)
        expected = 2 * passed * ADVANCE_MS // max(elapsed_ms, 1)
        return next_offset + max(OFFSETS_MIN, expected)

    def answered(self, record: RecordedDelivery | None, next_offset: int = 0) -> None:
        """Note the answer of offsets to a record that ends at `next_offset`; None for none."""
        self._calling = False
        if record is not None:
            self._record, self.number = record, record.advance
            self._sent_offset = next_offset

    @property
    def idle(self) -> bool:
        """Whether there is no advance, and none is asked for."""
        return not self.number and not self._calling

    def is_due(self, now_ms: int) -> bool:
        """Return whether the advance is to be settled: it was not used, or extended, for long."""
        if not self.number or self._calling or self._record is None:
            return False
        return self.ended or now_ms - self._record.sent_ms > 2 * ADVANCE_MS

    def settle(self) -> Settlement:
        """End the advance, and return what was sent in it."""
        assert self._record is not None
        settlement = Settlement(
            self._owner, self.number, self._sent_offset, self._record.offsets_set
        )
        self._record, self.number = None, 0
        return settlement
