"""Whether a member has been silent since its session broke, by the lease its heartbeats renew.

etcd tells how much of a lease is left in whole seconds, rounded down. So it is asked just before
a second since the break is full: then one second less means that no heartbeat has come.
"""

from __future__ import annotations

from enum import Enum

MARGIN_MS = 100


class Silence(Enum):
    """What the lease tells."""

    SURE = "SURE"
    """No heartbeat has come since the break."""
    OVER = "OVER"
    """One has come, or the lease has ended, or the member had turned elsewhere before."""
    UNKNOWN = "UNKNOWN"
    """The look came at the wrong part of a second."""


def next_look_ms(silent_ms: int, grace_ms: int) -> int:
    """Time from the break to the next look: after the grace, just before a full second."""
    seconds = max(-(-grace_ms // 1000), (silent_ms + MARGIN_MS) // 1000 + 1)
    return seconds * 1000 - MARGIN_MS


def silence_of(
    left_s: int, granted_s: int, heard_ms: int, before_ms: int, after_ms: int
) -> Silence:
    """What a look at the lease says.

    A replica that was frozen, or cut off, may notice a break long after the member did. That one
    has gone on elsewhere then: its last heartbeat is younger than the last that came here.

    Args:
        left_s: Whole seconds that are left; negative if the lease has ended.
        granted_s: Its full length.
        heard_ms: Time since the member was heard of at this replica, when etcd was asked.
        before_ms: Time since the break when etcd was asked.
        after_ms: The same when it had answered.
    """
    if heard_ms > (granted_s - left_s) * 1000:
        return Silence.OVER
    if left_s < 0 or left_s * 1000 > granted_s * 1000 - before_ms:
        return Silence.OVER
    if left_s < granted_s - -(-after_ms // 1000):
        return Silence.SURE
    in_time = before_ms % 1000 >= 1000 - MARGIN_MS and before_ms // 1000 == after_ms // 1000
    return Silence.OVER if in_time else Silence.UNKNOWN
