"""Tells offsets what was sent in the advances that have ended (protocol 6.8)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from batonmq._common.clock import Clock
from batonmq.errors import BatonError
from batonmq_server.storage.delivery_advance import DeliveryAdvance
from batonmq_server.storage.delivery_recorder import Settlement

INTERVAL_S = 1.0
"""Time between two looks for advances that must be settled."""
ATTEMPTS_MAX = 30
"""After so many calls without an answer, offsets counts the advance as delivered."""


@dataclass(slots=True)
class _Attempts:
    settlement: Settlement
    count: int = 0


class AdvanceSettler:
    """Settles the advances of all deliveries of one node.

    Args:
        settle: Sends a settlement; raises a `BatonError` if it was not answered.
    """

    def __init__(self, settle: Callable[[Settlement], Awaitable[None]], clock: Clock) -> None:
        self._settle, self._clock = settle, clock
        self._open: dict[DeliveryAdvance, None] = {}
        self._unanswered: list[_Attempts] = []
        self._begun = asyncio.Event()

    def watch(self, advance: DeliveryAdvance) -> None:
        """Settle an advance that has begun as soon as it is due."""
        self._open[advance] = None
        self._begun.set()

    async def run(self) -> None:
        """Settle advances until cancelled."""
        while True:
            await self._begun.wait()
            await asyncio.sleep(INTERVAL_S)
            await self.settle_due()
            if not self._open and not self._unanswered:
                self._begun.clear()

    async def settle_due(self) -> None:
        """Settle the advances that are due, and repeat the settlements without an answer."""
        now_ms = self._clock.monotonic_ms()
        for advance in [advance for advance in self._open if advance.is_due(now_ms)]:
            del self._open[advance]
            self._unanswered.append(_Attempts(advance.settle()))
        attempts, self._unanswered = self._unanswered, []
        if attempts:
            async with asyncio.TaskGroup() as tasks:
                for each in attempts:
                    tasks.create_task(self._attempt(each))

    async def _attempt(self, attempts: _Attempts) -> None:
        try:
            await self._settle(attempts.settlement)
        except BatonError:
            attempts.count += 1
            if attempts.count < ATTEMPTS_MAX:
                self._unanswered.append(attempts)
