"""How long a storage process with a long log takes to serve again."""

from __future__ import annotations

import asyncio

from bench.figures import Figure, Goal, figure, seconds
from bench.pulls import fill, forget_pages
from bench.setup import Setup
from bench.site import site

QUEUES = 8


async def starts(setup: Setup) -> list[Figure]:
    """From the start of the process until it serves, the log not in the page cache."""
    batches_per_queue = setup.sized(5 * 2_048 // QUEUES, 16)
    async with site(setup.folder, queue_count=QUEUES) as here:
        cluster = here.cluster
        setup.say("empty")
        await cluster.stop("storage")
        empty_s = await seconds(cluster.start("storage"))
        setup.say("filling 5 GiB")
        await fill(here, QUEUES, batches_per_queue)
        await cluster.stop("storage")
        setup.say("after a clean stop")
        await asyncio.to_thread(forget_pages, here.log_folder)
        clean_s = await seconds(cluster.start("storage"))
        await fill(here, QUEUES, 1)
        await cluster.kill("storage")
        setup.say("after a crash")
        await asyncio.to_thread(forget_pages, here.log_folder)
        crash_s = await seconds(cluster.start("storage"))
    return [
        figure(
            "start with a 5 GiB log after a clean stop",
            clean_s,
            "s",
            Goal(value_max=2),
            reference=empty_s,
        ),
        figure(
            "start with a 5 GiB log after a crash",
            crash_s,
            "s",
            Goal(value_max=15),
            reference=empty_s,
        ),
    ]
