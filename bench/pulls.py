"""Pulls of a backlog, with and without the page cache."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter

from baton.storage.v1 import storage_service_pb2 as pb
from bench.bench_cluster import TIMEOUT_S, BenchCluster, bench_cluster, group_queue
from bench.figures import MIB, Figure, Goal, figure, interleaved
from bench.setup import Setup, batch

QUEUES = 8
PULL_BYTES = 4 * MIB
_groups = count()


async def pulls(setup: Setup) -> list[Figure]:
    """Measure pulls of backlogs of 1 KiB records: one pull of 4 MiB per queue in flight."""
    async with bench_cluster(setup.folder, queue_count=QUEUES) as cluster:
        setup.say("filling")
        batches_per_queue = setup.sized(128, 16)
        await fill(cluster, QUEUES, batches_per_queue)
        rounds = setup.sized(7, 1)
        size = QUEUES * batches_per_queue // 2 * MIB

        async def hot() -> float:
            return await _measured(cluster, size)

        async def cold() -> float:
            await asyncio.to_thread(forget_pages, cluster.log_folder)
            return await _measured(cluster, size)

        setup.say("hot and cold")
        rates = await interleaved(
            {"echo": lambda: _echo_rate(cluster, size), "hot": hot, "cold": cold}, rounds
        )
    return [
        figure(
            f"pull of a {name} backlog",
            rates[name],
            "MiB/s",
            Goal(ratio_min=0.6),
            reference=rates["echo"],
        )
        for name in ("hot", "cold")
    ]


async def fill(
    cluster: BenchCluster, queue_count: int, batches_per_queue: int, record_bytes: int = 1_024
) -> None:
    """Append `count` batches of 512 KiB to each queue, and wait until all are on disk."""

    async def fill_queue(queue_id: int) -> None:
        raw = batch(record_bytes, queue_id=queue_id)
        request = pb.AppendRequest(batches=[raw], durability=pb.DURABILITY_MEMORY)
        for index in range(batches_per_queue):
            if index == batches_per_queue - 1:
                request.durability = pb.DURABILITY_FSYNCED
            answer = await cluster.storage.Append(request, timeout=TIMEOUT_S)
            assert answer.outcomes[0].HasField("receipt"), answer

    async with asyncio.TaskGroup() as tasks:
        for queue_id in range(queue_count):
            tasks.create_task(fill_queue(queue_id))


def forget_pages(folder: Path) -> None:
    """Drop every file in `folder` from the page cache."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


async def _measured(cluster: BenchCluster, size: int) -> float:
    group = f"bench-{next(_groups)}"
    token = await cluster.own(group, QUEUES)
    return await _rate(size, lambda queue_id: partial(_pull_all, cluster, group, token, queue_id))


async def _pull_all(cluster: BenchCluster, group: str, token: int, queue_id: int) -> None:
    offset = 0
    while True:
        request = pb.PullRequest(
            queue=group_queue(group, queue_id),
            offset=offset,
            token=token,
            bytes_max=PULL_BYTES,
            messages_max=65_535,
        )
        answer = await cluster.storage.Pull(request, timeout=TIMEOUT_S)
        if answer.next_offset == offset:
            return
        offset = answer.next_offset


async def _echo_rate(cluster: BenchCluster, size: int) -> float:
    async def pull_as_many() -> None:
        request = pb.PullRequest(bytes_max=PULL_BYTES)
        for _ in range(size // PULL_BYTES // QUEUES):
            await cluster.echo.Pull(request, timeout=TIMEOUT_S)

    return await _rate(size, lambda _: pull_as_many)


async def _rate(size: int, worker: Callable[[int], Callable[[], Awaitable[None]]]) -> float:
    begin = perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for queue_id in range(QUEUES):
            tasks.create_task(worker(queue_id)())  # type: ignore[arg-type]
    return size / MIB / (perf_counter() - begin)
