"""What offsets has recorded in advance, so that the next frames need no call (protocol 6.8).

A delivery that sends frame after frame asks offsets to record more than it has read: an advance.
Frames below its end leave without a call for a short time. When the delivery ends or is idle, the
advance is settled: offsets learns what was sent in it.
"""

from __future__ import annotations

from collections.abc import Callable

from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.delivery_recorder import AdvanceWish, RecordedDelivery, Settlement
from batonmq_server.storage.long_polls import QueueOwner

ADVANCE_MS = 1_000
"""An advance is used for so long after the request of its last record; offsets expects 2 s."""
OFFSETS_MIN = 16
"""Smallest advance beyond what was read."""


class DeliveryAdvance:
    """The advance of one delivery by stream.

    Args:
        new_id: Returns the random id of a new advance.
        on_begin: Called when an advance is asked for that must be settled later.

    Attributes:
        ended: Whether the delivery has ended: it sends nothing any more.
    """

    def __init__(
        self,
        owner: QueueOwner,
        new_id: Callable[[], int],
        on_begin: Callable[[DeliveryAdvance], None],
    ) -> None:
        self._owner, self._new_id, self._on_begin = owner, new_id, on_begin
        self.ended = False
        self._id = self._sent_offset = self._call_ms = self._call_offset = 0
        self._frame_ms: int | None = None
        self._record: RecordedDelivery | None = None
        self._key: QueueKey | None = None

    def covering(
        self, key: QueueKey, range_: tuple[int, int], seen: tuple[str, int], now_ms: int
    ) -> RecordedDelivery | None:
        """Return the record that permits to send a range without a call; None if a call is due.

        Args:
            seen: Offsets set that keeps the group, and its newest epoch.
        """
        record, (first_offset, next_offset) = self._record, range_
        if (
            record is None
            or next_offset > record.advance_to
            or now_ms - record.sent_ms > ADVANCE_MS
            or key != self._key
            or seen != (record.offsets_set, record.offsets_epoch)
        ):
            return None
        self._sent_offset, self._frame_ms = next_offset, now_ms
        return record.between(first_offset, next_offset)

    def wish(self, range_: tuple[int, int], now_ms: int) -> AdvanceWish:
        """Return the advance to ask for with the record of a range.

        It is for twice as many offsets as the delivery has passed per `ADVANCE_MS` since its last
        record. A delivery without a frame in the last `ADVANCE_MS` asks for none.
        """
        next_offset = range_[1]
        idle = self._frame_ms is None or now_ms - self._frame_ms > ADVANCE_MS
        passed, elapsed_ms = next_offset - self._call_offset, now_ms - self._call_ms
        self._frame_ms = self._call_ms = now_ms
        self._call_offset = next_offset
        if idle:
            return AdvanceWish(self._id)
        if not self._id:
            self._id = self._new_id()
            self._on_begin(self)
        expected = 2 * passed * ADVANCE_MS // max(1, elapsed_ms)
        return AdvanceWish(self._id, next_offset + max(OFFSETS_MIN, expected))

    def recorded(
        self, key: QueueKey, range_: tuple[int, int], record: RecordedDelivery, advance_id: int
    ) -> RecordedDelivery:
        """Note the record of a range that is sent now; return it without the rest.

        If the advance was settled while offsets was asked, nothing is sent in it any more.

        Args:
            advance_id: Id of the advance that the record asked for.
        """
        first_offset, next_offset = range_
        self._record, self._key = (record if advance_id == self._id != 0 else None), key
        self._sent_offset = next_offset
        return record.between(first_offset, next_offset)

    def is_due(self, now_ms: int) -> bool:
        """Return whether the advance must be settled: it is not used any more."""
        return self.ended or now_ms - self._call_ms > 2 * ADVANCE_MS

    def settle(self) -> Settlement:
        """End the advance, and return what was sent in it."""
        settlement = Settlement(self._owner, self._id, self._sent_offset)
        self._record, self._id = None, 0
        return settlement
