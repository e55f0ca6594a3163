"""Delays the answers to throttled calls, so that a caller that ignores the wait sends less.

If a rejected call is answered at once, a caller that tries again at once takes a large part of the
event loop with calls that are all rejected. A delay bounds a caller with a bounded number of calls
in flight. The connections of any other one are paused: each identity may have so many calls
rejected as clients that wait need, and a connection with more of them ignores the waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from batonmq._common.clock import Clock
from batonmq.errors import Throttled
from batonmq_server.runtime.access.quotas import TokenBucket

DELAY_MS_MAX = 1_000
"""Longest delay of an answer; the rest of the wait is for the caller."""
OFTEN = 10
"""Rejected calls of an identity in a second beyond which each answer is delayed for longest."""
DELAYED_MAX = 1_000
"""Delayed answers of one identity; beyond this number calls are answered at once."""
REJECTED_PER_S, REJECTED_BURST = 20, 1_000
"""Calls that an identity may have rejected: over a longer time, and at once. A consumer may pull a
thousand queues at the moment when its quota is used up."""
REJECTED_PER_CONNECTION = 30
"""Calls that a connection may have rejected in a second beyond that before it is paused."""

IDENTITIES_MAX = 1_000
"""Identities beyond which those without rejected calls are forgotten."""
_WINDOW_MS = 1_000


@dataclass(slots=True)
class _Rejected:
    """Rejected calls of an identity: in the present second, and those not answered yet.

    Attributes:
        by_connection: Those of the present second, by the client of the connection.
        allowance: Calls that it may have rejected.
    """

    begin_ms: int
    allowance: TokenBucket
    count: int = 0
    delayed: int = 0
    by_connection: dict[str, int] = field(default_factory=dict)

    def add(self, connection: str, now_ms: int) -> None:
        """Count a rejected call."""
        if now_ms - self.begin_ms >= _WINDOW_MS:
            self.begin_ms, self.count = now_ms, 0
            self.by_connection.clear()
        self.count += 1
        self.by_connection[connection] = self.by_connection.get(connection, 0) + 1

    def ignores_waits(self, connection: str, now_ms: int) -> bool:
        """Return whether a connection sends calls that no waiting client would send."""
        if not self.allowance.wait_ms(now_ms):
            self.allowance.take(1)
            return False
        return self.by_connection[connection] > REJECTED_PER_CONNECTION


class ThrottleDelay:
    """Delays answers to throttled calls, a bounded number of each identity.

    Args:
        pause: Pauses a connection, which is named by its client.
    """

    def __init__(self, clock: Clock, pause: Callable[[str], None] = lambda _: None) -> None:
        self._clock, self._pause = clock, pause
        self._rejected: dict[str, _Rejected] = {}

    async def delayed(
        self, error: Throttled, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Throttled:
        """Wait for a part of the time that the error names; return it with the rest of the time.

        If the identity has had many calls rejected in this second, wait longer than that: it
        ignores the time. The wait ends well before the deadline of the call, so that the caller
        gets the reason. The connection of a call beyond the allowance is paused.
        """
        identity, connection = str(error.facts.get("identity", "")), context.peer() or ""
        now_ms = self._clock.monotonic_ms()
        rejected = self._of(identity, now_ms)
        rejected.add(connection, now_ms)
        if rejected.ignores_waits(connection, now_ms):
            self._pause(connection)
            return error
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

    def _of(self, identity: str, now_ms: int) -> _Rejected:
        """Return the rejected calls of an identity."""
        if len(self._rejected) >= IDENTITIES_MAX and identity not in self._rejected:
            self._rejected = {
                name: one
                for name, one in self._rejected.items()
                if one.delayed or now_ms - one.begin_ms < _WINDOW_MS
            }
        if (rejected := self._rejected.get(identity)) is None:
            allowance = TokenBucket(REJECTED_PER_S, now_ms, REJECTED_BURST)
            rejected = self._rejected[identity] = _Rejected(now_ms, allowance)
        return rejected
