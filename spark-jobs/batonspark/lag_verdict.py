"""What a run of lag samples says of a queue, in the terms of LinkedIn's Burrow. Pure.

No threshold on the lag decides: a group may be far behind and catching up. What decides is how
progress and lag moved over a window of samples.

Source: Burrow, "Consumer Lag Evaluation Rules". Deviations: a nameserver samples every queue, so
`stopped` is told from deliveries and not from missing commits; a queue that has nobody, or that
something keeps from moving, is told apart, since the nameserver knows why; messages that are acked
beyond the committed offset are no lag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class LagVerdict(StrEnum):
    """State of one queue of one group."""

    OK = "ok"
    SLOW = "slow"
    """Progress moves, and the lag grows or stays; or the oldest message is older than allowed."""
    STALLED = "stalled"
    """Messages are in hand and none is finished."""
    STOPPED = "stopped"
    """Messages wait and none is delivered."""
    REWOUND = "rewound"
    """Progress went back, and no operator moved it."""
    NO_MEMBER = "no_member"
    """Messages wait and the group has no member."""
    BLOCKED = "blocked"
    """Messages wait and something named keeps them."""


BY_REASON = {
    "NO_MEMBER": LagVerdict.NO_MEMBER,
    "HEAD_OF_LINE": LagVerdict.STALLED,
    "ACK_CAP": LagVerdict.STALLED,
    "NOT_PULLING": LagVerdict.STOPPED,
    "OWNER_SILENT": LagVerdict.STOPPED,
}
"""LagVerdict on a queue that does not move, by its StuckReason. Others block."""
NO_REASON = frozenset({"", "MOVING", "IDLE", "UNSPECIFIED"})
"""Reasons that do not say why a queue stands."""


@dataclass(frozen=True, slots=True)
class LagSample:
    """Where a group was in a queue.

    Attributes:
        lag: Messages that are not acked.
        oldest_unacked_ms: Age of the oldest of them; negative if not known.
    """

    unix_ms: int
    committed_offset: int
    delivered_offset: int
    lag: int
    oldest_unacked_ms: int


@dataclass(frozen=True, slots=True)
class LagLimits:
    """When a queue is no longer fine.

    Attributes:
        samples: Length of the window.
        lag_min: Less lag counts as none.
        age_ms_max: Oldest message older than this in the whole window is slow; 0 for no limit.
    """

    samples: int
    lag_min: int
    age_ms_max: int


def judge(samples: Sequence[LagSample], reason: str, limits: LagLimits) -> LagVerdict:
    """LagVerdict on a queue.

    Args:
        samples: Since the last time an operator moved the progress, oldest first.
        reason: Name of the StuckReason that was told last; empty if none was.
    """
    if any(late.committed_offset < early.committed_offset for early, late in pairwise(samples)):
        return LagVerdict.REWOUND
    window = samples[-limits.samples :]
    if len(window) < limits.samples or any(s.lag < max(1, limits.lag_min) for s in window):
        return LagVerdict.OK
    growing = all(late.lag >= early.lag for early, late in pairwise(window))
    if growing and window[0].committed_offset == window[-1].committed_offset:
        return _standing(window, reason)
    aged = limits.age_ms_max and all(s.oldest_unacked_ms > limits.age_ms_max for s in window)
    return LagVerdict.SLOW if growing or aged else LagVerdict.OK


def _standing(window: Sequence[LagSample], reason: str) -> LagVerdict:
    """LagVerdict on a queue whose progress did not move."""
    if reason not in NO_REASON:
        return BY_REASON.get(reason, LagVerdict.BLOCKED)
    last = window[-1]
    delivers = last.delivered_offset > window[0].delivered_offset
    in_hand = last.delivered_offset > last.committed_offset
    return LagVerdict.STALLED if delivers or in_hand else LagVerdict.STOPPED
