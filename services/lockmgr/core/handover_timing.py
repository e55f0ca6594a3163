"""The phases of hand-overs, for metrics and events.

Records when owners were notified that a queue is wanted, and when their ownership ended. No
decision depends on it, and a new leader begins without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq_server.lockmgr.core.decision import FenceCondition


class HandOverManner(Enum):
    """How the previous owner lost the queue; names as in the contract."""

    GRACEFUL = "GRACEFUL"
    UNFINISHED = "UNFINISHED"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    DRAIN_TIMED_OUT = "DRAIN_TIMED_OUT"
    FORCED = "FORCED"


class OwnershipEnd(NamedTuple):
    """The end of an ownership.

    Attributes:
        forced: Whether an operator forced it.
        silent: Whether it came without a call of the owner.
    """

    owner: Incarnation
    token: int
    at_ms: int
    forced: bool = False
    silent: bool = False


class NextOwner(NamedTuple):
    """The incarnation that a queue is granted to.

    Attributes:
        since_ms: When it was first refused the queue; None if it never was.
        begin_ms: When its fence began.
    """

    to: Incarnation
    since_ms: int | None
    begin_ms: int


class HandOverTimes(NamedTuple):
    """The phases of a hand-over before its fence.

    Attributes:
        end: The end of the previous ownership.
        contend_ms: From the first refusal of the new owner until the previous one was notified.
        drain_ms: From then until the previous owner released the queue, or lost it.
        end_ms: When that was.
        overdue: Whether the previous owner was alive, but not renewed any more.
    """

    end: OwnershipEnd
    contend_ms: int
    drain_ms: int
    end_ms: int
    overdue: bool

    def manner(self, condition: FenceCondition, *, unfinished: bool) -> HandOverManner:
        """Return how the previous owner lost the queue.

        Args:
            condition: The condition under which the fence passed.
            unfinished: Whether messages that may have been started are not acknowledged.
        """
        if self.end.forced:
            return HandOverManner.FORCED
        if condition is FenceCondition.IDLE or self.end.silent:
            return HandOverManner.DRAIN_TIMED_OUT if self.overdue else HandOverManner.LEASE_EXPIRED
        return HandOverManner.UNFINISHED if unfinished else HandOverManner.GRACEFUL


@dataclass(slots=True)
class _OwnershipTimes:
    notified_ms: int | None = None
    overdue: bool = False
    end: OwnershipEnd | None = None


class HandOverTimings:
    """The times of ownerships in one term; those of a queue are dropped when it is granted."""

    def __init__(self) -> None:
        self._by_queue: dict[GroupQueue, _OwnershipTimes] = {}

    def owner_notified(self, key: GroupQueue, now_ms: int) -> None:
        """Note that the owner was told to release the queue; only the first time counts."""
        times = self._times(key)
        if times.notified_ms is None:
            times.notified_ms = now_ms

    def owner_overdue(self, key: GroupQueue) -> None:
        """Note that a live owner is not renewed any more, since it had to release the queue."""
        self._times(key).overdue = True

    def ownership_ended(self, key: GroupQueue, end: OwnershipEnd) -> None:
        """Note that the queue has no owner any more."""
        self._times(key).end = end

    def queue_granted(
        self, key: GroupQueue, replaced: OwnershipEnd | None, next_owner: NextOwner
    ) -> HandOverTimes | None:
        """Return the times of the hand-over; None without a previous owner, or if it is the same.

        Args:
            replaced: The ownership that the fence has ended; None if the queue was free.
        """
        times = self._by_queue.pop(key, None) or _OwnershipTimes()
        end = replaced or times.end
        if end is None or end.owner.matches(next_owner.to):
            return None
        begin_ms = next_owner.begin_ms
        if next_owner.since_ms is None:  # it was free when it was requested
            return HandOverTimes(end, 0, 0, begin_ms, times.overdue)
        since_ms = min(next_owner.since_ms, begin_ms)
        end_ms = max(min(end.at_ms, begin_ms), since_ms)
        notified_ms = since_ms if times.notified_ms is None else times.notified_ms
        notified_ms = min(max(notified_ms, since_ms), end_ms)
        contend_ms, drain_ms = notified_ms - since_ms, end_ms - notified_ms
        return HandOverTimes(end, contend_ms, drain_ms, end_ms, times.overdue)

    def _times(self, key: GroupQueue) -> _OwnershipTimes:
        return self._by_queue.setdefault(key, _OwnershipTimes())
