"""Goal: a producer is forgotten 7 days after its last batch, by the time that has really passed.

Method: a virtual event loop; the test sets the wall clock.
"""

from __future__ import annotations

import asyncio

import pytest

from batonmq._common.clock import Clock
from batonmq_server.storage.core.producers import IDLE_MS_MAX, ProducerState, ProducerTable
from batonmq_server.storage.producer_expiry import INTERVAL_S, expire_producers
from batonmq_server.testing.virtual_time import VirtualTimeLoop
from tests.storage.batches import NOW

WEEK_S = IDLE_MS_MAX / 1000


class JumpingClock(Clock):
    """A wall clock that goes on with the event loop, and jumps.

    Attributes:
        jumped_ms: Sum of all jumps.
    """

    jumped_ms = 0

    def unix_ms(self) -> int:
        return NOW + int(asyncio.get_running_loop().time() * 1000) + self.jumped_ms


@pytest.mark.parametrize("jump_ms", [0, 10 * IDLE_MS_MAX, -10 * IDLE_MS_MAX])
def test_jump_of_the_clock_does_not_make_producers_idle(jump_ms: int) -> None:
    async def known_after(seconds: float) -> bool:
        clock, table = JumpingClock(), ProducerTable()
        table.load([ProducerState(5, 1, clock.unix_ms(), {(7, 0): ()})])
        async with asyncio.TaskGroup() as tasks:
            expiring = tasks.create_task(expire_producers(table, clock))
            await asyncio.sleep(1)
            clock.jumped_ms = jump_ms
            await asyncio.sleep(seconds)
            expiring.cancel()
        return len(table) == 1

    for seconds, expected in (
        (2 * INTERVAL_S, True),
        (WEEK_S - INTERVAL_S, True),
        (WEEK_S + INTERVAL_S, jump_ms < 0),
    ):
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            assert runner.run(known_after(seconds)) == expected, seconds
