"""The cost of the metrics streams: two clusters do the same work by turns, and one publishes.

Figures are messages per second of CPU time of all services, so that other load of the machine has
little effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path

from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.storage.v1 import storage_service_pb2 as pb
from bench.bench_cluster import TIMEOUT_S, BenchCluster, bench_cluster, group_queue
from bench.figures import Figure, Goal, figure, interleaved
from bench.setup import Setup, batch

QUEUES, IN_FLIGHT = 8, 16
RECORD_BYTES, BATCH_RECORDS = 100, 100
PULL_MESSAGES = 100
TRICKLE_PER_S = 10
SERVICES = ("storage", "offsets", "lockmgr", "nameserver")
_groups = count()
_OFF = {service: {"metrics_stream": False} for service in SERVICES}
_EVERY_OTHER = ("a", "b")


async def streams(setup: Setup) -> list[Figure]:
    """Measure small appends, small pulls with acks, and the same pulls with a filter."""
    requests = setup.sized(1_600, 80)
    async with AsyncExitStack() as stack:
        clusters = {
            "on": await stack.enter_async_context(
                bench_cluster(setup.folder / "on", queue_count=QUEUES)
            ),
            "off": await stack.enter_async_context(
                bench_cluster(setup.folder / "off", queue_count=QUEUES, **_OFF)
            ),
        }
        setup.say("produce")
        for cluster in clusters.values():
            await _produce(cluster, requests)
        rounds = setup.sized(17, 1)
        produced = await _by_turns(clusters, lambda cluster: _produce(cluster, requests), rounds)
        setup.say("consume")
        consumed = await _by_turns(
            clusters, lambda cluster: _consume(cluster, requests, ""), rounds
        )
        setup.say("consume with a filter")
        filtered = await _by_turns(
            clusters, lambda cluster: _consume(cluster, requests, "a"), rounds
        )
        setup.say("a little")
        little = await _by_turns(
            clusters, lambda cluster: _produce_a_little(cluster, setup), rounds
        )
    # Equal work in equal time: the difference is the cost of publishing.
    percent = {name: 100 * TRICKLE_PER_S / rate for name, rate in little.items()}
    publishing = figure(
        "metrics streams of a cluster with 10 appends a second, CPU of all services",
        percent["on"] - percent["off"],
        "% of a core",
        Goal(value_max=3),
    )
    compared = {
        "produce 100 B, batches of 100": produced,
        "consume 100 B, pulls of 100": consumed,
        "the same of every other message": filtered,
    }
    return [
        publishing,
        *(
            figure(
                f"{name}, metrics streams on against off, per second of CPU",
                rates["on"],
                "messages/s",
                Goal(ratio_min=0.97),
                reference=rates["off"],
            )
            for name, rates in compared.items()
        ),
    ]


async def _by_turns(
    clusters: dict[str, BenchCluster], work: Callable[[BenchCluster], Awaitable[int]], rounds: int
) -> dict[str, float]:
    def measured(cluster: BenchCluster) -> Callable[[], Awaitable[float]]:
        async def measure() -> float:
            begin_s = _cpu_s(cluster)
            messages = await work(cluster)
            return messages / (_cpu_s(cluster) - begin_s)

        return measure

    return await interleaved(
        {name: measured(cluster) for name, cluster in clusters.items()}, rounds
    )


def _cpu_s(cluster: BenchCluster) -> float:
    """Return the CPU time that the services have used."""
    pids = filter(None, map(cluster.local.pid, cluster.local.options.names))
    threads = (path for pid in pids for path in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((path / "schedstat").read_text().split()[0]) for path in threads) / 1e9


async def _produce(cluster: BenchCluster, requests: int) -> int:
    """Append the batches; return the number of messages."""
    raws = [
        batch(RECORD_BYTES, queue_id=queue_id, count=BATCH_RECORDS, tags=_EVERY_OTHER)
        for queue_id in range(QUEUES)
    ]
    left = iter(range(requests))

    async def worker() -> None:
        for index in left:
            request = pb.AppendRequest(
                batches=[raws[index % QUEUES]], durability=pb.DURABILITY_FSYNCED
            )
            answer = await cluster.storage.Append(request, timeout=TIMEOUT_S)
            assert answer.outcomes[0].HasField("receipt"), answer

    async with asyncio.TaskGroup() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.create_task(worker())
    return requests * BATCH_RECORDS


async def _produce_a_little(cluster: BenchCluster, setup: Setup) -> int:
    """Append a batch at intervals; return their number."""
    raw = batch(RECORD_BYTES, count=1)
    request = pb.AppendRequest(batches=[raw], durability=pb.DURABILITY_FSYNCED)
    count_ = setup.sized(10, 2) * TRICKLE_PER_S
    for _ in range(count_):
        await cluster.storage.Append(request, timeout=TIMEOUT_S)
        await asyncio.sleep(1 / TRICKLE_PER_S)
    return count_


async def _consume(cluster: BenchCluster, requests: int, expression: str) -> int:
    """Pull messages with a new group; return the number of scanned messages."""
    group = f"streams-{next(_groups)}"
    token = await cluster.own(group, QUEUES)
    each = requests * BATCH_RECORDS // QUEUES

    async def pull_all(queue_id: int) -> None:
        offset = 0
        while offset < each:
            request = pb.PullRequest(
                queue=group_queue(group, queue_id),
                offset=offset,
                token=token,
                messages_max=PULL_MESSAGES,
                expression=expression,
                client_id="bench",
                progress=offsets_pb.Acks(committed_offset=offset) if offset else None,
            )
            answer = await cluster.storage.Pull(request, timeout=TIMEOUT_S)
            assert answer.next_offset > offset, answer
            offset = answer.next_offset

    async with asyncio.TaskGroup() as tasks:
        for queue_id in range(QUEUES):
            tasks.create_task(pull_all(queue_id))
    return each * QUEUES
