"""Chooses the node of a replicated broker that a queue is pulled from.

Usually that is the leader. A follower serves consumers that lag far, and all consumers while there
is no leader. A follower that has no message may be cut off from its set, so its silence is checked
with a nameserver.
"""

from __future__ import annotations

CHECK_MS = 2_000
"""A follower may have nothing for a queue for this time; then the route is looked up again."""


class ReaderChoice:
    """The node that one queue is pulled from next.

    Attributes:
        node_id: Node id; empty for the leader.
    """

    def __init__(self) -> None:
        self.node_id = ""
        self._silent_since_ms: int | None = None

    def hold_ms(self, hold_ms: int) -> int:
        """Return how long the node may hold a pull: a follower not beyond the next check."""
        return min(hold_ms, CHECK_MS) if self.node_id else hold_ms

    def answered(self, next_node_id: str, now_ms: int, *, received: bool) -> bool:
        """Note the answer to a pull.

        Args:
            next_node_id: The node that the answer names.
            received: Whether the answer had messages.

        Returns:
            Whether followers have had nothing for CHECK_MS: call `checked` before the next pull.
        """
        self.node_id = next_node_id
        if received or not next_node_id:
            self._silent_since_ms = None
            return False
        if self._silent_since_ms is None:
            self._silent_since_ms = now_ms
        return now_ms - self._silent_since_ms >= CHECK_MS

    def checked(self, *, has_leader: bool) -> None:
        """Note that the route was looked up: a broker with a leader is pulled from the leader."""
        self._silent_since_ms = None
        if has_leader:
            self.node_id = ""

    def failed(self, next_node_id: str) -> None:
        """Note that the node did not answer, and use another one."""
        self._silent_since_ms = None
        self.node_id = next_node_id
