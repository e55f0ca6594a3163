"""When owners were told to give queues back, when they had, and what a hand-over is made of.

Only for those who watch: nothing is decided by it, and a new leader begins without.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from batonmq._core.queues import GroupQueue, Incarnation
from batonmq_server.lockmgr.core.decision import FenceCondition


class HandOverManner(Enum):
    """How a queue passed on; names as in the contract."""

    GRACEFUL = "GRACEFUL"
    UNFINISHED = "UNFINISHED"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    DRAIN_TIMED_OUT = "DRAIN_TIMED_OUT"
    FORCED = "FORCED"


class OwnershipEnd(NamedTuple):
    """The end of somebody's time as owner.

    Attributes:
        forced: Whether an operator made it.
        silent: Whether the owner did nothing for it.
    """

    owner: Incarnation
    token: int
    at_ms: int
    forced: bool = False
    silent: bool = False


class NextOwner(NamedTuple):
    """A queue is about to pass to its next owner.

    Attributes:
        since_ms: When the next owner was first refused; None if it never was.
        begin_ms: When its fence began.
    """

    to: Incarnation
    since_ms: int | None
    begin_ms: int


class HandOverTimes(NamedTuple):
    """What came before the fence.

    Attributes:
        contend_ms: From the first refusal of the new owner until the one before was told.
        drain_ms: Until that had given the queue back, or lost it.
        end_ms: When that was.
    """

    end: OwnershipEnd
    contend_ms: int
    drain_ms: int
    end_ms: int
    overdue: bool

    def manner(self, condition: FenceCondition, *, unfinished: bool) -> HandOverManner:
        """How it came about.

        Args:
            condition: Under which the fence passed.
            unfinished: Whether messages are not acked that somebody may have started.
        """
        if self.end.forced:
            return HandOverManner.FORCED
        if condition is FenceCondition.IDLE or self.end.silent:
            return HandOverManner.DRAIN_TIMED_OUT if self.overdue else HandOverManner.LEASE_EXPIRED
        return HandOverManner.UNFINISHED if unfinished else HandOverManner.GRACEFUL


@dataclass(slots=True)
class _OwnershipTimes:
    told_ms: int | None = None
    overdue: bool = False
    end: OwnershipEnd | None = None


class HandOverTimings:
    """The owners of one term of leadership; forgets a queue when it passes on."""

    def __init__(self) -> None:
        self._by_queue: dict[GroupQueue, _OwnershipTimes] = {}

    def told(self, key: GroupQueue, now_ms: int) -> None:
        """The owner is told that the queue is wanted; only the first time counts."""
        tenure = self._by_queue.setdefault(key, _OwnershipTimes())
        if tenure.told_ms is None:
            tenure.told_ms = now_ms

    def overdue(self, key: GroupQueue) -> None:
        """The owner lives, but is not renewed any more: it should have given the queue back."""
        self._by_queue.setdefault(key, _OwnershipTimes()).overdue = True

    def ended(self, key: GroupQueue, end: OwnershipEnd) -> None:
        """Nobody owns the queue any more."""
        self._by_queue.setdefault(key, _OwnershipTimes()).end = end

    def passed(
        self, key: GroupQueue, owner: OwnershipEnd | None, passed: NextOwner
    ) -> HandOverTimes | None:
        """The queue has a new owner; None if it is the one before, or that is not known.

        Args:
            owner: Who had it until the fence began; None if nobody did.
        """
        tenure = self._by_queue.pop(key, None) or _OwnershipTimes()
        end = owner or tenure.end
        if end is None or end.owner == passed.to:
            return None
        end_ms = min(end.at_ms, passed.begin_ms)
        if passed.since_ms is None:  # it was free when it was asked for
            return HandOverTimes(end, 0, 0, passed.begin_ms, tenure.overdue)
        since_ms = min(passed.since_ms, passed.begin_ms)
        end_ms = max(end_ms, since_ms)
        told_ms = since_ms if tenure.told_ms is None else tenure.told_ms
        told_ms = min(max(told_ms, since_ms), end_ms)
        return HandOverTimes(end, told_ms - since_ms, end_ms - told_ms, end_ms, tenure.overdue)
