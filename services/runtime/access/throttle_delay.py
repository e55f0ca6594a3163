"""Delays the answers to throttled calls, so that a caller that ignores the wait sends less.

A caller has a bounded number of calls in flight. If a rejected call is answered at once, a caller
that tries again at once takes a large part of the event loop with calls that are all rejected.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc.aio

from batonmq._common.clock import Clock
from batonmq.errors import Throttled

DELAY_MS_MAX = 1_000
"""Longest delay of an answer; the rest of the wait is for the caller."""
OFTEN = 10
"""Rejected calls of an identity in a second beyond which each answer is delayed for longest."""
DELAYED_MAX = 1_000
"""Delayed answers of one identity; beyond this number calls are answered at once."""

IDENTITIES_MAX = 1_000
"""Identities beyond which those without rejected calls are forgotten."""
_WINDOW_MS = 1_000


@dataclass(slots=True)
class _Rejected:
    """Rejected calls of an identity: in the present second, and those not answered yet."""

    begin_ms: int
    count: int = 0
    delayed: int = 0


class ThrottleDelay:
    """Delays answers to throttled calls, a bounded number of each identity."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rejected: dict[str, _Rejected] = {}

    async def delayed(
        self, error: Throttled, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Throttled:
        """Wait for a part of the time that the error names; return it with the rest of the time.

        If the identity has had many calls rejected in this second, wait longer than that: it
        ignores the time. The wait ends well before the deadline of the call, so that the caller
        gets the reason.
        """
        identity = str(error.facts.get("identity", ""))
        rejected = self._count(identity)
        often = rejected.count > OFTEN
        delay_ms = DELAY_MS_MAX if often else min(error.retry_after_ms, DELAY_MS_MAX)
        if (left_s := context.time_remaining()) is not None:
            delay_ms = min(delay_ms, int(left_s * 500))
        if delay_ms <= 0 or rejected.delayed >= DELAYED_MAX:
            return error
        rejected.delayed += 1
        try:
            await asyncio.sleep(delay_ms / 1000)
        finally:
            rejected.delayed -= 1
        rest_ms = max(1, error.retry_after_ms - delay_ms)
        return Throttled(error.message, retry_after_ms=rest_ms, facts=error.facts)

    def _count(self, identity: str) -> _Rejected:
        """Count a rejected call; return those of its identity."""
        now_ms = self._clock.monotonic_ms()
        if len(self._rejected) >= IDENTITIES_MAX and identity not in self._rejected:
            self._rejected = {
                name: one
                for name, one in self._rejected.items()
                if one.delayed or now_ms - one.begin_ms < _WINDOW_MS
            }
        rejected = self._rejected.setdefault(identity, _Rejected(now_ms))
        if now_ms - rejected.begin_ms >= _WINDOW_MS:
            rejected.begin_ms, rejected.count = now_ms, 0
        rejected.count += 1
        return rejected
