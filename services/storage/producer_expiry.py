"""Forgets producers that have sent nothing for 7 days."""

from __future__ import annotations

import asyncio

from batonmq._common.clock import Clock
from batonmq_server.storage.core.producers import ProducerTable

INTERVAL_S = 600


async def expire_producers(producers: ProducerTable, clock: Clock) -> None:
    """Remove idle producers until cancelled; run it as one task.

    The age of their last batch counts no jump of the wall clock to a later time: it would make all
    producers idle at once, and their repeated batches would be stored again. A clock that was
    behind when the node started only makes producers stay longer.
    """
    begin_unix_ms, begin_ms = clock.unix_ms(), clock.monotonic_ms()
    while True:
        await asyncio.sleep(INTERVAL_S)
        passed_ms = clock.monotonic_ms() - begin_ms
        producers.expire(min(clock.unix_ms(), begin_unix_ms + passed_ms))
