"""The lease of a queue, as its owner counts it (protocol section 8)."""

from __future__ import annotations

DEADLINE_MARGIN_MS = 3_000
"""The own deadline is so long before the lease expires at the lock manager."""
DEFAULT_LEASE_MS = 30_000


class OwnerLease:
    """The owner's own deadline: behind it, the owner starts no message.

    The owner counts from the moment it sent a call, the lock manager from the moment it received
    it. So the own deadline always passes first. All times are of one monotonic clock.

    Attributes:
        lease_ms: Length of the lease, as the lock manager said last.
        deadline_ms: The own deadline; 0 before the first grant.
    """

    def __init__(self) -> None:
        self.lease_ms = DEFAULT_LEASE_MS
        self.deadline_ms = 0

    def begin(self, sent_ms: int, lease_ms: int) -> None:
        """Count from an Acquire that was granted; the deadline of an earlier grant is void."""
        self.deadline_ms = 0
        self.renew(sent_ms, lease_ms)

    def renew(self, sent_ms: int, lease_ms: int | None = None) -> None:
        """Extend the deadline by a call that was accepted under the token; never shorten it.

        Args:
            lease_ms: Length of the lease, if the answer says it.
        """
        if lease_ms is not None:
            self.lease_ms = lease_ms
        deadline_ms = sent_ms + self.lease_ms - DEADLINE_MARGIN_MS
        self.deadline_ms = max(self.deadline_ms, deadline_ms)

    def has_passed(self, now_ms: int) -> bool:
        """Whether the own deadline has passed."""
        return now_ms >= self.deadline_ms

    def is_near(self, now_ms: int) -> bool:
        """Whether the own deadline is at most half a lease away."""
        return now_ms + self.lease_ms // 2 >= self.deadline_ms
