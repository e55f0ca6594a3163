"""Whether a member has sent a heartbeat since its session broke, found from its lease.

Every heartbeat renews the lease. etcd reports the rest of a lease in whole seconds, rounded down.
So the lease is checked shortly before a full second since the break has passed: then a rest that is
one second shorter means that no heartbeat has arrived.
"""

from __future__ import annotations

from enum import Enum

MARGIN_MS = 100


class Silence(Enum):
    """Whether a member has been silent since its session broke."""

    SURE = "SURE"
    """No heartbeat has arrived since the break."""
    OVER = "OVER"
    """A heartbeat has arrived, or the lease has expired, or the member had used another replica
    before the break was noticed."""
    UNKNOWN = "UNKNOWN"
    """The check came at the wrong part of a second: check again."""


def next_check_ms(silent_ms: int, grace_ms: int) -> int:
    """Return the time from the break to the next check.

    The check comes after the grace period, shortly before a full second.

    Args:
        silent_ms: Time since the break.
    """
    seconds = max(-(-grace_ms // 1000), (silent_ms + MARGIN_MS) // 1000 + 1)
    return seconds * 1000 - MARGIN_MS


def silence_of(
    left_s: int, granted_s: int, heard_ms: int, before_ms: int, after_ms: int
) -> Silence:
    """Return what a check of the lease shows.

    A replica that was frozen or cut off may notice the break long after the member did. In the
    meantime the member uses another replica, so its last heartbeat is younger than the last one
    that this replica has received.

    Args:
        left_s: Rest of the lease in whole seconds; negative if it has expired.
        granted_s: Full length of the lease.
        heard_ms: Time from the last heartbeat at this replica to the request to etcd.
        before_ms: Time from the break to the request to etcd.
        after_ms: Time from the break to the answer of etcd.
    """
    if heard_ms > (granted_s - left_s) * 1000:
        return Silence.OVER
    if left_s < 0 or left_s * 1000 > granted_s * 1000 - before_ms:
        return Silence.OVER
    if left_s < granted_s - -(-after_ms // 1000):
        return Silence.SURE
    in_time = before_ms % 1000 >= 1000 - MARGIN_MS and before_ms // 1000 == after_ms // 1000
    return Silence.OVER if in_time else Silence.UNKNOWN
