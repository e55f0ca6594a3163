"""Lag and verdict of many groups at once."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from batonmq.admin.admin import Admin
from batonmq.admin.group_reports import QueueDiagnosis
from batonmq.errors import BatonError, GroupNotFound

_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class GroupLag:
    """Lag of a group on all its queues, and what to look at first.

    Attributes:
        queue_count: Number of queues of its subscription.
        stuck_count: Number of queues that are stuck.
        lag: Messages that are not handled yet; None if it is unknown for every queue.
        lag_ms: Age of the oldest of these messages; None if it is unknown for every queue.
        unknown_count: Number of queues of which the lag or its age is unknown.
        verdict: The reason of `Admin.why_stuck` for the stuck queue that has waited longest; if
            none is stuck MOVING, FILTERED or IDLE. The reason of the error if the group can't be
            diagnosed.
        message: The verdict as a sentence with its values.
        remedy: What to do; empty if nothing has to be done.
    """

    group: str
    queue_count: int
    stuck_count: int
    lag: int | None
    lag_ms: int | None
    unknown_count: int
    verdict: str
    message: str
    remedy: str

    @property
    def stuck(self) -> bool:
        """Whether the group needs attention."""
        return self.verdict not in _IN_ORDER


_IN_ORDER = ("MOVING", "FILTERED", "IDLE")
"""Verdicts that need no attention; the first one of a queue is that of its group."""


async def group_lags(admin: Admin, groups: Collection[str]) -> tuple[GroupLag, ...]:
    """Return the lag and the verdict of each group, in the order of `groups`.

    The nameserver diagnoses eight groups at a time. A group that is deleted meanwhile is left out.
    """
    room = asyncio.Semaphore(_AT_ONCE)

    async def diagnose(group: str) -> GroupLag | None:
        async with room:
            try:
                return summarize(group, await admin.why_stuck(group))
            except GroupNotFound:
                return None
            except BatonError as error:
                return GroupLag(
                    group, 0, 0, None, None, 0, error.reason, error.message, error.remedy
                )

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(diagnose(group)) for group in groups]
    return tuple(lag for task in running if (lag := task.result()) is not None)


def summarize(group: str, queues: Sequence[QueueDiagnosis]) -> GroupLag:
    """Return the lag and the verdict of one group from the diagnoses of its queues."""
    stuck = [queue for queue in queues if queue.stuck]
    lags = [queue.lag for queue in queues if queue.lag is not None]
    ages = [queue.lag_ms for queue in queues if queue.lag_ms is not None]
    first = max(stuck, key=_waited, default=None) or min(
        queues, key=lambda queue: _IN_ORDER.index(queue.reason), default=None
    )
    return GroupLag(
        group=group,
        queue_count=len(queues),
        stuck_count=len(stuck),
        lag=sum(lags) if lags or not queues else None,
        lag_ms=max(ages) if ages else None if queues else 0,
        unknown_count=sum(queue.lag is None or queue.lag_ms is None for queue in queues),
        verdict=first.reason if first else "IDLE",
        message=first.message if first else "the group has no queue",
        remedy=first.remedy if first else "",
    )


def _waited(queue: QueueDiagnosis) -> tuple[int, int]:
    """Return what a queue with a greater value has waited longer by; unknown is longest."""
    return (
        queue.lag_ms if queue.lag_ms is not None else 2**63,
        queue.lag if queue.lag is not None else 2**63,
    )
