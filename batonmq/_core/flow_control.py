"""Flow control: the limits on messages that wait in the client, and which one stops a pull."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FlowReason = Literal["count", "bytes", "span", "paused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowLimits:
    """The limits of one queue; see `ConsumerSettings`."""

    messages_max: int
    span_max: int


class ByteBudget:
    """Bytes of messages that wait for a handler, of all queues of one client.

    At the limit, a queue without waiting messages may still fetch its share: a handler that hangs
    must not stop the other queues. So at most the limit and one share per queue wait, and as much
    again may be in flight when all queues are fetched at once.

    Attributes:
        total: Bytes that wait.
        queue_count: Queues that are read.
        waiting_count: Queues with messages that wait.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.total = self.queue_count = self.waiting_count = 0

    def share(self) -> int:
        """Return the bytes that one queue may fetch at once, at least 1."""
        return max(1, self.bytes_max // max(1, self.queue_count))


class QueueBytes:
    """The bytes of one queue in a budget, between `join` and `leave`."""

    __slots__ = ("_budget", "_joined", "waiting")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget, self._joined, self.waiting = budget, False, 0

    def join(self) -> None:
        """Count the queue: it is read from now on."""
        self._budget.queue_count += not self._joined
        self._joined = True

    def leave(self) -> None:
        """Do not count the queue any more, nor its waiting bytes."""
        self.remove(self.waiting)
        self._budget.queue_count -= self._joined
        self._joined = False

    def add(self, count: int) -> None:
        """Count bytes that arrived."""
        self._budget.waiting_count += self.waiting == 0 < count
        self.waiting += count
        self._budget.total += count

    def remove(self, count: int) -> bool:
        """Count bytes that do not wait any more; True if queues that wait for room may go on."""
        budget = self._budget
        before, budget.total = budget.total, budget.total - count
        self.waiting -= count
        budget.waiting_count -= self.waiting == 0 < count
        return 2 * budget.total <= budget.bytes_max < 2 * before

    @property
    def blocked(self) -> bool:
        """Whether the queue has to wait for room in the budget."""
        return self.waiting > 0 and self._budget.total >= self._budget.bytes_max


def blocking_limit(
    limits: FlowLimits,
    part: QueueBytes,
    *,
    waiting_count: int,
    span: int = 0,
    handled_ahead: bool = False,
) -> FlowReason | None:
    """Return the limit that a queue has reached; None if it may be pulled.

    Args:
        waiting_count: Messages of the queue that no handler has started.
        span: Offsets between the committed offset and the last one received.
        handled_ahead: Whether some of these are handled; else the others are what fills the span.
    """
    if span >= limits.span_max:
        return "span" if handled_ahead else "count"
    if waiting_count >= limits.messages_max:
        return "count"
    return "bytes" if part.blocked else None
