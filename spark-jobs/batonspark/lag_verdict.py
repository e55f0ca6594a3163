"""Verdict on a queue from its lag samples, in the terms of LinkedIn's Burrow. Pure.

There is no threshold on the lag: a group may be far behind and catching up. The verdict depends on
how progress and lag changed over a window of samples.

Source: Burrow, "Consumer Lag Evaluation Rules". Deviations: a nameserver samples every queue, so
`stopped` follows from deliveries and not from missing commits; a queue without a member, or one
that is blocked, has a verdict of its own, since the nameserver knows the reason; messages that are
acked beyond the committed offset are not lag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class LagVerdict(StrEnum):
    """Verdict on one queue of one group."""

    OK = "ok"
    SLOW = "slow"
    """Progress advances but the lag does not shrink, or the oldest message is too old."""
    STALLED = "stalled"
    """Messages are in flight and none is acknowledged."""
    STOPPED = "stopped"
    """Messages wait and none is delivered."""
    REWOUND = "rewound"
    """Committed progress went back without a reset by an operator."""
    NO_MEMBER = "no_member"
    """Messages wait and the group has no member."""
    BLOCKED = "blocked"
    """Messages wait, and the stuck reason says what blocks them."""


BY_REASON = {
    "NO_MEMBER": LagVerdict.NO_MEMBER,
    "HEAD_OF_LINE": LagVerdict.STALLED,
    "ACK_CAP": LagVerdict.STALLED,
    "OUTPUTS_REFUSED": LagVerdict.STALLED,
    "NOT_PULLING": LagVerdict.STOPPED,
    "OUTDATED_NODE": LagVerdict.STOPPED,
    "OWNER_SILENT": LagVerdict.STOPPED,
}
"""Verdict on a queue without progress, by its StuckReason; BLOCKED for any other reason."""
NO_REASON = frozenset({"", "MOVING", "IDLE", "UNSPECIFIED"})
"""Names of StuckReason that do not explain why a queue makes no progress."""


@dataclass(frozen=True, slots=True)
class LagSample:
    """Progress of a group in a queue at one time.

    Attributes:
        lag: Unacknowledged messages.
        oldest_unacked_ms: Age of the oldest of them; negative if unknown.
    """

    unix_ms: int
    committed_offset: int
    delivered_offset: int
    lag: int
    oldest_unacked_ms: int


@dataclass(frozen=True, slots=True)
class LagLimits:
    """Limits of the verdict `ok`.

    Attributes:
        samples: Length of the window in samples.
        lag_min: Lag below this many messages counts as none.
        age_ms_max: The queue is slow if the oldest message is older than this in every sample of
            the window; 0 for no limit.
    """

    samples: int
    lag_min: int
    age_ms_max: int


def judge(samples: Sequence[LagSample], reason: str, limits: LagLimits) -> LagVerdict:
    """Return the verdict on a queue.

    Args:
        samples: Samples since the last reset of the progress, oldest first.
        reason: Name of the last StuckReason; empty if there is none.
    """
    if any(late.committed_offset < early.committed_offset for early, late in pairwise(samples)):
        return LagVerdict.REWOUND
    window = samples[-limits.samples :]
    if len(window) < limits.samples or any(s.lag < max(1, limits.lag_min) for s in window):
        return LagVerdict.OK
    growing = all(late.lag >= early.lag for early, late in pairwise(window))
    if growing and window[0].committed_offset == window[-1].committed_offset:
        return _without_progress(window, reason)
    aged = limits.age_ms_max and all(s.oldest_unacked_ms > limits.age_ms_max for s in window)
    return LagVerdict.SLOW if growing or aged else LagVerdict.OK


def _without_progress(window: Sequence[LagSample], reason: str) -> LagVerdict:
    """Return the verdict on a queue without progress."""
    if reason not in NO_REASON:
        return BY_REASON.get(reason, LagVerdict.BLOCKED)
    last = window[-1]
    delivers = last.delivered_offset > window[0].delivered_offset
    in_flight = last.delivered_offset > last.committed_offset
    return LagVerdict.STALLED if delivers or in_flight else LagVerdict.STOPPED
