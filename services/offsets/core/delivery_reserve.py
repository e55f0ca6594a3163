"""How far the durable bound of a queue's delivered offset is reserved ahead (protocol 6.8)."""

from __future__ import annotations

from typing import NamedTuple

RESERVE_MIN = 16
"""Smallest step: after a crash, at most so many offsets of a slow queue are flagged in vain."""
SHORT_MS = 200
"""A step that was used up sooner doubles, so that a busy queue writes a bound five times a second
at most."""
LONG_MS = 400
"""A step that lasted longer shrinks to what was delivered in this time."""


class DeliveryReserve(NamedTuple):
    """The step by which the bound of one queue is ahead of D; it follows the rate of deliveries.

    Attributes:
        step: Number of offsets; 0 before the first delivery.
        delivered_offset: D when the step was chosen.
        at_ms: Monotonic time at which the step was chosen.
    """

    step: int = 0
    delivered_offset: int = 0
    at_ms: int = 0

    def used_up(self, delivered_offset: int, now_ms: int, step_max: int) -> DeliveryReserve:
        """Return the step after D has reached `delivered_offset`, beyond the bound."""
        if now_ms - self.at_ms >= SHORT_MS or not self.step:
            return self.shrunk(delivered_offset, now_ms, step_max)
        return DeliveryReserve(min(2 * self.step, step_max), delivered_offset, now_ms)

    def shrunk(self, delivered_offset: int, now_ms: int, step_max: int) -> DeliveryReserve:
        """Return a step that is not larger, and fits the deliveries since it was chosen.

        A step that was chosen less than `LONG_MS` ago stays.
        """
        lasted_ms, used = now_ms - self.at_ms, delivered_offset - self.delivered_offset
        if self.step and lasted_ms < LONG_MS:
            return self
        step = min(self.step, used * LONG_MS // max(lasted_ms, 1))
        return DeliveryReserve(max(step, min(RESERVE_MIN, step_max)), delivered_offset, now_ms)
