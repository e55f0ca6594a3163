"""Memory of a storage process with many messages."""

from __future__ import annotations

import asyncio
from pathlib import Path

from baton.storage.v1 import storage_service_pb2 as pb
from bench.bench_cluster import TIMEOUT_S, BenchCluster, bench_cluster
from bench.figures import MIB, Figure, Goal, figure
from bench.setup import Setup, batch

QUEUES = 64
MESSAGES_PER_BATCH = 1_000


async def memory(setup: Setup) -> list[Figure]:
    """Measure resident memory after 10 million messages of 100 B in 64 queues."""
    messages = setup.sized(10_000_000, 200_000)
    async with bench_cluster(setup.folder, queue_count=QUEUES) as cluster:
        empty = _resident_bytes(cluster)
        setup.say(f"{messages:,} messages")
        async with asyncio.TaskGroup() as tasks:
            for queue_id in range(QUEUES):
                count = messages // QUEUES // MESSAGES_PER_BATCH + 1
                tasks.create_task(_fill(cluster, queue_id, count))
        full = _resident_bytes(cluster)
    goal = Goal(value_max=400)
    return [
        figure(
            "resident memory, 10 million messages in 64 queues",
            full / MIB,
            "MiB",
            goal,
            reference=empty / MIB,
        )
    ]


async def _fill(cluster: BenchCluster, queue_id: int, count: int) -> None:
    raw = batch(100, queue_id=queue_id, count=MESSAGES_PER_BATCH)
    request = pb.AppendRequest(batches=[raw] * 4, durability=pb.DURABILITY_MEMORY)
    for _ in range(count // 4):
        answer = await cluster.storage.Append(request, timeout=TIMEOUT_S)
        assert answer.outcomes[0].HasField("receipt"), answer


def _resident_bytes(cluster: BenchCluster) -> int:
    status = Path(f"/proc/{cluster.local.pid('storage')}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024
