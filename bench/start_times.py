"""Start time of a storage process with a long log."""

from __future__ import annotations

import asyncio

from bench.bench_cluster import bench_cluster
from bench.figures import Figure, Goal, figure, seconds
from bench.pulls import fill, forget_pages
from bench.setup import Setup

QUEUES = 8


async def starts(setup: Setup) -> list[Figure]:
    """Measure the time from the start of the process until it serves, with a cold page cache."""
    batches_per_queue = setup.sized(5 * 2_048 // QUEUES, 16)
    async with bench_cluster(setup.folder, queue_count=QUEUES) as cluster:
        local = cluster.local
        setup.say("empty")
        await local.stop("storage")
        empty_s = await seconds(local.start("storage"))
        setup.say("filling 5 GiB")
        await fill(cluster, QUEUES, batches_per_queue)
        await local.stop("storage")
        setup.say("after a clean stop")
        await asyncio.to_thread(forget_pages, cluster.log_folder)
        clean_s = await seconds(local.start("storage"))
        await fill(cluster, QUEUES, 1)
        await local.kill("storage")
        setup.say("after a crash")
        await asyncio.to_thread(forget_pages, cluster.log_folder)
        crash_s = await seconds(local.start("storage"))
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
