"""When long polls without a message end."""

from __future__ import annotations

LONG_WAIT_MS = 10_000
"""Calls that wait less end at their own time."""
STEP_MS = 250


def shared_wait_ms(now_ms: int, wait_ms: int) -> int:
    """Return how long a call waits at most, so that many calls end at the same moment.

    A long wait ends at a multiple of `STEP_MS` of the clock, up to one step early and never late.
    Calls that end together wake the event loop and the threads of gRPC once for all of them.
    """
    if wait_ms < LONG_WAIT_MS:
        return wait_ms
    return wait_ms - (now_ms + wait_ms) % STEP_MS
