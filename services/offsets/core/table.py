"""Progress of all queues, the term of the lock manager and the epoch of this replica set.

Pure: time comes in, and what must become durable before an answer leaves goes out as
`changed`. A caller may answer from a state only when that state is durable.
"""

from __future__ import annotations

from collections.abc import Iterator

from batonmq.common.errors import OldEpoch, UnknownQueue
from services.offsets.core.calls import (
    Acks,
    Committed,
    Delivered,
    Fence,
    Grant,
    Instant,
    Limits,
    QueueKey,
)
from services.offsets.core.progress import Progress
from services.offsets.core.ranges import RangeSet


class ProgressTable:
    """Keeps a `Progress` per queue.

    Args:
        epoch: Epoch of this replica set; one greater than in the life before.
        term: Highest announced term.
        now: Start of this life; counts as an access to every queue (protocol 12).
    """

    def __init__(self, limits: Limits, epoch: int, term: int, now: Instant) -> None:
        self.limits, self.epoch, self.term, self._start = limits, epoch, term, now
        self._queues: dict[QueueKey, Progress] = {}
        self._groups: dict[str, dict[QueueKey, Progress]] = {}
        self.ack_ranges: dict[QueueKey, int] = {}
        """Number of acked ranges, of the queues that have any."""

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, key: object) -> bool:
        return key in self._queues

    def restore(self, key: QueueKey, progress: Progress) -> None:
        """Take a queue over from the life before: D is what was reserved, ages begin anew."""
        progress.delivered_offset = progress.delivered_reserved
        progress.access_monotonic_ms = self._start.monotonic_ms
        self._put(key, progress)

    def check_epoch(self, seen_epoch: int) -> None:
        """Refuse a caller that has seen a newer life of this replica set.

        Raises:
            OldEpoch: it has.
        """
        if seen_epoch > self.epoch:
            raise OldEpoch(
                f"this replica has epoch {self.epoch}, the caller has seen {seen_epoch}",
                facts={"epoch": self.epoch, "current": seen_epoch},
            )

    def announce(self, term: int) -> bool:
        """Accept a leader; whether the term is new and must become durable.

        Raises:
            OldEpoch: a newer term has announced itself.
        """
        if term < self.term:
            raise OldEpoch(
                f"term {term} is over, the announced one is {self.term}",
                facts={"epoch": term, "current": self.term},
            )
        changed = term > self.term
        self.term = term
        return changed

    def fence(self, key: QueueKey, term: int, wish: Fence, now: Instant) -> Grant:
        """Pass a queue on; a queue without progress gets some if it may be.

        Raises:
            OldEpoch: `term` is not the announced one.
            Superseded, TokenMismatch, Unacked, NotHolder, NotIdle: see `Progress.fence`.
        """
        if term != self.term:
            raise OldEpoch(
                f"term {term} is not the announced one, {self.term}",
                facts={"epoch": term, "current": self.term},
            )
        progress = self._queues.get(key) or Progress(
            committed_offset=wish.initial_offset,
            delivered_offset=wish.initial_offset,
            delivered_reserved=wish.initial_offset,
            access_monotonic_ms=self._start.monotonic_ms,
        )
        grant = progress.fence(wish, now)
        if key not in self._queues:
            self._put(key, progress)
        return grant

    def record_delivered(
        self, key: QueueKey, token: int, delivery: tuple[int, int], now: Instant
    ) -> Delivered:
        """See `Progress.record_delivered`; UnknownQueue without progress."""
        return self.query(key).record_delivered(token, delivery, self.limits, now)

    def touch(self, key: QueueKey, token: int, now: Instant) -> None:
        """See `Progress.touch`; UnknownQueue without progress."""
        self.query(key).touch(token, now)

    def commit(self, key: QueueKey, token: int, acks: Acks, now: Instant) -> Committed:
        """See `Progress.commit`; UnknownQueue without progress."""
        progress = self.query(key)
        committed = progress.commit(token, acks, now)
        self._count_ranges(key, progress)
        return committed

    def close(
        self, key: QueueKey, token: int, acks: Acks, unfinished: RangeSet, now: Instant
    ) -> Committed:
        """See `Progress.close`; UnknownQueue without progress."""
        progress = self.query(key)
        committed = progress.close(token, acks, unfinished, now)
        self._count_ranges(key, progress)
        return committed

    def query(self, key: QueueKey) -> Progress:
        """The live progress of a queue, to be read before the caller next waits.

        Raises:
            UnknownQueue: it has none.
        """
        progress = self._queues.get(key)
        if progress is None:
            raise UnknownQueue(f"queue {key} has no progress", facts={"queue": str(key)})
        return progress

    def group(self, group: str) -> list[QueueKey]:
        """Queues of a group, ascending."""
        return sorted(self._groups.get(group, ()))

    def items(self) -> Iterator[tuple[QueueKey, Progress]]:
        """All queues."""
        return iter(self._queues.items())

    def _put(self, key: QueueKey, progress: Progress) -> None:
        self._queues[key] = progress
        self._groups.setdefault(key.group, {})[key] = progress
        self._count_ranges(key, progress)

    def _count_ranges(self, key: QueueKey, progress: Progress) -> None:
        if progress.acked:
            self.ack_ranges[key] = len(progress.acked.runs)
        else:
            self.ack_ranges.pop(key, None)
